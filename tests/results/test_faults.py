"""Whatever happens while results are written, nothing unreadable or half-written is left."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raybench.results import folder as folder_module
from raybench.results.parts import VERSION_KEY
from raybench.results.schema import TABLES
from raybench.results.store import StoreError, Writer, completed_rounds, load, suites
from tests.results.made import TRACK, rank_rows, run_row, skipped_row, step_rows

TABLES_OF_A_ROUND = {"runs": [run_row()], "ranks": rank_rows(), "steps": step_rows([[1, 2], [3, 4]])}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the writer runs after it."""


class Disk:
    """Counts what is done to the file system, and lets the chosen operation and, if killed, all later ones fail."""

    def __init__(self, fail_at: int, fault: Callable[[], BaseException]) -> None:
        self.fail_at = fail_at
        self.fault = fault
        self.done = 0

    def operate(self) -> bool:
        """Whether this operation may go on."""
        self.done += 1
        return self.done < self.fail_at or (self.done > self.fail_at and not isinstance(self.fault(), Killed))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self.operate():
                raise self.fault()
            return function(*args, **options)

        return call

    def open(self, path: Path, mode: str) -> Any:
        if not self.operate():
            raise self.fault()
        file = open(path, mode)  # noqa: SIM115
        write = file.write
        disk = self

        class HalfWriter:
            """Writes the first half of what it is given before it fails."""

            def write(self, data: Any) -> None:
                if disk.operate():
                    write(data)
                else:
                    write(memoryview(data)[: len(data) // 2])
                    file.flush()
                    raise disk.fault()

            def __enter__(self) -> HalfWriter:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return HalfWriter()

    def __enter__(self) -> Disk:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(folder_module, "open", self.open, raising=False)
        self._patch.setattr(os, "fsync", self.wrap(os.fsync))
        for name in ("rename", "unlink", "mkdir"):
            self._patch.setattr(Path, name, self.wrap(getattr(Path, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_whole(folder: Path) -> None:
    """Every file that a reader sees is complete, and each round in `runs` has all its rows."""
    for path in folder.rglob("*.parquet"):
        pq.read_table(path)
    rounds = load(folder).runs if suites(folder) else pd.DataFrame(columns=["status"])
    measured = int((rounds.status == "ok").sum())
    if measured:
        results = load(folder)
        assert results.problems == []
        assert len(results.ranks) == 2 * measured
        assert len(results.steps) == 4 * measured


def write_rounds(folder: Path, count: int, acknowledged: list[int], attempt: int = 1) -> None:
    writer = Writer(folder, "s")
    writer.check()
    for number in range(len(acknowledged), count):
        writer.write_round(TRACK, "naive", attempt, number, TABLES_OF_A_ROUND)
        acknowledged.append(number)


@given(fail_at=st.integers(1, 110))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_killed_writer_loses_at_most_the_round_in_flight(
    fail_at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("killed") / "results"
    acknowledged: list[int] = []
    try:
        with Disk(fail_at, Killed):
            write_rounds(folder, 3, acknowledged)
    except Killed:
        pass
    if folder.exists():
        assert_whole(folder)
    found = {number for _, _, number in completed_rounds(folder, "s")}
    assert set(acknowledged) <= found <= set(range(len(acknowledged) + 1))

    write_rounds(folder, 3, sorted(found), attempt=2)
    assert_whole(folder)
    assert {number for _, _, number in completed_rounds(folder, "s")} == {0, 1, 2}
    assert [p for p in folder.rglob("*") if p.name.endswith((".tmp", ".probe"))] == []
    assert len(pd.read_parquet(folder / "steps")) == 12


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("fail_at", range(1, 16))
def test_a_failing_disk_leaves_nothing_of_the_round(tmp_path: Path, fail_at: int, code: int) -> None:
    folder = tmp_path / "results"
    writer = Writer(folder, "s")
    writer.write_round(TRACK, "naive", 1, 0, TABLES_OF_A_ROUND)
    before = files(folder)
    disk = Disk(fail_at, lambda: OSError(code, os.strerror(code)))
    with disk, pytest.raises(StoreError, match=os.strerror(code)) as caught:
        writer.write_round(TRACK, "naive", 1, 1, TABLES_OF_A_ROUND)
    assert str(folder) in str(caught.value)
    assert files(folder) == before
    writer.write_round(TRACK, "naive", 1, 1, TABLES_OF_A_ROUND)
    assert_whole(folder)


def test_a_failing_disk_leaves_the_round_that_was_to_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    writer = Writer(folder, "s")
    writer.write_round(TRACK, "naive", 0, 0, {"runs": [skipped_row("interrupted")]})
    before = files(folder)
    with Disk(3, lambda: OSError(errno.ENOSPC, "No space left")), pytest.raises(StoreError):
        writer.write_round(TRACK, "naive", 1, 0, TABLES_OF_A_ROUND)
    assert files(folder) == before


def test_a_folder_that_is_removed_under_way_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    writer = Writer(folder, "s")
    writer.write_round(TRACK, "naive", 1, 0, TABLES_OF_A_ROUND)
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match="was removed"):
        writer.write_round(TRACK, "naive", 1, 1, TABLES_OF_A_ROUND)
    assert not folder.exists()


def test_one_table_that_is_removed_under_way_leaves_the_others_alone(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    writer = Writer(folder, "s")
    writer.write_round(TRACK, "naive", 1, 0, TABLES_OF_A_ROUND)
    shutil.rmtree(folder / "runs" / "s")
    before = files(folder)
    with pytest.raises(StoreError, match="was removed"):
        writer.write_round(TRACK, "naive", 1, 1, TABLES_OF_A_ROUND)
    assert files(folder) == before


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/results", "\0"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="results") as caught:
        Writer(tmp_path / place, "s").check()
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == {"file": b"no folder"}


def test_files_being_written_are_seen_by_no_reader(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    writer.write_round(TRACK, "naive", 1, 0, TABLES_OF_A_ROUND)
    staged = writer.folder.stage("runs/s/half.parquet", b"half a file")
    assert len(pd.read_parquet(tmp_path / "runs")) == len(load(tmp_path).runs) == 1
    assert duckdb.sql(f"select count(*) from '{tmp_path}/runs/**/*.parquet'").fetchall() == [(1,)]
    staged.discard()


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], version: bytes = b"1.0") -> None:
    table = change(pq.read_table(path))
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: version}), path)


@pytest.fixture
def two_rounds(tmp_path: Path) -> Path:
    writer = Writer(tmp_path, "s")
    for number in range(2):
        writer.write_round(TRACK, "naive", 1, number, TABLES_OF_A_ROUND)
    return tmp_path


def test_older_parts_are_read_and_columns_of_newer_ones_left_out(two_rounds: Path) -> None:
    first, second = sorted((two_rounds / "runs" / "s").iterdir())
    rewrite(first, lambda t: t.drop_columns(["control_tokens", "reason"]), b"1.0")
    rewrite(second, lambda t: t.append_column("of_tomorrow", pa.array([1])), b"1.7")
    runs = load(two_rounds).runs
    assert list(runs.columns) == list(TABLES["runs"])
    assert runs.control_tokens.isna().tolist() == [True, False]


@pytest.mark.parametrize("version", [b"2.0", b"10.3"])
def test_newer_results_are_refused_in_words(two_rounds: Path, version: bytes) -> None:
    first = min((two_rounds / "runs" / "s").iterdir())
    rewrite(first, lambda t: t, version)
    with pytest.raises(StoreError, match=f"version {version.decode()}.*newer raybench"):
        load(two_rounds)
    with pytest.raises(StoreError, match="newer raybench"):
        Writer(two_rounds, "other").check()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "garbage": lambda path: path.write_bytes(b"\x89PNG" * 1000),
    "middle": lambda path: path.write_bytes(b"PAR1" + b"\xff" * 400 + path.read_bytes()[404:]),
    "other columns": lambda path: pq.write_table(pa.table({"x": [1]}), path),
    "other types": lambda path: rewrite(
        path, lambda t: t.set_column(t.column_names.index("round"), "round", pa.array(["one"] * len(t)))
    ),
    "odd version": lambda path: rewrite(path, lambda t: t, b"latest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("table", ["runs", "ranks"])
@pytest.mark.filterwarnings("ignore:results")
def test_a_damaged_part_among_good_ones_is_left_out_and_listed(two_rounds: Path, table: str, damage: str) -> None:
    path = min((two_rounds / table / "s").iterdir())
    DAMAGES[damage](path)
    results = load(two_rounds)
    assert len(results.ranks) == 2
    assert len(results.problems) == 1
    assert results.problems[0].startswith(f"{table}/s/{path.name} ")
    assert "\n" not in results.problems[0]
    assert len(results.summary()) == 1


@pytest.mark.filterwarnings("ignore:results")
def test_only_damaged_parts_are_one_message(two_rounds: Path) -> None:
    for path in (two_rounds / "runs" / "s").iterdir():
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="no results in it"):
        load(two_rounds)


def test_a_damaged_part_warns(two_rounds: Path) -> None:
    min((two_rounds / "runs" / "s").iterdir()).write_bytes(b"")
    with pytest.warns(UserWarning, match="left out"):
        load(two_rounds)


def test_rows_of_rounds_that_are_not_in_runs_are_left_out(two_rounds: Path) -> None:
    max((two_rounds / "runs" / "s").iterdir()).unlink()
    assert len(load(two_rounds).steps) == 4
    Writer(two_rounds, "s").check()
    assert len(pd.read_parquet(two_rounds / "steps")) == 4
