"""Large tensors that come again in every step, in memory that is kept.

A CPU's allocator gives large memory back to the system and takes new pages for the next tensor, which costs more than
summing what lies in it. A GPU's allocator keeps memory by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_RATIO = 2
"""No tensor takes memory of this many times its size or more."""


class Buffers:
    """Lends uninitialised memory, and keeps what is given back for the next tensor of about the same size."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def take(self, num_elements: int, like: Tensor) -> Tensor:
        """A flat tensor of the dtype and device of `like`."""
        if like.device.type != "cpu":
            return like.new_empty(num_elements)
        num_bytes = num_elements * like.element_size()
        fitting = [s for s in self._free if num_bytes <= s.nbytes() < MAX_RATIO * num_bytes]
        smaller = [s for s in self._free if s.nbytes() < num_bytes]
        if fitting:
            storage = min(fitting, key=torch.UntypedStorage.nbytes)
            self._remove(storage)
            return like.new_empty(0).set_(storage, 0, (num_elements,), (1,))
        if smaller:  # has become too small: the new one is in its place
            self._remove(max(smaller, key=torch.UntypedStorage.nbytes))
        return like.new_empty(num_elements)

    def give(self, tensor: Tensor) -> None:
        """Take back the memory of a tensor that nobody uses any more."""
        if tensor.device.type == "cpu":
            self._free.append(tensor.untyped_storage())

    def _remove(self, storage: torch.UntypedStorage) -> None:
        self._free = [s for s in self._free if s is not storage]
