"""Which files of a folder are traces, of which rank, and which of several windows of time are asked for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raybench.errors import RequestError
from raybench.traces.rank import RankReport

SUFFIXES = (".json", ".json.gz", ".sqlite", "cuda_gpu_kern_sum.csv")
_RANK = re.compile(r"(?:rank|worker)[_-]?(\d+)", re.IGNORECASE)
_RANK_FOLDER = re.compile(_RANK.pattern + r"$", re.IGNORECASE)
_STAMP = re.compile(r"\.(\d{12,19})\.")
"""Milliseconds or finer, as torch's tensorboard_trace_handler puts into the name."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Traces of the same time, one a rank."""

    index: int
    begin_ns: int
    reports: list[RankReport]


def find_files(place: Path) -> list[Path]:
    """All files under a folder that may be traces, or the file itself.

    Raises:
        RequestError: It is not there, or holds none.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise RequestError(f"DIR: {place} is not there (a folder of traces, or one trace)")
    found = sorted(path for path in place.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
    if not found:
        raise RequestError(f"DIR: {place} holds no trace ({', '.join('*' + suffix for suffix in SUFFIXES)})")
    return found


def newest(paths: Sequence[Path]) -> list[Path]:
    """Of files whose names tell the same rank of the same case, the newest alone; all others."""
    groups: dict[tuple[Path, int], list[Path]] = defaultdict(list)
    kept = []
    for path in paths:
        rank = rank_of(path)
        if rank is None or path.name.endswith((".sqlite", ".csv")):
            kept.append(path)
        else:
            groups[case_folder(path), rank].append(path)
    return sorted(kept + [max(group, key=_stamp) for group in groups.values()])


def rank_of(path: Path) -> int | None:
    """The rank by the name of a file, or of the folder that it lies in."""
    found = _RANK.search(path.name) or _RANK_FOLDER.match(path.parent.name)
    return int(found[1]) if found is not None else None


def case_folder(path: Path) -> Path:
    """The folder of all ranks of a trace's case."""
    return path.parent.parent if _RANK_FOLDER.match(path.parent.name) else path.parent


def _stamp(path: Path) -> tuple[int, str]:
    found = _STAMP.search(path.name)
    return (int(found[1]) if found else path.stat().st_mtime_ns // 10**6, path.name)


def give_ranks(reports: Sequence[RankReport]) -> None:
    """Give every report of a case a rank: by its content, else by its file's name, else the next free one."""
    for report in reports:
        report.rank = rank_of(report.path) if report.rank is None else report.rank
    taken = {report.rank for report in reports if report.rank is not None}
    for report in reports:
        if report.rank is None:
            report.rank = next(number for number in range(len(reports) + 1) if number not in taken)
            taken.add(report.rank)
            report.problems.append(f"nothing tells its rank: called {report.rank}")


def windows(reports: Sequence[RankReport]) -> list[Window]:
    """Traces of one case, window by window: the first of each rank, the second of each, ..."""
    by_rank: dict[int | None, list[RankReport]] = defaultdict(list)
    for report in sorted(reports, key=lambda r: r.timeline.begin_ns):
        by_rank[report.rank].append(report)
    found = []
    for index in range(max(map(len, by_rank.values()))):
        members = [own[index] for _, own in sorted(by_rank.items(), key=lambda item: item[0] or 0) if index < len(own)]
        found.append(Window(index=index, begin_ns=min(report.timeline.begin_ns for report in members), reports=members))
    return found


def missing_ranks(reports: Sequence[RankReport]) -> str | None:
    """Which ranks of the job have no trace, in words."""
    size = max((report.world_size or 0 for report in reports), default=0)
    there = {report.rank for report in reports}
    ranks = next((r.case["ranks"] for r in reports if isinstance(r.case.get("ranks"), list)), range(min(size, 1 << 20)))
    missing = [rank for rank in ranks if rank not in there]
    if not missing:
        return None
    shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    return f"{len(missing)} of {size} ranks have no trace here: {shown}"
