"""Counts the bytes of all tensors that are alive, and their peak, by watching every operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside it, every storage that an operation reads or makes counts until it is freed, at its size of the moment."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_
        counter = self

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            result = counter._resize(storage, num_bytes)
            counter._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def begin_again(self) -> None:
        """Let the peak be that of what comes."""
        self.peak_bytes = self.live_bytes
