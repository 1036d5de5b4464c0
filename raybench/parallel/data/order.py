"""Sends things in one fixed order while backward makes them ready in another.

The order in which hooks fire may differ between ranks; collectives that follow it would pair the wrong tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FixedOrder(Generic[T]):
    """Things to send, first to last. Each is sent once it and all before it are ready."""

    def __init__(self, things: Sequence[T], send: Callable[[T], None]) -> None:
        self._things = things
        self._send = send
        self._is_ready = [False] * len(things)
        self._next = 0

    def start(self) -> None:
        """A new step: nothing is ready."""
        self._is_ready = [False] * len(self._things)
        self._next = 0

    def ready(self, index: int) -> None:
        """The thing at `index` may be sent."""
        self._is_ready[index] = True
        while self._next < len(self._things) and self._is_ready[self._next]:
            self._send_next()

    def flush(self) -> None:
        """Send all that is left, ready or not."""
        while self._next < len(self._things):
            self._send_next()

    def _send_next(self) -> None:
        self._next += 1
        self._send(self._things[self._next - 1])
