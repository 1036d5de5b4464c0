"""The timed model's block over a tensor group: it waits for its share of the time, and sends what a real block sends.

A real block has two pairs of matrices. Here each half of the weights stands for a pair, which scales the whole block's
input by one number for each feature, this rank's part of the sum over the group:

    output = hidden + g(f(hidden) · part of the first half) + g(f(hidden) · part of the second half)

so that the whole is the unsharded block's function, and `f` and `g` carry hidden states as they do between matrices.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from raybench.models.timed import TimedBlock, take
from raybench.parallel.autograd import applied
from raybench.parallel.parts import Shard
from raybench.parallel.tensor.functions import begin_gather, begin_input_gradient, reduce_output
from raybench.worker.communication import Axis

NUM_PAIRS = 2


@dataclass(frozen=True)
class PairTiming:
    """What a pair of matrices takes on one rank, in seconds."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


class ParallelTimedBlock(TimedBlock):
    """This rank's part of a timed block; hidden states as elsewhere between the layers."""

    def __init__(self, whole: TimedBlock, axis: Axis, *, sequence: bool, label: str) -> None:
        nn.Module.__init__(self)
        ffn_width, width = whole.weight.shape
        self.weight = nn.Parameter(torch.empty(ffn_width // axis.size, width, device=whole.weight.device))
        self.axis = axis
        self.sequence = sequence
        self.label = label
        self.scale = ffn_width**-0.5
        self.shards = {"weight": Shard(0, ffn_width)}
        self._seconds_each = [seconds / (axis.size * NUM_PAIRS) for seconds in whole._seconds_each]

    def forward(self, hidden: Tensor) -> Tensor:
        num_sequences = hidden.shape[1] if self.sequence else hidden.shape[0]
        timing = PairTiming(*(num_sequences * seconds for seconds in self._seconds_each))
        output = hidden
        for index, half in enumerate(self.weight.tensor_split(NUM_PAIRS)):
            output = output + self.pair(hidden, half.sum(0) * self.scale, timing, f"{self.label}.{index}")
        return output

    def pair(self, hidden: Tensor, factor: Tensor, timing: PairTiming, label: str) -> Tensor:
        """The sum over the group of the hidden states times each rank's factor [width], between `f` and `g`."""
        partial = applied(_TimedProduct, hidden, factor, timing, self.axis, self.sequence, label)
        return reduce_output(partial, self.axis, sequence=self.sequence, label=label)


class _TimedProduct(Function):
    """As the product of a first matrix: the input gradient's collective is under way during the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, factor: Tensor, timing: PairTiming, axis: Axis, sequence: bool, label: str
    ) -> Tensor:
        ctx.timing, ctx.axis, ctx.sequence, ctx.label = timing, axis, sequence, label
        ctx.save_for_backward(hidden, factor)
        if sequence:
            hidden, gathered = begin_gather(hidden, axis, f"{label} input")
            gathered.wait()
        return timed_product(hidden, factor, timing.forward_s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, factor = ctx.saved_tensors
        if ctx.sequence:
            hidden, gathered = begin_gather(hidden, ctx.axis, f"{ctx.label} input again")
        whole = timed_product(gradient, factor, ctx.timing.input_gradient_s)
        input_gradient, reduced = begin_input_gradient(whole, ctx.axis, sequence=ctx.sequence, label=ctx.label)
        if ctx.sequence:
            gathered.wait()
        factor_gradient = timed_factor_gradient(gradient, hidden, ctx.timing.weight_gradient_s)
        reduced.wait()
        return input_gradient, factor_gradient, None, None, None, None


def timed_product(hidden: Tensor, factor: Tensor, seconds: float) -> Tensor:
    """hidden · factor, in a set time."""
    begin = time.perf_counter()
    product = hidden * factor
    take(seconds, hidden.device, since=begin)
    return product


def timed_factor_gradient(gradient: Tensor, hidden: Tensor, seconds: float) -> Tensor:
    """Of `timed_product`'s factor, in a set time."""
    begin = time.perf_counter()
    summed = (gradient * hidden).sum((0, 1))
    take(seconds, hidden.device, since=begin)
    return summed
