"""Writes the parts of a collective sweep: a file a case and round, each whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raybench.results.folder import Folder, StoreError, open_folder
from raybench.results.parts import check_suite_id, encode, file_name

TABLE = "collectives"


class SweepWriter:
    """Writes one sweep's rows below a results folder; one writer a suite."""

    def __init__(self, results: str | Path | Folder, suite_id: str, request: Mapping[str, Any]) -> None:
        """`request`: what was asked for, as plain JSON data, kept in the parts' metadata."""
        check_suite_id(suite_id)
        self.folder = open_folder(results)
        self.suite_id = suite_id
        self.request = request
        self._names: set[str] = set()

    def check(self) -> None:
        """Refuse a folder that cannot be written.

        Raises:
            StoreError: in one sentence.
        """
        if self.folder.exists() and not self.folder.is_folder():
            raise StoreError(f"results {self.folder}: is not a folder")
        self.folder.make(self._place())
        self.folder.probe(self._place())

    def write(self, track: str, case: str, attempt: int, round: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a round's rows. The columns suite_id, track, case, round and attempt are filled in.

        Raises:
            StoreError: the folder cannot be written; nothing of the round is left in it.
            ValueError: an unknown column, or a wrong type.
        """
        key = {"suite_id": self.suite_id, "track": track, "case": case, "round": round, "attempt": attempt}
        data = encode(TABLE, rows, key, self.request)
        name = file_name(track, case, attempt, round, taken=self._names)
        self.folder.stage(self._place(name), data).commit()
        self._names.add(name)

    def _place(self, name: str = "") -> str:
        return f"{TABLE}/{self.suite_id}/{name}".rstrip("/")
