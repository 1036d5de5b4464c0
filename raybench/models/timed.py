"""A GPT whose blocks take a set time by waiting, with activations, parameters and gradients of real size and value.

More ranks than cores, or cores where GPUs are meant, make the times of computation meaningless, but not those of
waiting or of the network: with this model schedules and networks are measured on any machine. A block scales its input
by one number for each feature, which all of its weights have a part in. What it saves for backward, its output, and the
gradients of both are as large as a real block's hidden state; its weights are `ffn_width × width`. The little that it
computes is part of the time that it takes. Embedding and head are the GPT's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raybench.models.gpt import GPT
from raybench.suite.track import TIMES_MS, ModelConfig

SPIN_S = 150e-6
"""The end of a wait that is spun, not slept: what a sleep overshoots by on a host that is not overloaded."""


@dataclass
class _Timing:
    """What one pass of a block takes, in seconds, and since when the part that is next has been under way."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    since_s: float = 0.0

    def begin(self, *_: object) -> None:
        self.since_s = time.perf_counter()


class TimedBlock(nn.Module):
    """Hidden states [batch, sequence, width] to the same, in a set time; backward likewise, in two parts.

    The times are those of `micro_batch_size` sequences, and in proportion of others.
    """

    def __init__(self, config: ModelConfig, micro_batch_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.ffn_width, config.width))
        self._seconds_each = [config.options.get(name, 0.0) / 1e3 / micro_batch_size for name in TIMES_MS]

    def forward(self, hidden: Tensor) -> Tensor:
        begin = time.perf_counter()
        timing = _Timing(*(len(hidden) * seconds for seconds in self._seconds_each))
        # The order of these lines lets autograd compute the input gradient before the weight gradient.
        # A product: its weight gradient takes memory as a real one does, where that of a sum is one row, expanded.
        factor = self.weight.new_full(self.weight.shape[:1], len(self.weight) ** -0.5) @ self.weight
        scale: Tensor = 1 + _WeightGradient.apply(factor, timing)  # type: ignore[no-untyped-call]
        output: Tensor = _InputGradient.apply(hidden, timing) * scale  # type: ignore[no-untyped-call]
        if output.requires_grad:
            output.register_hook(timing.begin)  # called before each pass back through the product
        take(timing.forward_s, hidden.device, since=begin)
        return output


class TimedGPT(GPT):
    """Ids [batch, sequence] to logits [batch, sequence, vocabulary]; every block takes a set time."""

    def __init__(
        self, config: ModelConfig, sequence_length: int, *, micro_batch_size: int, recompute: bool = False
    ) -> None:
        super().__init__(config, sequence_length, recompute=recompute)
        self.blocks = nn.ModuleList(TimedBlock(config, micro_batch_size) for _ in range(config.num_layers))


class _InputGradient(torch.autograd.Function):
    """Lets the gradient of a block's input go once its time is over."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, timing: _Timing) -> Tensor:
        ctx.timing = timing
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        take(ctx.timing.input_gradient_s, gradient.device, since=ctx.timing.since_s)
        ctx.timing.begin()
        return gradient, None


class _WeightGradient(torch.autograd.Function):
    """Lets the gradient of a block's weights go once its time is over."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, timing: _Timing) -> Tensor:
        ctx.timing = timing
        return scale.view_as(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        take(ctx.timing.weight_gradient_s, gradient.device, since=ctx.timing.since_s)
        return gradient, None


def take(seconds: float, device: torch.device, *, since: float) -> None:
    """Keep the host until `seconds` after `since`, or a GPU's stream for so long from now."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _cycles_per_second(device)))
        return
    end = since + seconds
    remaining = end - time.perf_counter()
    if remaining > SPIN_S:
        time.sleep(remaining - SPIN_S)
    while time.perf_counter() < end:
        pass


@cache
def _cycles_per_second(device: torch.device) -> float:
    """The clock that a GPU's waiting kernel counts, timed once."""
    cycles = 20_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (float(begin.elapsed_time(end)) / 1e3)
