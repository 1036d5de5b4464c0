"""Which parallelism should I train with, here? Measured on your own Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raybench.results.store import Results, load

__all__ = ["Results", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("Results", "load"):
        from raybench.results import store

        return getattr(store, name)
    raise AttributeError(f"module 'raybench' has no attribute {name!r}")
