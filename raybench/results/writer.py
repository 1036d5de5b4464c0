"""Writes the rounds of one suite, each whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raybench.results.folder import Folder, Staged, StoreError, open_folder
from raybench.results.parts import NotAPartError, check_suite_id, encode, file_name, open_part, round_of
from raybench.results.schema import TRACK_TABLES

ROUND_TABLES = TRACK_TABLES[1:]


class Writer:
    """Writes one suite's rounds below a results folder; one writer a suite at a time.

    A round's row in `runs` appears last: where it is, the round's other tables are complete. A round recorded
    again by a later attempt takes the place of the earlier one, and the placeholder of a skipped case
    (attempt 0) goes when the case has a round.
    """

    def __init__(self, results: str | Path | Folder, suite_id: str, request: Mapping[str, Any] | None = None) -> None:
        """`request`: what was asked for, as plain JSON data, kept in the metadata of the suite's parts."""
        check_suite_id(suite_id)
        self.folder = open_folder(results)
        self.suite_id = suite_id
        self.request = request
        self._rounds: dict[tuple[str, str, int, int], str] | None = None
        """File name of every round in `runs` by track, case, attempt and round; None before `check`."""
        self._started: set[str] = set()
        """Tables that have a part."""

    def check(self) -> None:
        """Refuse a folder that cannot be written or is a newer raybench's; clear what a killed writer left.

        Raises:
            StoreError: in one sentence.
        """
        if self.folder.exists() and not self.folder.is_folder():
            raise StoreError(f"results {self.folder}: is not a folder")
        self._refuse_newer()
        for table in TRACK_TABLES:
            self.folder.make(self._place(table))
            self.folder.sweep(self._place(table))
        self.folder.probe(self._place("runs"))
        self._remove_orphans()
        self._rounds = self._read_rounds()
        self._started = {table for table in TRACK_TABLES if self._parts(table)}

    def write_round(
        self,
        track: str,
        case: str,
        attempt: int,
        round: int,
        tables: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """Write all rows of a round; `tables["runs"]` must hold exactly one. Columns left out are null.

        The columns suite_id, track, case, round and attempt are filled in.

        Raises:
            StoreError: the folder cannot be written; nothing of the round is left in it.
            ValueError: an unknown table or column, a wrong type, or a round that was written before.
        """
        if unknown := set(tables) - set(TRACK_TABLES):
            raise ValueError(f"unknown tables {sorted(unknown)}")
        if len(tables.get("runs", ())) != 1:
            raise ValueError("runs: a round has exactly one row")
        if self._rounds is None:
            self.check()
        rounds = self._rounds or {}
        place = (track, case, attempt, round)
        if later := [old[2] for old in rounds if _same_round(place, old) and old[2] >= attempt]:
            raise ValueError(f"runs: round {round} of {track}:{case} is written already, by attempt {max(later)}")

        key = {"suite_id": self.suite_id, "track": track, "case": case, "round": round}
        superseded = {old: rounds[old] for old in rounds if _supersedes(place, old)}
        # A table without rows in this round needs no part, but every suite has at least one of every table.
        written = [t for t in ROUND_TABLES if tables.get(t) or t not in self._started or superseded]
        parts = {table: encode(table, tables.get(table, ()), key) for table in written}
        parts["runs"] = encode("runs", tables["runs"], {**key, "attempt": attempt}, self.request)
        name = file_name(*place, taken=set(rounds.values()))
        self._write(name, parts, list(superseded.values()))
        self._rounds = {p: n for p, n in rounds.items() if p not in superseded} | {place: name}
        self._started |= set(parts)

    def write_trace(self, track: str, case: str, rank: int, data: bytes) -> None:
        """Keep a rank's trace, packed by gzip, in the place of an earlier one.

        Raises:
            StoreError: the folder cannot be written.
        """
        place = f"traces/{self.suite_id}/{track}/{case}"
        self.folder.make(place)
        self.folder.stage(f"{place}/rank_{rank}.json.gz", data).commit()

    def write_hang(self, track: str, case: str, round: int, attempt: int, files: Mapping[str, str]) -> str:
        """Keep what was captured of a round that hung, a text a file; returns the folder within the results.

        Raises:
            StoreError: the folder cannot be written.
        """
        place = f"hangs/{self.suite_id}/{track}/{case}/{attempt}-{round}"
        self.folder.make(place)
        for name, text in files.items():
            self.folder.stage(f"{place}/{name}", text.encode()).commit()
        return place

    def _write(self, name: str, parts: Mapping[str, Any], superseded: list[str]) -> None:
        """Stage every part, where a full disk shows; then let them appear, `runs` last."""
        staged: dict[str, Staged] = {}
        try:
            for table, data in parts.items():
                staged[table] = self.folder.stage(self._place(table, name), data)
            for table in parts:
                if table == "runs":
                    self._remove(superseded)
                staged[table].commit()
        except BaseException:
            for part in staged.values():
                part.discard()
            with suppress(StoreError):
                self._remove([name])
            raise

    def _remove(self, names: Sequence[str]) -> None:
        """Remove rounds, beginning with what says that they are complete."""
        for name in names:
            for table in TRACK_TABLES:
                self.folder.remove(self._place(table, name))

    def _place(self, table: str, name: str = "") -> str:
        return f"{table}/{self.suite_id}/{name}".rstrip("/")

    def _parts(self, table: str) -> list[str]:
        return [n for n in self.folder.entries(self._place(table))[1] if n.endswith(".parquet")]

    def _read_rounds(self) -> dict[tuple[str, str, int, int], str]:
        found = {}
        for name in self._parts("runs"):
            with suppress(NotAPartError):
                part = open_part(self.folder, "runs", self._place("runs", name))
                found[round_of(part.read(["track", "case", "attempt", "round"]))] = name
        return found

    def _remove_orphans(self) -> None:
        """Remove parts whose round has no row in `runs`: what was in flight when a writer was killed."""
        complete = set(self._parts("runs"))
        for table in ROUND_TABLES:
            for name in self._parts(table):
                if name not in complete:
                    self.folder.remove(self._place(table, name))

    def _refuse_newer(self) -> None:
        """Look at one part of each suite; a newer major version raises."""
        for suite in self.folder.entries("runs")[0]:
            for name in self.folder.entries(f"runs/{suite}")[1][:1]:
                with suppress(NotAPartError):
                    open_part(self.folder, "runs", f"runs/{suite}/{name}")


def _same_round(one: tuple[str, str, int, int], other: tuple[str, str, int, int]) -> bool:
    """Whether two rounds by track, case, attempt and number differ in the attempt at most."""
    return (*one[:2], one[3]) == (*other[:2], other[3])


def _supersedes(new: tuple[str, str, int, int], old: tuple[str, str, int, int]) -> bool:
    """Whether a round takes the place of another: of an earlier attempt, or of the case's placeholder."""
    return _same_round(new, old) or (new[:2] == old[:2] and old[2] == 0 and new[2] > 0)
