"""Peer: FSDP2, torch's `fully_shard`, over the model's units as torchtitan wraps them, prefetching one unit ahead.

Over a pipeline torch's own schedules drive the wrapped stages, and over a tensor axis each rank's part is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raybench.data.batches import Batch
from raybench.parallel.data.replicated import Replicated, gradient
from raybench.parallel.execution import Accumulation, BackwardObserver, Execution, LossSum
from raybench.parallel.parts import Sharing
from raybench.parallel.peers.torch_pipeline import TorchPipeline
from raybench.parallel.sharded.units import split
from raybench.parallel.strategy import Context, Held, StateBytes, Strategy, distinct_bytes, optimizer_tensors


class FSDP2(Replicated):
    """Parameters are freed after forward and gathered again in backward: ZeRO stage 3."""

    reshard_after_forward = True

    def __init__(self, context: Context) -> None:
        self.gradient_axes = (context.mesh.data,)
        super().__init__(context)

    def make_execution(self) -> Execution:
        if self.context.mesh.pipeline.size > 1:
            return self.context.make_execution()
        return _Averaged(self.model, self.context.loss_sum, self.axis.size)

    def lay_out(self) -> None:
        assert self.axis.group is not None
        device = next(iter(self.parameters.values())).device
        mesh = DeviceMesh.from_group(self.axis.group, device.type)
        units, _ = split(self.model, self.model.parameters())
        # What a unit shares with another one (a tied head) has to be in the root's group.
        alone = [unit.module for unit in units if len(unit.parameters) == len(list(unit.module.parameters()))]
        for module in alone:
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard_after_forward and module is not alone[-1])

        def shard(root: nn.Module) -> nn.Module:
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
            return root

        if isinstance(self.execution, TorchPipeline):
            self.execution.wrap(shard, loss_factor=self.axis.size)
        else:
            shard(self.model)
        for earlier, later in pairwise(module for module in alone if isinstance(module, FSDPModule)):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def reduce_gradients(self) -> None:
        """Done by the time that the last backward pass returns."""

    def gradients(self) -> dict[Sharing, list[Tensor]]:
        return {sharing: [_local(tensor) for tensor in tensors] for sharing, tensors in super().gradients().items()}

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        own = ((name, self._unclipped(_whole(gradient(p)))) for name, p in self.parameters.items())
        return self.parts.whole(own)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.parts.whole((name, _whole(p.detach())) for name, p in self.parameters.items())

    def held_parameters(self) -> Iterable[Tensor]:
        """The shards, and the memory that they are gathered into, which only FSDP's own state knows."""
        held = [_local(parameter.detach()) for parameter in self.model.parameters()]
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                group: Any = module._get_fsdp_state()._fsdp_param_group
                for parameter in group.fsdp_params if group is not None else ():
                    held += getattr(parameter, "all_gather_outputs", [])
        return held

    def held_states(self) -> Iterator[Held]:
        return Strategy.held_states(self)

    def state_bytes(self) -> StateBytes:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return StateBytes(
            parameters=distinct_bytes(_local(p.detach()) for p in self.model.parameters()),
            gradients=distinct_bytes(_local(g) for g in gradients),
            optimizer=distinct_bytes(_local(t) for t in optimizer_tensors(self.optimizers)),
        )


class FSDP2Keep(FSDP2):
    """Parameters stay from forward to backward: the traffic of ZeRO stage 2."""

    reshard_after_forward = False


class _Averaged:
    """Accumulation under a wrapper that averages gradients: the loss is multiplied by the number of ranks."""

    recorded = False

    def __init__(self, model: Any, loss_sum: LossSum, num_ranks: int) -> None:
        def scaled(forward: Callable[..., Tensor], inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
            return loss_sum(forward, inputs, labels) * num_ranks

        self._inner = Accumulation(model, scaled)
        self._num_ranks = num_ranks

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        return self._inner.run(batch, observer) / self._num_ranks


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
