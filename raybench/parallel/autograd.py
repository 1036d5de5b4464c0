"""Autograd functions, called."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def applied(function: Any, *arguments: Any) -> Any:
    """The result of an autograd function, whose `apply` torch leaves without types; no part of a compiled graph."""
    return function.apply(*arguments)
