"""ZeRO stage 3 (Rajbhandari et al., 2020), in the manner of FSDP (Zhao et al., 2023): parameters in parts as well.

The model's units are gathered one ahead of their use, in forward and again in backward, and let go of after it. All
ranks gather in the same order, that of definition and its reverse, whatever each of them uses: a unit that a rank
passes by is gathered all the same. Two units are whole at a time, and what no single unit owns (a tied head) for as
long as the pass lasts. The last unit stays from forward to backward, where it is needed first; embeddings are not
gathered for backward, which asks for their shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raybench.models.build import MadeByName
from raybench.parallel.data.bucketed import assign
from raybench.parallel.parts import Sharing
from raybench.parallel.sharded.units import Unit, split, uncompiled
from raybench.parallel.sharded.zero1 import ShardedBucket
from raybench.parallel.sharded.zero2 import MAX_IN_FLIGHT, TransientBucket, Zero2

NO_LIMIT = 2**62
NUM_AHEAD = 1
"""Units that are gathered before they are needed: each is whole meanwhile."""


class GatheredBucket(TransientBucket):
    """A bucket whose parameters are whole only between `gather` and `release`; their memory comes and goes."""

    def lay_out_shard(self) -> None:
        self.part = self.part.clone()
        super().lay_out_shard()
        self._released = self.part.new_empty(0)
        self._num_bytes = self.flat.untyped_storage().nbytes()
        self._whole = self.flat.detach()
        self._shapes = self.split(self._whole)
        """Views of the storage, whether it has memory or not."""
        self.release()

    def gather(self) -> None:
        self.flat.untyped_storage().resize_(self._num_bytes)
        self.gathering = self.axis.all_gather(self._whole, self.part, label=self.label)
        self.show_shapes()

    def release(self) -> None:
        """What autograd keeps are views of the same storage, which `gather` fills again."""
        self.wait_for_parameters()
        for parameter in self.parameters:
            parameter.data = self._released
        self.flat.untyped_storage().resize_(0)

    def show_shapes(self) -> None:
        """Give the parameters their shapes, with the memory that there is."""
        for parameter, value in zip(self.parameters, self._shapes, strict=True):
            parameter.data = value

    def publish(self) -> None:
        """The next pass gathers what it needs."""
        self.write_back()


class GatheredUnit:
    """A unit's buckets, gathered and released as one."""

    def __init__(self, parameters: Iterable[nn.Parameter], buckets: Iterable[GatheredBucket]) -> None:
        self.parameters = frozenset(parameters)
        self.buckets = [bucket for bucket in buckets if self.parameters.intersection(bucket.parameters)]
        self.is_gathered = False
        self.num_missing = 0
        """Parameters whose gradient this backward pass has not completed yet."""

    def gather(self) -> None:
        if not self.is_gathered:
            self.is_gathered = True
            for bucket in self.buckets:
                bucket.gather()

    def wait(self) -> None:
        self.gather()
        for bucket in self.buckets:
            bucket.wait_for_parameters()

    def release(self) -> None:
        if self.is_gathered:
            self.is_gathered = False
            for bucket in self.buckets:
                bucket.release()

    def show_shapes(self) -> None:
        """Instead of gathering, until `hide_shapes`."""
        for bucket in self.buckets:
            bucket.show_shapes()

    def hide_shapes(self) -> None:
        for bucket in self.buckets:
            bucket.release()


class Walk:
    """One pass over the units: each is gathered once, in this order, at the latest when the one before it is used."""

    def __init__(self, units: Sequence[GatheredUnit]) -> None:
        self._units = units
        self._place = {unit: place for place, unit in enumerate(units)}
        self._next = 0

    def start(self) -> None:
        self._next = 0
        for unit in self._units:
            unit.num_missing = len(unit.parameters)

    def reach(self, unit: GatheredUnit) -> None:
        """Begin to gather up to the unit after this one, and wait for this one."""
        self._gather_until(self._place[unit] + 1 + NUM_AHEAD)
        unit.wait()

    def finish(self, keep: GatheredUnit | None = None) -> None:
        """Gather what this rank passed by, as other ranks do, and let go of all but `keep`."""
        for place, unit in enumerate(self._units):
            self._gather_until(place + 1)
            if unit is not keep:
                unit.release()

    def _gather_until(self, end: int) -> None:
        while self._next < min(end, len(self._units)):
            self._units[self._next].gather()
            self._next += 1


