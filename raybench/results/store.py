"""The results store: `load` reads it, `Writer` writes it, `suites` says what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from raybench.results.folder import Folder, StoreError, open_folder
from raybench.results.parts import canonical
from raybench.results.reader import DEFAULT_RESULTS, Results, RoundKey, load, part_names
from raybench.results.writer import Writer

__all__ = [
    "Results",
    "RoundKey",
    "StoreError",
    "Suite",
    "Writer",
    "completed_rounds",
    "last_attempts",
    "load",
    "newest_suite",
    "recorded_rounds",
    "request_hash",
    "suites",
]

Round = tuple[str, str, int]
"""A round by track, case and number."""

VERSION_COLUMNS = (
    "raybench_version",
    "git_commit",
    "git_dirty",
    "torch_version",
    "ray_version",
    "python_version",
    "nccl_version",
)


@dataclass(frozen=True)
class Suite:
    """What one suite was asked for, by which versions, and when it began."""

    suite_id: str
    started_at: pd.Timestamp | None
    request: Mapping[str, Any] | None
    """As it was given to `Writer`; None where it was not."""
    tracks: tuple[str, ...]
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Values of the columns that say which code ran."""

    @property
    def request_hash(self) -> str | None:
        return None if self.request is None else request_hash(self.request)


def suites(results: str | Path | Folder = DEFAULT_RESULTS) -> list[Suite]:
    """The suites of a folder, oldest first; none where the folder is missing."""
    folder = open_folder(results)
    names = folder.entries("runs")[0]
    found = [_suite(folder, suite_id) for suite_id in names if part_names(folder, suite_id)]
    epoch = pd.Timestamp(0, tz="UTC")
    return sorted(found, key=lambda suite: (suite.started_at or epoch, suite.suite_id))


def _suite(folder: Folder, suite_id: str) -> Suite:
    results = Results(folder, [suite_id])
    runs = results.runs
    versions = {name: values.iloc[0] for name in VERSION_COLUMNS if len(values := runs[name].dropna())}
    if "git_dirty" in versions:
        versions["git_dirty"] = bool(versions["git_dirty"])
    return Suite(
        suite_id=suite_id,
        started_at=None if runs.started_at.isna().all() else runs.started_at.min(),
        request=results.requests.get(suite_id),
        tracks=tuple(dict.fromkeys(runs.track)),
        versions=versions,
    )


def request_hash(request: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that are equal exactly for equal requests."""
    return hashlib.sha256(canonical(request).encode()).hexdigest()[:10]


def newest_suite(results: str | Path | Folder, request: Mapping[str, Any]) -> Suite | None:
    """The newest suite that was asked for the same, or None."""
    wanted = request_hash(request)
    same = [suite for suite in suites(results) if suite.request_hash == wanted]
    return same[-1] if same else None


def recorded_rounds(results: str | Path | Folder, suite_id: str) -> dict[Round, str]:
    """The status of every round of a suite that has a row; a skipped case's placeholder is its round 0."""
    runs = Results(open_folder(results), [suite_id]).runs
    rows = zip(runs.track, runs.case, runs["round"], runs.status, strict=True)
    return {(str(track), str(case), int(number)): str(status) for track, case, number, status in rows}


def completed_rounds(results: str | Path | Folder, suite_id: str) -> set[Round]:
    """The rounds of a suite whose status is ok."""
    return {key for key, status in recorded_rounds(results, suite_id).items() if status == "ok"}


def last_attempts(results: str | Path | Folder, suite_id: str) -> dict[str, int]:
    """The highest attempt recorded for each track of a suite."""
    runs = Results(open_folder(results), [suite_id]).runs
    highest = runs.groupby("track", observed=True).attempt.max()
    return {str(track): int(attempt) for track, attempt in highest.items()}
