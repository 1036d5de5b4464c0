"""An examination for people: tables of nodes, links and all-reduces, then findings and the verdict."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from raybench.doctor.live.facts import Collective, Examination, Node, Stream, bits_per_s, bus_bytes_per_s
from raybench.doctor.live.finding import LiveFinding, size
from raybench.doctor.live.judge import STAGES
from raybench.doctor.live.judge_network import clock_offsets
from raybench.doctor.live.links import claimed_gbps
from raybench.doctor.render import finding_lines

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_NONE = "–"


def tables(found: Examination, findings: Sequence[LiveFinding]) -> Group:
    """What was seen, for a terminal."""
    parts: list[Any] = [_nodes(found, findings)]
    if found["reaches"]:
        parts.append(_links(found))
    if found["collectives"]:
        parts.append(_collectives(found["collectives"]))
    return Group(*parts)


def text(found: Examination, findings: Sequence[LiveFinding], settings: Sequence[str], verdict: str) -> str:
    """Findings, what was skipped, the environment and the verdict."""
    lines: list[str] = []
    for each in findings:
        lines += finding_lines(each)
    if found["skipped"]:
        lines += ["", *(f"not looked at: {each}" for each in found["skipped"])]
    if settings:
        lines += ["", "environment: " + " ".join(settings)]
    return "\n".join([*lines, "", *textwrap.wrap(verdict, 100, break_on_hyphens=False, break_long_words=False)])


def _nodes(found: Examination, findings: Sequence[LiveFinding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    offsets = clock_offsets(found)
    for title in ("node", "host", "GPUs", "free", "driver", "CUDA", "NCCL", "torch", "interface", "/dev/shm", "clock"):
        table.add_column(title)
    worst = {address: each["severity"] for each in reversed(findings) for address in each["nodes"]}
    for node in found["nodes"]:
        address, versions = node["address"], node["versions"]
        clock = _offset(offsets[address][0]) if address in offsets and len(found["nodes"]) > 1 else _NONE
        table.add_row(
            Text(address, style=_STYLES.get(worst.get(address, ""), "green")),
            node["host"],
            _gpus(node),
            _free(node),
            versions.get("driver") or _NONE,
            versions.get("cuda") or _NONE,
            versions.get("nccl") or _NONE,
            versions.get("torch") or _NONE,
            node["ray_interface"] or _NONE,
            _NONE if node["shm_bytes"] is None else size(node["shm_bytes"]),
            clock,
        )
    for address in found["silent"]:
        table.add_row(Text(address, style=_STYLES["error"]), "no answer", *[_NONE] * 9)
    return table


def _offset(offset_ns: int) -> str:
    return f"{offset_ns / 1e9:+.3f} s" if abs(offset_ns) >= 1e9 else f"{offset_ns / 1e6:+.2f} ms"


def _gpus(node: Node) -> str:
    counts = Counter(gpu["name"].removeprefix("NVIDIA ") for gpu in node["gpus"])
    return ", ".join(f"{number} × {name}" for name, number in counts.items()) or "none"


def _free(node: Node) -> str:
    free = [gpu["memory_bytes"] - gpu["used_bytes"] for gpu in node["gpus"]
            if gpu["memory_bytes"] is not None and gpu["used_bytes"] is not None]  # fmt: skip
    return size(min(free)) if free else _NONE


def _links(found: Examination) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("from", "to", "ports", "round trip", "carries", "claims"):
        table.add_column(title, justify="left" if title in ("from", "to") else "right")
    streams = {(each["source"], each["target"]): each for each in found["streams"]}
    known = {node["address"]: node for node in found["nodes"]}
    for each in found["reaches"]:
        if each["at"] != each["target"]:
            continue
        open_ports = sum(how == "ok" for how in each["ports"].values())
        stream: Stream | None = streams.get((each["source"], each["target"]))
        claim = claimed_gbps(stream, known) if stream else None
        table.add_row(
            each["source"],
            each["target"],
            f"{open_ports} of {len(each['ports'])}",
            _NONE if each["round_trip_ns"] is None else f"{each['round_trip_ns'] / 1e6:.3f} ms",
            _NONE if stream is None else f"{bits_per_s(stream) / 1e9:.3g} Gbit/s",
            _NONE if claim is None else f"{claim:g} Gbit/s",
        )
    return table


def _collectives(collectives: Sequence[Collective]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("all-reduce", "nodes", "ranks", "backend", "payload", "time", "bus bandwidth", "result"):
        table.add_column(title)
    for each in collectives:
        speed = bus_bytes_per_s(each)
        table.add_row(
            STAGES[each["stage"]].lower(),
            ", ".join(dict.fromkeys(each["nodes"])) if each["stage"] != "all" else f"{len(set(each['nodes']))}",
            str(len(each["nodes"])),
            each["backend"],
            size(each["payload_bytes"]),
            _NONE if each["duration_ns"] is None else f"{each['duration_ns'] / 1e6:.2f} ms",
            _NONE if speed is None else f"{speed / 1e9:.3g} GB/s",
            Text(each["status"], style="green" if each["status"] == "ok" else _STYLES["error"]),
        )
    return table
