"""Where everything was measured, and what a reader has to know before trusting it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.curves import warnings_of
from raybench.report.text import number, plain, size

if TYPE_CHECKING:
    from raybench.results.folder import Folder
    from raybench.results.reader import Results


def facts_of(rows: pd.DataFrame, suite_ids: Sequence[str], place: Folder) -> dict[str, str]:
    """Hardware, scale and versions, each in a few words.

    Args:
        rows: of runs and of sweeps, which share the columns that are read here.
    """
    environments = [_environment(text) for text in rows.environment.dropna().unique()]
    nodes = {str(n.get("address")): n for e in environments for n in e.get("nodes", []) if isinstance(n, dict)}
    device = every(rows.device)
    if memory := every(rows.device_memory_bytes, size):
        device += f" of {memory}"
    facts = {
        "Device": device,
        "Nodes": ", ".join(_node(node) for node in nodes.values()),
        "Backend": every(rows.backend),
        "Launcher": ", ".join(sorted({plain(e["launcher"]) for e in environments if "launcher" in e})),
        "Scale": every(rows.scale),
        "Measured": _period(rows.started_at.dropna()),
        "raybench": _version(rows),
        "torch": every(rows.torch_version),
        "Ray": every(rows.ray_version),
        "NCCL": every(rows.nccl_version),
        "Python": every(rows.python_version),
        "Suites": ", ".join(suite_ids),
        "Results": plain(place),
    }
    return {name: value for name, value in facts.items() if value}


def peaks_of(cases: pd.DataFrame) -> dict[str, str]:
    """What MFU is a share of, and where that was read."""
    pairs = cases[["peak_flops_per_s", "peak_source"]].dropna().drop_duplicates()
    told = [f"{number(speed / 1e12)} TFLOP/s a GPU ({plain(source)})" for speed, source in pairs.to_numpy()]
    return {"Peak": ", ".join(told)} if told else {}


def _node(node: Mapping[str, Any]) -> str:
    parts = [f"{node['num_cpus']:g} CPUs"] if isinstance(node.get("num_cpus"), int | float) else []
    parts += [size(node["memory_bytes"])] if isinstance(node.get("memory_bytes"), int) else []
    gpus = node.get("gpus") or []
    parts += [f"{gpus.count(gpu)} × {plain(gpu)}" for gpu in sorted(set(gpus))]
    return f"{plain(node.get('host') or node.get('address'))} ({', '.join(parts)})"


def _version(runs: pd.DataFrame) -> str:
    version = every(runs.raybench_version)
    if commit := every(runs.git_commit, lambda text: str(text)[:10]):
        version += f", commit {commit}"
    return f"{version}, with uncommitted changes" if runs.git_dirty.fillna(False).any() else version


def _period(times: Any) -> str:
    if times.empty:
        return ""
    first, last = (f"{t:%Y-%m-%d %H:%M}" for t in (times.min(), times.max()))
    return f"{first} UTC" if first == last else f"{first} – {last[11:] if first[:10] == last[:10] else last} UTC"


def cautions(results: Results, rows: pd.DataFrame) -> list[str]:
    """What a reader has to know before trusting a number.

    Args:
        rows: of runs and of sweeps.
    """
    runs = results.runs
    found = []
    environments = [_environment(text) for text in rows.environment.dropna().unique()]
    if any(e.get("ranks_share_cores") for e in environments):
        found.append("Ranks shared CPU cores: times say little about computing, more about waiting and the network.")
    if (runs.scale == "smoke").any():
        found.append("Scale smoke: small models, to show that everything works; conclusions need scale full.")
    if (runs.gate_scope == "reduced").any():
        found.append("Some gates ran with fewer layers, since the control did not fit the device.")
    return found + warnings_of(results)


def _environment(text: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def every(values: Any, show: Any = plain) -> str:
    """Every different value, in the order in which they come."""
    seen: Sequence[Any] = list(dict.fromkeys(values.dropna()))
    return ", ".join(str(show(value)) for value in seen)
