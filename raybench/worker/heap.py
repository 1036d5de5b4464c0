"""The heap of glibc, from which the tensors of CPU ranks come. Other C libraries are left as they are."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`."""
_LARGEST_IN_HEAP = 32 << 20
"""The most that `mallopt` takes."""
ONE_ARENA = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
"""What a process starts with, for the thread in which Ray runs a rank to use the heap that a main thread has.

A thread's own is in pieces of at most 64 MiB each.
"""


def keep_freed_memory() -> None:
    """Keep what tensors give back, up to 32 MiB each, as a GPU's allocator does.

    Otherwise it goes to the system, and new pages come for it in the same step, or not, by the luck of what lies
    where: a difference between runs that can be larger than that between strategies. With a variable of the
    environment that begins with `MALLOC_` the heap is the user's to tune.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and not any(name.startswith("MALLOC_") for name in os.environ):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Return all that is free to the system: what follows begins as in a new process."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
