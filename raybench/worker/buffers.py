"""Large tensors that come again in every step, in memory that is kept.

A CPU's allocator may give such memory back to the system and take new pages for the next tensor, which costs several
times what is done with it. A GPU's allocator keeps memory by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SHARE = 2
"""Memory is used again for what needs more than half of it, so that what is kept stays below twice of what is used."""


class Buffers:
    """Lends uninitialised memory; holds as much as was ever lent at one time, in about the same sizes."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def take(self, num_elements: int, like: Tensor) -> Tensor:
        """A flat tensor of the dtype and device of `like`."""
        if like.device.type != "cpu":
            return like.new_empty(num_elements)
        num_bytes = num_elements * like.element_size()
        fitting = [s for s in self._free if num_bytes <= s.nbytes() < LARGEST_SHARE * num_bytes]
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
