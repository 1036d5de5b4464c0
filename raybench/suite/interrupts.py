"""Ctrl-C and its relatives: the first one ends the run in order, later ones do not disturb that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Seen:
    depth: int = 0
    interrupted: bool = False


_seen = _Seen()


@contextmanager
def orderly() -> Iterator[None]:
    """Within the block the first interrupt, termination or hang-up raises KeyboardInterrupt; later ones do nothing.

    Blocks may be nested: Ray replaces the handler of SIGTERM when it starts, so the inner one is entered after that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    _seen.depth += 1
    try:
        yield
    finally:
        _seen.depth -= 1
        for number, handler in before.items():
            signal.signal(number, handler)
        if _seen.depth == 0:
            _seen.interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _seen.interrupted:
        _seen.interrupted = True
        raise KeyboardInterrupt
