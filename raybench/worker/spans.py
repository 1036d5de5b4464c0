"""What a rank does by itself in the instrumented steps: forward, backward, the optimizer, and the step around them.

Nothing of it touches a strategy. Forward and backward are seen at the loss, which every strategy asks for; the
optimizer at torch's own hooks around `Optimizer.step`. A strategy whose work goes another way opens spans of its own
(`recorder.spans.span`); spans may nest and overlap, since readers take their union.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from raybench.parallel.strategy import LossSum


@dataclass
class Span:
    """A stretch of one rank's time, in nanoseconds of the host clock."""

    step: int
    kind: str
    """`step`, `forward`, `backward` or `optimizer`."""
    label: str
    begin_ns: int
    end_ns: int = 0


class Spans:
    """Keeps the spans of the instrumented steps; at all other times opening one costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: list[Span] = []
        self.step: int | None = None
        self._events: list[tuple[Span, Any, Any]] = []
        self._origin: tuple[int, Any] = (0, None)

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record one step; on a GPU the times come from events of the compute stream."""
        self.step = step
        self._origin = (time.time_ns(), self._event())
        optimizers: list[Callable[[], None]] = []
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: optimizers.append(self.begin("optimizer"))),
            register_optimizer_step_post_hook(lambda *_: optimizers.pop()()),
        )
        try:
            with self.span("step"):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.step = None
            self._resolve_events()

    @contextmanager
    def span(self, kind: str, label: str = "") -> Iterator[None]:
        """Record what is done inside."""
        end = self.begin(kind, label)
        try:
            yield
        finally:
            end()

    def begin(self, kind: str, label: str = "") -> Callable[[], None]:
        """Open a span; what is returned closes it."""
        if self.step is None:
            return _nothing
        span = Span(self.step, kind, label, time.time_ns())
        self.found.append(span)
        begun = self._event()

        def end() -> None:
            span.end_ns = time.time_ns()
            if begun is not None:
                self._events.append((span, begun, self._event()))

        return end

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _resolve_events(self) -> None:
        if not self._events:
            return
        torch.cuda.synchronize(self.device)
        origin_ns, origin = self._origin
        for span, begun, ended in self._events:
            span.begin_ns = origin_ns + int(origin.elapsed_time(begun) * 1e6)
            span.end_ns = origin_ns + int(origin.elapsed_time(ended) * 1e6)
        self._events.clear()


def recorded(loss_sum: LossSum, spans: Spans) -> LossSum:
    """`loss_sum`, with the forward pass that it makes, and the backward pass from its result, as spans."""

    def recorded_loss_sum(forward: Callable[..., Tensor], inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        if spans.step is None:
            return loss_sum(forward, inputs, labels)
        with spans.span("forward"):
            loss = loss_sum(forward, inputs, labels)
        if loss.requires_grad:
            loss.register_hook(_backward_begins)
        return loss

    def _backward_begins(_: Tensor) -> None:
        # The engine calls back when all of this backward pass is done.
        torch.autograd.Variable._execution_engine.queue_callback(spans.begin("backward"))

    return recorded_loss_sum


def _nothing() -> None:
    """Closes a span that was never opened."""
