"""Reads the results store: its tables as pandas frames, each read when it is asked for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd

from raybench.results.folder import Folder, StoreError, open_folder
from raybench.results.parts import REQUEST_KEY, NotAPartError, Part, frame_of, open_part, round_of

DEFAULT_RESULTS = "results"
NUM_THREADS = 4
RoundKey = tuple[str, str, str, int]
"""A round by suite, track, case and number."""
In = TypeVar("In")
Out = TypeVar("Out")


class Results:
    """The tables of a results folder, or of some of its suites, as pandas frames.

    A frame is read when it is first asked for. Only complete rounds are in it: those with a row in `runs`, and
    of a round recorded by several attempts the last one. Collective sweeps, which have no rows in `runs`, are in
    `collectives` alone.
    """

    def __init__(self, folder: Folder, suite_ids: Iterable[str]) -> None:
        self.folder = folder
        self.suite_ids = sorted(suite_ids)
        self.problems: list[str] = []
        """Files that were left out, each with the reason."""
        self._names: dict[RoundKey, str] = {}
        """File name of every round in `runs`, the same in each table."""
        self._listings: dict[tuple[str, str], set[str]] = {}
        self.requests: dict[str, Mapping[str, Any]] = {}
        """What each suite was asked for, as its writer was given it; without those that were given nothing."""
        self.runs: pd.DataFrame = self._read_runs()
        """One row a round."""

    def __repr__(self) -> str:
        return f"Results({str(self.folder)!r}, {len(self.suite_ids)} suites, {len(self.runs)} rounds)"

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row a rank and round: where it ran and what it held."""
        return self._read("ranks")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a rank and step."""
        return self._read("steps")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation on held-out data."""
        return self._read("evaluations")

    @cached_property
    def operations(self) -> pd.DataFrame:
        """One row an operation of a rank in the instrumented steps."""
        return self._read("operations")

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """One row a size, round and case of the collective sweeps."""
        names = [(suite, name) for suite in self.suite_ids for name in part_names(self.folder, suite, "collectives")]
        pieces = [p for p in in_threads(lambda place: self._read_part("collectives", *place), names) if p is not None]
        return frame_of("collectives", pieces)

    def summary(self) -> pd.DataFrame:
        """One tidy row a case."""
        from raybench.analysis.metrics import summary

        return summary(self)

    @property
    def rounds(self) -> list[RoundKey]:
        """Every round in `runs`, in its order."""
        return list(self._names)

    def piece(self, table: str, key: RoundKey, columns: Sequence[str] | None = None) -> Any:
        """The rows of one round as an Arrow table, so that a large table need not be held at once.

        None where the round has none, or they cannot be read.
        """
        name = self._names[key]
        return self._read_part(table, key[0], name, columns) if name in self._present(table, key[0]) else None

    def _read_part(self, table: str, suite: str, name: str, columns: Sequence[str] | None = None) -> Any:
        """A part as an Arrow table, or None where it cannot be read."""
        relative = f"{table}/{suite}/{name}"
        try:
            return open_part(self.folder, table, relative).read(columns)
        except NotAPartError as problem:
            self._skip(relative, problem)
            return None

    def asked(self, suite_id: str, track: str) -> Mapping[str, Any]:
        """A track as the suite's request holds it under `tracks`; empty where it does not."""
        tracks = self.requests.get(suite_id, {}).get("tracks")
        found = tracks if isinstance(tracks, list) else []
        return next((t for t in found if isinstance(t, dict) and t.get("track") == track), {})

    def latest(self) -> Results:
        """Of every track the rounds of the newest suite that measured it, or tried to where none did."""
        runs = self.runs.assign(measured=self.runs.window_ns.notna())
        runs = runs.groupby(["track", "suite_id"], observed=True).agg({"measured": "any", "started_at": "max"})
        ranked = runs.reset_index().sort_values(["measured", "started_at", "suite_id"], na_position="first")
        newest = dict(zip(ranked.track, ranked.suite_id, strict=True))
        return self.only(lambda key: newest[key[1]] == key[0])

    def only(self, chosen: Callable[[RoundKey], bool]) -> Results:
        """The results of some rounds alone."""
        kept = [chosen(key) for key in self._names]
        part = copy(self)
        for table in ("ranks", "steps", "evaluations", "operations"):
            part.__dict__.pop(table, None)
        part._names = {key: name for (key, name), keep in zip(self._names.items(), kept, strict=True) if keep}
        part.runs = self.runs[pd.array(kept, dtype="bool")].reset_index(drop=True)
        part.suite_ids = sorted({key[0] for key in part._names})
        return part

    def _present(self, table: str, suite: str) -> set[str]:
        if (table, suite) not in self._listings:
            self._listings[table, suite] = set(self.folder.entries(f"{table}/{suite}")[1])
        return self._listings[table, suite]

    def _read(self, table: str) -> pd.DataFrame:
        pieces = [p for p in in_threads(lambda key: self.piece(table, key), self.rounds) if p is not None]
        frame = frame_of(table, pieces)
        for column in ("suite_id", "track", "case"):
            # The categories of `runs`, so that frames merge on them without losing the dtype.
            frame[column] = frame[column].cat.set_categories(self.runs[column].cat.categories)
        return frame

    def _read_runs(self) -> pd.DataFrame:
        places = [(suite, name) for suite in self.suite_ids for name in part_names(self.folder, suite)]
        newest: dict[RoundKey, tuple[int, str, Any]] = {}
        for (suite, name), found in zip(places, in_threads(self._read_run, places), strict=True):
            if found is not None:
                (track, case, attempt, number), piece = found
                key = (suite, track, case, number)
                if key not in newest or newest[key][0] < attempt:
                    newest[key] = (attempt, name, piece)
        self._names = {key: name for key, (_, name, _) in newest.items()}
        return frame_of("runs", [piece for _, _, piece in newest.values()])

    def _read_run(self, place: tuple[str, str]) -> tuple[tuple[str, str, int, int], Any] | None:
        suite, name = place
        relative = f"runs/{suite}/{name}"
        try:
            part = open_part(self.folder, "runs", relative)
            if suite not in self.requests and (request := _request_of(part)) is not None:
                self.requests[suite] = request
            piece = part.read()
            return round_of(piece), piece
        except NotAPartError as problem:
            self._skip(relative, problem)
            return None

    def _skip(self, relative: str, problem: NotAPartError) -> None:
        text = f"{relative} {problem}"
        if text not in self.problems:
            self.problems.append(text)
            warnings.warn(f"results {self.folder}: {text}; left out", stacklevel=4)


