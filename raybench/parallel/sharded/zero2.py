"""ZeRO stage 2 (Rajbhandari et al., 2020): gradients, too, are kept in parts alone.

A bucket's whole gradient exists from the first of its parameters that backward reaches until the sum of this rank's
part is there, so every micro-batch has its own reduce-scatter, whose result is added to what earlier ones left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raybench.parallel.data.bucketed import Bucket
from raybench.parallel.parts import Sharing
from raybench.parallel.sharded.zero1 import ShardedBucket, Zero1

MAX_IN_FLIGHT = 1
"""Reductions under way while the next bucket fills: each holds a whole bucket's gradient."""


class TransientBucket(ShardedBucket):
    """A bucket whose whole gradient is let go of once it is reduced."""

    def lay_out_gradient(self) -> None:
        self.used: set[Tensor] = set()
        """Parameters that ever got a gradient on this rank."""
        self._taken: set[Tensor] = set()
        self._sent: Tensor | None = None
        """The whole gradient that is being reduced."""

    def lay_out_shard(self) -> None:
        super().lay_out_shard()
        self.sum = torch.zeros_like(self.shard, requires_grad=False)
        """This rank's part of the gradient, summed over ranks and the micro-batches so far."""
        self.shard.grad = self.sum
        self._summed = False
        self._arriving = self.sum

    def start(self) -> None:
        """A new step: nothing is summed yet."""
        self._summed = False

    def place_for(self, parameter: Tensor) -> Tensor | None:
        if not self.views:
            self._open()
        return super().place_for(parameter)

    def take(self, parameter: Tensor) -> None:
        """Move a parameter's gradient to its view."""
        assert parameter.grad is not None
        if not self.views:
            self._open()
        self.move(parameter.grad, self.views[parameter])
        self.placed.discard(parameter)
        parameter.grad = None
        self._taken.add(parameter)
        self.used.add(parameter)

    def _open(self) -> None:
        self.gradient = self.axis.buffers.take(self.flat.numel(), self.flat.detach())
        self.gradient[self.num_elements :].zero_()
        self.views = dict(zip(self.parameters, self.split(self.gradient), strict=True))

    def fill(self) -> None:
        if not self.views:
            self._open()
        for parameter in self.parameters:
            if parameter not in self._taken:
                self.views[parameter].zero_()

    def reduce(self) -> None:
        self.wait()  # for the micro-batch before
        direct = not self._summed and not self.has_master
        self._arriving = self.sum if direct else self.axis.buffers.take(self.part.numel(), self.part)
        self.pending = self.axis.reduce_scatter(self._arriving, self.gradient, label=self.label)
        self._sent = self.gradient
        self._taken.clear()
        self.views = {}
        del self.gradient

    @torch.no_grad()
    def wait(self) -> None:
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        if self._sent is not None:
            self.axis.buffers.give(self._sent)
            self._sent = None
        if self._arriving is not self.sum:
            self.sum.add_(self._arriving) if self._summed else self.sum.copy_(self._arriving)
            self.axis.buffers.give(self._arriving)
        self._arriving = self.sum
        self._summed = True


class Zero2(Zero1):
    """Every backward pass reduce-scatters, whether or not it is the step's last."""

    buckets: Sequence[TransientBucket]
    max_in_flight: int | None = MAX_IN_FLIGHT

    def lay_out(self) -> None:
        self._in_flight: deque[Bucket] = deque()
        super().lay_out()

    def make_bucket(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing) -> ShardedBucket:
        return TransientBucket(label, parameters, sharing, self.shards)

    def before_step(self) -> None:
        super().before_step()
        for bucket in self.buckets:
            bucket.start()

    def before_backward(self, last: bool) -> None:
        self.start_order()
        self._sending = True

    def after_backward(self, last: bool) -> None:
        """Buckets that are not full, since this rank did not use all of their parameters."""
        self.order.flush()

    def reduce_gradients(self) -> None:
        """All are sent; `update` waits."""
        self._in_flight.clear()

    def _send(self, bucket: Bucket) -> None:
        super()._send(bucket)
        self._in_flight.append(bucket)
        while self.max_in_flight is not None and len(self._in_flight) > self.max_in_flight:
            self._in_flight.popleft().wait()

    def was_used(self, parameter: nn.Parameter) -> bool:
        return any(parameter in bucket.used for bucket in self.buckets)

    def held_gradients(self) -> list[Tensor]:
        return [bucket.sum for bucket in self.buckets]
