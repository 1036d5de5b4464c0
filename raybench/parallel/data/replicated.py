"""What all unsharded data-parallel strategies share: each rank holds a replica (of its part) of the model."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raybench.data.batches import Batch
from raybench.errors import RequestError
from raybench.parallel.execution import Execution
from raybench.parallel.parts import Sharing
from raybench.parallel.strategy import Context, Held, StateBytes, Strategy, distinct_bytes, optimizer_tensors
from raybench.worker.communication import Axis


class Replicated(Strategy):
    """One replica of the model. Subclasses say how gradients become the sum over all ranks."""

    gradient_axes: tuple[Axis, ...] = ()
    """Axes over which what `gradients` returns is cut."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.axis = context.mesh.data
        self.model = context.model
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.may_send = False
        """Whether gradients may be sent during backward: not in the first step, before all ranks know that every
        parameter is used."""
        self.scale: Tensor | None = None
        """What clipping multiplied the gradients of the last step by."""
        self.parts = context.parts
        self.execution = self.make_execution()
        self._broadcast_state()
        self.lay_out()
        self.optimizers = self.make_optimizers()
        self.schedulers = [context.make_scheduler(optimizer) for optimizer in self.optimizers]

    def make_execution(self) -> Execution:
        return self.context.make_execution()

    def lay_out(self) -> None:
        """Arrange parameters and gradients before the optimizer is made."""

    def make_optimizers(self) -> list[Optimizer]:
        return [self.context.make_optimizer(self.parameters.values())]

    def before_step(self) -> None:
        """Called before the first forward pass of a step."""

    def before_backward(self, last: bool) -> None:
        """Called before every micro-batch's backward pass."""

    def after_backward(self, last: bool) -> None:
        """Called after every micro-batch's backward pass."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Called after the last backward pass: every gradient becomes the sum over the axis, at the latest when
        `update` uses it."""

    def update(self) -> None:
        """Sum what ranks beside the data axis share, clip, then take the optimizer's step."""
        gradients = self.gradients()
        for sharing, tensors in gradients.items():
            sum_shared(sharing, tensors)
        self.gradient_norm = self.parts.norm(gradients, *self.gradient_axes)
        limit = self.context.clip_gradient_norm
        if limit is not None:
            self.scale = (limit / (self.gradient_norm + 1e-6)).clamp(max=1.0)
            for tensors in gradients.values():
                torch._foreach_mul_(tensors, self.scale)
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self, batch: Batch) -> Tensor:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.before_step()
        loss = self.execution.run(batch, self) / self.context.mesh.tensor.size
        if not self.may_send:
            self.refuse_unused_parameters()
            self.may_send = True
        self.reduce_gradients()
        loss_sum = self.context.mesh.all.all_reduce(loss, label="loss")
        self.update()
        for scheduler in self.schedulers:
            scheduler.step()
        loss_sum.wait()
        return loss

    def gradients(self) -> dict[Sharing, list[Tensor]]:
        """The tensors that hold all gradients of this rank, each element once, by how they are shared."""
        by_sharing: dict[Sharing, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            by_sharing.setdefault(self.parts.sharing(name), []).append(gradient(parameter))
        return by_sharing

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self.parts.whole((name, self._unclipped(gradient(p))) for name, p in self.parameters.items())

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.parts.whole((name, p.detach()) for name, p in self.parameters.items())

    def held_parameters(self) -> Iterable[Tensor]:
        return self.model.parameters()

    def state_bytes(self) -> StateBytes:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return StateBytes(
            parameters=distinct_bytes(self.model.parameters()),
            gradients=distinct_bytes(gradients),
            optimizer=distinct_bytes(optimizer_tensors(self.optimizers)),
        )

    def instrument(self) -> bool:
        return self.execution.recorded and self.context.recorded

    def held_states(self) -> Iterator[Held]:
        self.refuse_cut_model()
        first = self.axis.index == 0
        for name, parameter in self.parameters.items():
            yield Held(self.optimizers[0], parameter, [(name, parameter.numel())], 0, first)

    def refuse_cut_model(self) -> None:
        """Checkpoints name whole parameters: of a model cut over other axes no rank holds them."""
        if self.context.mesh.model.size > 1:
            layout = self.context.mesh.layout
            raise RequestError(f"checkpoint: layout {layout} cannot be saved (allowed: pipeline 1, tensor 1)")

    def states_loaded(self, num_steps: int) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = num_steps
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # rates are asked for outside of a step, on purpose
                rates = scheduler.get_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _unclipped(self, gradient: Tensor) -> Tensor:
        return gradient if self.scale is None else gradient / self.scale

    def _broadcast_state(self) -> None:
        """Every rank begins with the first rank's parameters and buffers."""
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            self.axis.broadcast(tensor.detach(), label=name).wait()

    def was_used(self, parameter: nn.Parameter) -> bool:
        """Whether a backward pass of the first step has given `parameter` a gradient on this rank."""
        return parameter.grad is not None

    def refuse_unused_parameters(self) -> None:
        """Name the parameters that no rank's loss uses; those that some ranks do not use are reduced with zeros.

        Raises:
            UnusedParameterError: on all ranks alike.
        """
        counts = torch.tensor([float(self.was_used(p)) for p in self.parameters.values()])
        counts = counts.to(next(iter(self.parameters.values())).device)
        self.axis.all_reduce(counts, label="parameters used").wait()
        unused = [name for name, count in zip(self.parameters, counts.tolist(), strict=True) if not count]
        if unused:
            raise UnusedParameterError(unused)


class UnusedParameterError(Exception):
    """Parameters that take no part in the loss on any rank: they would be decayed, never trained."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"parameters that no rank's loss uses: {', '.join(names)}; freeze them (requires_grad=False) or leave "
            "them out of the model"
        )


def gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, zeros where no micro-batch of this rank used it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@torch.no_grad()
def sum_shared(sharing: Sharing, gradients: Sequence[Tensor]) -> None:
    """Sum gradients, in place, over the ranks beside the data axis that hold a copy of their parameters."""
    if sharing.axis is None or sharing.axis.size == 1:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    sharing.axis.all_reduce(flat, label="shared gradients").wait()
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view(gradient.shape))
