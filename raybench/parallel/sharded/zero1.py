"""ZeRO stage 1 (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").

Parameters and gradients are whole on every rank; the optimizer's state is not. Buckets are laid out flat, as in
`bucketed`, padded and cut into one equal part a rank, wherever parameters begin and end. A bucket's gradient is
reduce-scattered inside the last backward pass, each rank updates its part, and the parts are gathered again: the bytes
of one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raybench.models.build import MadeByName
from raybench.parallel.data.bucketed import Bucket, Bucketed
from raybench.parallel.data.replicated import sum_shared
from raybench.parallel.norm import global_norm
from raybench.parallel.parts import Sharing
from raybench.parallel.sharded.units import Unit, split, uncompiled
from raybench.parallel.strategy import Held, StateBytes, distinct_bytes, optimizer_tensors
from raybench.worker.communication import Axis, Pending


class ShardedBucket(Bucket):
    """A bucket cut into one equal part a rank of `axis`."""

    def __init__(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing, axis: Axis) -> None:
        super().__init__(label, parameters, sharing, axis, multiple=axis.size)
        self.part = self.own_part(self.flat.detach())
        """This rank's part of the parameters, as it is gathered."""
        self.gathering: Pending | None = None
        self.lay_out_shard()

    def own_part(self, flat: Tensor) -> Tensor:
        return flat.view(self.axis.size, -1)[self.axis.index]

    def lay_out_shard(self) -> None:
        """What the optimizer trains: the part itself, or its fp32 copy where parameters have 16 bits."""
        self.has_master = self.part.dtype in (torch.bfloat16, torch.float16)
        self.shard = nn.Parameter(self.part.float() if self.has_master else self.part)

    @property
    def shard_gradient(self) -> Tensor:
        """The summed gradient of this rank's part."""
        assert self.shard.grad is not None  # after `wait`
        return self.shard.grad

    def reduce(self) -> None:
        self.pending = self.axis.reduce_scatter(self.own_part(self.gradient), self.gradient, label=self.label)

    def wait(self) -> None:
        super().wait()
        own = self.own_part(self.gradient)
        self.shard.grad = own.float() if self.has_master else own

    def publish(self) -> None:
        """Begin to give every rank the updated part."""
        self.write_back()
        self.gathering = self.axis.all_gather(self.flat.detach(), self.part, label=self.label)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the fp32 copy to the part."""
        if self.has_master:
            self.part.copy_(self.shard)

    def wait_for_parameters(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def whole(self, part: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its whole tensor, one at a time, out of the ranks' parts of a flat tensor."""
        begin = 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            yield parameter, whole_range(part, begin, shape, self.axis, self.label)
            begin += shape.numel()


def whole_range(part: Tensor, begin: int, shape: torch.Size, axis: Axis, label: str) -> Tensor:
    """A tensor of `shape` that begins at element `begin` of a flat one, of which each rank of `axis` has a `part`."""
    length, end = part.numel(), begin + shape.numel()
    tensor = part.new_empty(shape.numel())
    for place in range(begin // length, -(-end // length)):
        first, last = max(begin, place * length), min(end, (place + 1) * length)
        piece = tensor[first - begin : last - begin]
        if place == axis.index:
            piece.copy_(part[first - place * length : last - place * length])
        axis.broadcast(piece, label=label, place=place).wait()
    return tensor.view(shape)


class Zero1(Bucketed):
    """Optimizer state in parts; parameters come back as late as the next forward pass needs them."""

    buckets: Sequence[ShardedBucket]

    def lay_out(self) -> None:
        self.shards = self.context.mesh.shards
        """The ranks that hold the parts of one copy of the states."""
        super().lay_out()
        self._hooks += self.hook_forward()

    def make_bucket(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing) -> ShardedBucket:
        return ShardedBucket(label, parameters, sharing, self.shards)

    def make_optimizers(self) -> list[Optimizer]:
        return [self.context.make_optimizer([bucket.shard]) for bucket in self.buckets]

    def hook_forward(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Let each unit wait for its own parameters.

        A model of one's own may use a layer's parameters without calling the layer: then all are waited for at once.
        """
        self._awaited_first: list[ShardedBucket] = list(self.buckets)
        if not isinstance(self.model, MadeByName):
            return []
        bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        units, rest = split(self.model, bucket_of)
        self._awaited_first = list({bucket_of[parameter]: None for parameter in rest})

        def make_hook(unit: Unit) -> Callable[..., None]:
            needed = list({bucket_of[parameter]: None for parameter in unit.parameters})
            return uncompiled(unit.module, lambda *_: _wait_for_parameters(needed))

        return [unit.module.register_forward_pre_hook(make_hook(unit)) for unit in units]

    def before_step(self) -> None:
        _wait_for_parameters(self._awaited_first)
        super().before_step()

    def update(self) -> None:
        """Without clipping, a bucket is updated as it arrives; with it, all have to be there first."""
        limit = self.context.clip_gradient_norm
        norms: dict[Sharing, list[Tensor]] = {}
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            bucket.wait()
            sum_shared(bucket.sharing, [bucket.shard_gradient])
            norms.setdefault(bucket.sharing, []).append(global_norm([bucket.shard_gradient]))
            if limit is None:
                optimizer.step()
                bucket.publish()
        self.gradient_norm = self.parts.norm(norms, self.shards)
        if limit is None:
            return
        self.scale = (limit / (self.gradient_norm + 1e-6)).clamp(max=1.0)
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            bucket.shard_gradient.mul_(self.scale)
            optimizer.step()
            bucket.publish()

    def settle(self) -> None:
        _wait_for_parameters(self.buckets)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        parts = {bucket: bucket.shard_gradient for bucket in self.buckets}
        return self.parts.whole((name, self._unclipped(whole)) for name, whole in self.whole_tensors(parts))

    def whole_tensors(self, parts: Mapping[ShardedBucket, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every trained parameter, one at a time, out of the ranks' parts of all buckets."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        for bucket, part in parts.items():
            yield from ((names[parameter], whole) for parameter, whole in bucket.whole(part))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        self.settle()
        return super().full_parameters()

    def held_states(self) -> Iterator[Held]:
        self.refuse_cut_model()
        self.settle()
        is_first = self.context.mesh.replicas.index == 0
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            begin = self.shards.index * bucket.shard.numel()
            yield Held(optimizer, bucket.shard, self.named_sizes(bucket), begin, is_first)

    def states_loaded(self, num_steps: int) -> None:
        super().states_loaded(num_steps)
        for bucket in self.buckets:
            bucket.publish()

    def state_bytes(self) -> StateBytes:
        return StateBytes(
            parameters=distinct_bytes(self.held_parameters()),
            gradients=distinct_bytes(self.held_gradients()),
            optimizer=distinct_bytes(optimizer_tensors(self.optimizers)) + self._master_bytes(),
        )

    def held_gradients(self) -> list[Tensor]:
        """The tensors that hold gradients between steps."""
        return [bucket.gradient for bucket in self.buckets]

    def _master_bytes(self) -> int:
        return distinct_bytes(bucket.shard for bucket in self.buckets if bucket.has_master)

    def close(self) -> None:
        self.settle()
        super().close()


def _wait_for_parameters(buckets: Sequence[ShardedBucket]) -> None:
    for bucket in buckets:
        bucket.wait_for_parameters()