class Zero3(Zero2):
    """Parameters, gradients and optimizer state in parts."""

    buckets: Sequence[GatheredBucket]

    def lay_out(self) -> None:
        self._model_units, self._unowned = split(self.model, self.parameters.values())
        if not isinstance(self.model, MadeByName) and self.context.mesh.recorder.device.type == "cpu":
            # Ranks that take different ways through the model must not wait for each other inside backward.
            self.max_in_flight = None
        else:
            self.max_in_flight = MAX_IN_FLIGHT
        super().lay_out()

    def assign_buckets(self, sharing: Mapping[nn.Parameter, Sharing]) -> list[list[nn.Parameter]]:
        """One bucket a unit, dtype and sharing; last, what belongs to no unit."""
        units = [list(unit.parameters) for unit in reversed(self._model_units)]
        return [bucket for held in [*units, self._unowned] for bucket in assign(held, NO_LIMIT, sharing)]

    def make_bucket(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing) -> ShardedBucket:
        return GatheredBucket(label, parameters, sharing, self.shards)

    def hook_forward(self) -> list[torch.utils.hooks.RemovableHandle]:
        self._awaited_first = []
        self._root = GatheredUnit(self._unowned, self.buckets)
        gathered = [GatheredUnit(unit.parameters, self.buckets) for unit in self._model_units]
        by_shape = [isinstance(self.model, MadeByName) and _are_embeddings(unit.module) for unit in self._model_units]
        self._by_shape = [unit for unit, is_so in zip(gathered, by_shape, strict=True) if is_so]
        self._forward = Walk(gathered)
        self._backward = Walk([unit for unit in reversed(gathered) if unit not in self._by_shape])
        self._last = gathered[-1] if gathered else None
        self._is_backward = False
        hooks = [self.model.register_forward_pre_hook(self._begin_forward)]
        for unit, own in zip(self._model_units, gathered, strict=True):
            hooks += self._hook_unit(unit, own)
        return hooks

    def _hook_unit(self, unit: Unit, own: GatheredUnit) -> list[torch.utils.hooks.RemovableHandle]:
        def before_forward(*_: Any) -> None:
            walk = self._backward if self._is_backward else self._forward
            walk.reach(own)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_backward:  # recomputed: needed until its gradients are complete
                return
            if own in self._by_shape:
                own.release()
                return
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._backward.reach(own))
            if own is not self._last:
                own.release()

        def after_gradient(_: Tensor) -> None:
            own.num_missing -= 1
            if own.num_missing == 0:
                own.release()

        return [
            unit.module.register_forward_pre_hook(uncompiled(unit.module, before_forward)),
            unit.module.register_forward_hook(uncompiled(unit.module, after_forward)),
            *(parameter.register_post_accumulate_grad_hook(after_gradient) for parameter in unit.parameters),
        ]

    def _begin_forward(self, *_: Any) -> None:
        self._forward.start()
        self._root.wait()

    def before_backward(self, last: bool) -> None:
        super().before_backward(last)
        self._forward.finish(keep=self._last)
        self._is_backward = True
        self._backward.start()
        for unit in self._by_shape:
            unit.show_shapes()

    def after_backward(self, last: bool) -> None:
        super().after_backward(last)
        self._backward.finish()
        for unit in self._by_shape:
            unit.hide_shapes()
        self._root.release()
        self._is_backward = False

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        parts: dict[ShardedBucket, Tensor] = {bucket: bucket.part for bucket in self.buckets}
        return self.parts.whole(self.whole_tensors(parts))

    def held_parameters(self) -> list[Tensor]:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        return [*frozen, *(bucket.part for bucket in self.buckets), *(bucket.flat for bucket in self.buckets)]


def _are_embeddings(module: nn.Module) -> bool:
    """Whether all parameters of a unit are tables that rows are taken from."""
    users = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    return all(type(child) is nn.Embedding for child in users)
