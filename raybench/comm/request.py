"""What `raybench comm` was asked for: its options as they were typed, and checked one by one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raybench.comm.groups import GROUPS
from raybench.comm.sweep import DEFAULT_ROUNDS, DEFAULT_TIMEOUT_S, DTYPES, KINDS, parse_layout, parse_names, parse_sizes
from raybench.errors import RequestError, unknown
from raybench.suite.request import LauncherName
from raybench.suite.track import Layout

DEFAULT_SETTING, NO_SETTING = "default", "none"


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """One sweep as it was asked for, in the words of its options; None where nothing was said."""

    results: str
    operations: str | None = None
    sizes: str | None = None
    groups: str | None = None
    layout: str | None = None
    dtypes: str | None = None
    ranks_per_node: int | None = None
    num_rounds: int = DEFAULT_ROUNDS
    budget_s: float | None = None
    timeout_s: int = DEFAULT_TIMEOUT_S
    link_gbps: float | None = None
    overlap: bool = True
    nccl_env: str | None = None
    launcher: LauncherName = "ray"
    png: Path | None = None
    by_size: bool = False
    """Print a line a size, not only one a case."""


@dataclass(frozen=True)
class Asked:
    """A request, read and checked as far as it can be without a cluster."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...] | None
    groups: tuple[str, ...] | None
    layout: Layout | None
    dtypes: tuple[str, ...]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read(request: CommRequest) -> Asked:
    """Check every option by itself.

    Raises:
        RequestError: in one sentence that names the option.
    """
    return Asked(
        KINDS if request.operations is None else parse_names("--operations", request.operations, KINDS),
        None if request.sizes is None else parse_sizes(request.sizes),
        None if request.groups is None else parse_names("--groups", request.groups, GROUPS),
        None if request.layout is None else parse_layout(request.layout),
        DTYPES if request.dtypes is None else parse_names("--dtypes", request.dtypes, DTYPES),
        read_settings(request.nccl_env),
    )


def read_settings(names: str | None) -> dict[str, Mapping[str, str]]:
    """Environments by name: `none`, or what `--nccl-env` of other commands takes; the cluster's own by default.

    Raises:
        RequestError: one does not exist, or two have one name.
    """
    from raybench.suite.nccl_env import OPTION, VARIABLE, load_environments, resolve, selected

    if names is None:
        chosen = selected()
        return {DEFAULT_SETTING: {} if chosen is None else resolve(chosen, VARIABLE)}
    found: dict[str, Mapping[str, str]] = {}
    for name in (part.strip() for part in names.split(",")):
        label = Path(name).stem if os.sep in name or Path(name).is_file() else name
        if label in found:
            raise RequestError(f"{OPTION}: {label!r} is named twice (each setting needs a name of its own)")
        is_file = os.sep in name or Path(name).expanduser().is_file()
        if name not in (NO_SETTING, *(named := load_environments())) and not is_file:
            raise unknown(OPTION, name, (NO_SETTING, *named, "a file of KEY=VALUE"))
        found[label] = {} if name == NO_SETTING else resolve(name)
    return found


def record(request: CommRequest, asked: Asked) -> dict[str, Any]:
    """The request as the parts' metadata hold it."""
    return {
        "operations": list(asked.kinds),
        "dtypes": list(asked.dtypes),
        "groups": None if asked.groups is None else list(asked.groups),
        "sizes": None if asked.sizes is None else list(asked.sizes),
        "layout": None if asked.layout is None else str(asked.layout),
        "settings": {name: dict(variables) for name, variables in asked.settings.items()},
        "launcher": request.launcher,
        "overlap": request.overlap,
    }