def load(
    results: str | Path | Folder = DEFAULT_RESULTS,
    suite: str | None = None,
    *,
    of: Literal["runs", "collectives", "any"] = "runs",
) -> Results:
    """Read results: a folder, a suite_id in `results/`, or `folder@suite_id`.

    Args:
        of: what must be there: rounds of tracks (`runs`), a collective sweep, or either of them.

    Raises:
        StoreError: there are none, they cannot be read, or they are a newer raybench's.
    """
    tables = ("runs", "collectives") if of == "any" else (of,)
    folder, suite = _resolve(results, suite, tables)
    found = sorted({name for table in tables for name in folder.entries(table)[0]})
    if suite is not None:
        if suite not in found:
            near = f" (it has {', '.join(found[-5:])})" if found else ""
            raise StoreError(f"results {folder}: there is no suite {suite!r} in it{near}")
        found = [suite]
    loaded = Results(folder, found)
    if all(getattr(loaded, table).empty for table in tables):
        why = f": {loaded.problems[0]}" if loaded.problems else ""
        if of == "runs" and not why and folder.entries("collectives")[0]:
            why = " but sweeps of `raybench comm` (its table is `collectives`)"
        what = "collective sweeps" if of == "collectives" else "results"
        raise StoreError(f"results {folder}: there are no {what} in it{why}")
    return loaded


def _resolve(results: str | Path | Folder, suite: str | None, tables: Sequence[str]) -> tuple[Folder, str | None]:
    """The folder and, where it is named, the suite that RESULTS means."""
    folder = open_folder(results)
    if isinstance(results, Folder) or any(map(folder.is_folder, tables)):
        return folder, suite
    text = str(results)
    if suite is None:
        place, at, name = text.rpartition("@")
        if at and place and name and "/" not in name:
            return open_folder(place), name
        usual = open_folder(DEFAULT_RESULTS)
        if "/" not in text and any(usual.is_folder(f"{table}/{text}") for table in tables):
            return usual, text
    if not folder.exists():
        raise StoreError(f"results {folder}: is not a folder, a suite_id in results/, or FOLDER@SUITE_ID")
    if not folder.is_folder():
        raise StoreError(f"results {folder}: is not a folder")
    return folder, suite


def part_names(folder: Folder, suite_id: str, table: str = "runs") -> list[str]:
    """Names of a suite's parts in a table."""
    return [name for name in folder.entries(f"{table}/{suite_id}")[1] if name.endswith(".parquet")]


def in_threads(function: Callable[[In], Out], items: Sequence[In]) -> Iterator[Out]:
    """Apply a function that mostly reads files; results in order."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from pool.map(function, items)


def _request_of(part: Part) -> Mapping[str, Any] | None:
    try:
        request = json.loads(part.metadata[REQUEST_KEY])
    except (KeyError, ValueError):
        return None
    return request if isinstance(request, dict) else None
