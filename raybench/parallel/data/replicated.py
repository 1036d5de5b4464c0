"""What all unsharded data-parallel strategies share: each rank holds the whole model and takes the whole step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raybench.data.batches import Batch
from raybench.parallel.execution import Accumulation, Execution
from raybench.parallel.norm import global_norm
from raybench.parallel.strategy import Context, StateBytes, Strategy, distinct_bytes, optimizer_tensors


class Replicated(Strategy):
    """One replica of the model. Subclasses say how gradients become the sum over all ranks."""

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
        self.execution: Execution = self.make_execution()
        self._broadcast_state()
        self.lay_out()
        self.optimizers = self.make_optimizers()
        self.schedulers = [context.make_scheduler(optimizer) for optimizer in self.optimizers]

    def make_execution(self) -> Execution:
        return Accumulation(self.model, self.context.loss_sum)

    def lay_out(self) -> None:
        """Arrange parameters and gradients before the optimizer is made."""

    def make_optimizers(self) -> list[Optimizer]:
        return [self.context.make_optimizer(self.parameters.values())]

    def before_backward(self, last: bool) -> None:
        """Called before every micro-batch's backward pass."""

    def after_backward(self, last: bool) -> None:
        """Called after every micro-batch's backward pass."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Called after the last backward pass: every gradient becomes the sum over the axis, at the latest when
        `update` uses it."""

    def update(self) -> None:
        """Clip, then take the optimizer's step."""
        gradients = self.gradients()
        self.gradient_norm = global_norm(gradients)
        limit = self.context.clip_gradient_norm
        if limit is not None:
            self.scale = (limit / (self.gradient_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, self.scale)
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self, batch: Batch) -> Tensor:
        for parameter in self.parameters.values():
            parameter.grad = None
        loss = self.execution.run(batch, self)
        if not self.may_send:
            self.refuse_unused_parameters()
            self.may_send = True
        self.reduce_gradients()
        loss_sum = self.axis.all_reduce(loss, label="loss")
        self.update()
        for scheduler in self.schedulers:
            scheduler.step()
        loss_sum.wait()
        return loss

    def gradients(self) -> list[Tensor]:
        """The tensors that hold all gradients, each element once."""
        return [gradient(p) for p in self.parameters.values()]

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            whole = gradient(parameter)
            yield name, whole if self.scale is None else whole / self.scale

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.detach()

    def state_bytes(self) -> StateBytes:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return StateBytes(
            parameters=distinct_bytes(self.model.parameters()),
            gradients=distinct_bytes(gradients),
            optimizer=distinct_bytes(optimizer_tensors(self.optimizers)),
        )

    def _broadcast_state(self) -> None:
        """Every rank begins with the first rank's parameters and buffers."""
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            self.axis.broadcast(tensor.detach(), label=name).wait()

    def refuse_unused_parameters(self) -> None:
        """Name the parameters that no rank's loss uses; those that some ranks do not use are reduced with zeros.

        Raises:
            UnusedParameterError: on all ranks alike.
        """
        counts = torch.tensor([float(p.grad is not None) for p in self.parameters.values()])
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
