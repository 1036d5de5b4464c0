"""An answer of the doctor for people: the facts, then each finding with its evidence and what to do."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from raybench.doctor.findings import Finding, Result

_WIDTH = 100
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What steers a terminal, but for tabs and the ends of lines."""
_TITLES = {"topo": "Topology", "nccl-log": "NCCL log", "watchdog": "PyTorch watchdog", "story": "Together"}
_HIDDEN = ("kind", "findings", "hosts", "verdict", "files", "begun", "is_past")


def render(result: Result) -> str:
    """Plain text, at most 100 columns (evidence is left as it is)."""
    lines = list(_lines(result))
    if any(line.startswith(("  ERROR", "  WARNING")) for line in lines):
        lines += ["", "  What to do, by symptom: docs/troubleshooting.md"]
    return "\n".join(lines) + "\n"


def _lines(result: Result) -> Iterator[str]:
    yield _TITLES.get(str(result.get("kind")), "Answer")
    if result.get("verdict"):
        yield from _wrapped(str(result["verdict"]), "  ", "  ")
    for number, host in enumerate(result.get("hosts", ()), start=1):
        yield f"host {number}"
        yield from _body(host)
    if "hosts" not in result:
        yield from _body(result)


def _body(result: Result) -> Iterator[str]:
    for name, value in result.items():
        if name not in _HIDDEN:
            yield from _wrapped(f"{name.replace('_', ' ')}: {_short(name, value)}", "  ", "    ")
    findings: list[Finding] = result.get("findings", [])
    if not findings:
        yield "  nothing found"
    for item in findings:
        yield from finding_lines(item)


def finding_lines(item: Finding) -> Iterator[str]:
    """A blank line, what was found, its evidence, and what to do."""
    yield ""
    yield from _wrapped(f"{item['severity'].upper()} {item['code']}: {item['message']}", "  ", "    ")
    if item["evidence"]:
        yield f"    | {_CONTROL.sub('?', item['evidence'])}"
    for step in item["advice"]:
        yield from _wrapped(step, "    - ", "      ")


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _short(name: str, value: Any) -> str:
    """A fact in one line; tables of pairs by how often each value occurs."""
    if value is None:
        return "not in this file"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        if name.endswith("links"):
            return ", ".join(f"{count} × {link}" for link, count in Counter(value.values()).most_common()) or "none"
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return (
            ", ".join(_item(item) for item in value[:16]) + (f" and {len(value) - 16} more" if len(value) > 16 else "")
            or "none"
        )
    return str(value)


def _item(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if set(value) == {"name", "device"}:
        return (
            str(value["name"]) if value["device"] in (None, value["name"]) else f"{value['name']} = {value['device']}"
        )
    return " ".join(f"{key} {item}" for key, item in value.items() if item is not None)
