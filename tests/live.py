"""Counts the bytes of all tensors that are alive, and their peak, by watching every operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Inside it, every storage that an operation reads or makes counts until it is freed, at its size of the moment."""

    def __init__(self) -> None:
        super().__init__()
        self._storages = WeakIdKeyDictionary()
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                self._storages[tensor.untyped_storage()] = None
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    @property
    def live_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def begin_again(self) -> None:
        """Let the peak be that of what comes."""
        self.peak_bytes = self.live_bytes
