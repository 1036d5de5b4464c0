"""Memory by category: counted, so that it works on a CPU, and the peaks of process and device beside it."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_STATUS = Path("/proc/self/status")


def set_aside() -> None:
    """Take all that lives now out of later searches for cycles, which take longer than a small step.

    For moments when nothing but imports and what lasts as long as the process is alive. Memory is given back as ever.
    """
    gc.collect()
    gc.freeze()


class ActivationMeter:
    """Counts the bytes that autograd keeps for backward, each storage once, and their highest sum.

    Parameters and buffers do not count. A context around one step of a strategy.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._excluded = {t.untyped_storage()._cdata for t in excluded}  # the same whatever memory it has
        self._users: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # what a DTensor wraps
        if storage._cdata in self._excluded:
            return tensor
        return _Saved(self, tensor, storage._cdata, storage.nbytes())

    def add(self, pointer: int, num_bytes: int) -> None:
        users = self._users.get(pointer, 0)
        self._users[pointer] = users + 1
        if users == 0:
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def remove(self, pointer: int, num_bytes: int) -> None:
        self._users[pointer] -= 1
        if self._users[pointer] == 0:
            del self._users[pointer]
            self.live_bytes -= num_bytes


class _Saved:
    """A tensor kept for backward; counted until autograd lets go of it."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor, pointer: int, num_bytes: int) -> None:
        self.tensor = tensor.detach()  # an operation that keeps its own output would otherwise keep itself
        self._meter, self._pointer, self._num_bytes = meter, pointer, num_bytes
        meter.add(pointer, num_bytes)

    def __del__(self) -> None:
        self._meter.remove(self._pointer, self._num_bytes)


def _unpack(saved: _Saved | Tensor) -> Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of this process and of its device begin anew, where the kernel allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_device_bytes(device: torch.device) -> int | None:
    """Most bytes that the device's allocator handed out since `reset_peaks`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_rss_bytes() -> int:
    """Most resident bytes of this process since `reset_peaks` (since its start, where that is not allowed)."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
