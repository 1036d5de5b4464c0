"""The units of a model: what a sharded strategy gathers, waits for and lets go of as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., None])
LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """A module and those of its parameters that no other unit uses."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]


def split(model: nn.Module, trained: Iterable[nn.Parameter]) -> tuple[list[Unit], list[nn.Parameter]]:
    """The model's units in the order of their definition, and the trained parameters that belong to none.

    A unit is an element of a list (a `ModuleList`, or the `ModuleDict` that a pipeline stage has kept of one), or a
    module beside one: embedding, blocks and head of a GPT; the top-level children of a model without lists. What
    several units share (a tied head) or the model holds itself belongs to none.
    """
    of_interest = set(trained)
    modules = list(_unit_modules(model, ""))
    held = {name: [p for p in module.parameters() if p in of_interest] for name, module in modules}
    users = Counter(p for parameters in held.values() for p in parameters)
    units = [Unit(name, module, tuple(p for p in held[name] if users[p] == 1)) for name, module in modules]
    own = {p for unit in units for p in unit.parameters}
    return [unit for unit in units if unit.parameters], [p for p in model.parameters() if p in of_interest - own]


def uncompiled(module: nn.Module, hook: Hook) -> Hook:
    """`hook`, kept out of the code of a module that torch.compile compiles."""
    return torch.compiler.disable(hook) if module._compiled_call_impl is not None else hook


def _unit_modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, LISTS):
            yield from ((f"{prefix}{name}.{key}", element) for key, element in child.named_children())
        elif any(isinstance(module, LISTS) for module in child.modules()):
            yield from _unit_modules(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
