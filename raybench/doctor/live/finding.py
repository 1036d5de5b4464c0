"""A finding about a cluster: a reader's finding, with the nodes that it is about and the variables that mend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raybench.doctor.findings import Finding, finding


class LiveFinding(Finding):
    """`environment` goes into the file that `-o` writes."""

    nodes: list[str]
    environment: dict[str, str]


def about(
    nodes: Sequence[str],
    code: str,
    message: str,
    evidence: str | None = None,
    advice: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LiveFinding:
    """A finding of a known code about some nodes."""
    return from_reader(finding(code, message, evidence, advice), nodes, environment)


def from_reader(item: Finding, nodes: Sequence[str], environment: Mapping[str, str] | None = None) -> LiveFinding:
    """What a reader of files found, in what was read on these nodes."""
    return {**item, "nodes": list(nodes), "environment": dict(environment or {})}


def some(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def size(num_bytes: int | float) -> str:
    """Bytes for a person, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
