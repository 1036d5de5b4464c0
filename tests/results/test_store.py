"""What is written is what every reader finds."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raybench
from raybench.errors import RequestError
from raybench.results.parts import DTYPES
from raybench.results.schema import TABLES, TRACK_TABLES
from raybench.results.store import (
    StoreError,
    Writer,
    completed_rounds,
    last_attempts,
    load,
    newest_suite,
    recorded_rounds,
    request_hash,
    suites,
)
from tests.results.made import REQUEST, STARTED, TRACK, operation_rows, rank_rows, run_row, skipped_row, step_rows

BIG = 2**62 + 1


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two suites, two cases, two rounds; one case skipped."""
    folder = tmp_path / "results"
    for suite in ("suite-1", "suite-2"):
        writer = Writer(folder, suite, REQUEST)
        for number in range(2):
            for case in ("naive", "bucketed"):
                tables = {
                    "runs": [run_row(window_ns=10**9 + number)],
                    "ranks": rank_rows(clock_offset_ns=None if number else BIG),
                    "steps": step_rows([[10, 20, 30], [11, 21, 31]]),
                    "operations": operation_rows({(0, 3): [5], (1, 3): [7]}),
                }
                writer.write_round(TRACK, case, 1, number, tables)
        writer.write_round(TRACK, "zero3", 0, 0, {"runs": [skipped_row("needs 4 GPUs, the cluster has 2")]})
    return folder


def visible(folder: Path) -> list[Path]:
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("table", TRACK_TABLES)
def test_pandas_pyarrow_and_duckdb_read_alike(store: Path, table: str) -> None:
    by_pandas = pd.read_parquet(str(store / table))
    arrow = ds.dataset(str(store / table)).to_table()
    by_pyarrow = arrow.to_pandas()
    by_duckdb = duckdb.sql(f"select * from '{store}/{table}/**/*.parquet'")

    assert list(by_pandas.columns) == list(TABLES[table]) == arrow.column_names == by_duckdb.columns
    keys = [c for c in ("suite_id", "case", "round", "rank", "step", "sequence") if c in TABLES[table]]
    rows = [
        frame.sort_values(keys).astype(object).where(frame.notna(), None).to_dict("records")
        for frame in (by_pandas, by_pyarrow, by_duckdb.df().replace({pd.NaT: None}))
    ]
    for one in rows:
        for row in one:
            if row.get("started_at") is not None:
                row["started_at"] = pd.Timestamp(row["started_at"]).tz_convert("UTC")
    assert rows[0] == rows[1] == [{k: None if pd.isna(v) else v for k, v in row.items()} for row in rows[2]]
    assert len(by_pandas) == {"runs": 10, "ranks": 16, "steps": 48, "evaluations": 0, "operations": 16}[table]

    grouped = arrow.group_by("case").aggregate([("round", "count")]).to_pylist()
    counts = duckdb.sql(f"select \"case\", count(*) from '{store}/{table}/**/*.parquet' group by 1").fetchall()
    assert {g["case"]: g["round_count"] for g in grouped} == dict(counts) == by_pandas.groupby("case").size().to_dict()


def test_plain_pandas_keeps_large_integers_beside_nulls(store: Path) -> None:
    offsets = pd.read_parquet(store / "ranks").clock_offset_ns
    assert str(offsets.dtype) == "Int64"
    assert offsets.max() == BIG
    assert offsets.isna().sum() == 8


def test_text_is_dictionary_encoded(store: Path) -> None:
    part = next((store / "steps").rglob("*.parquet"))
    group = pq.ParquetFile(part).metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    assert all("RLE_DICTIONARY" in encodings[name] for name, kind in TABLES["steps"].items() if kind == "text")


def test_loaded_frames_have_the_documented_dtypes(store: Path) -> None:
    results = raybench.load(store)
    for table, columns in TABLES.items():
        frame = getattr(results, table)
        assert {n: str(d) for n, d in frame.dtypes.items()} == {n: DTYPES[k] for n, k in columns.items()}
    merged = results.steps.merge(results.runs, on=["suite_id", "track", "case", "round"])
    assert len(merged) == len(results.steps)
    assert str(merged.track.dtype) == "category"


def test_every_file_of_a_round_is_named_as_designed(store: Path) -> None:
    names = {str(p) for p in visible(store) if "suite-1" in str(p)}
    assert f"runs/suite-1/{TRACK}-naive-1-0.parquet" in names
    assert f"operations/suite-1/{TRACK}-bucketed-1-1.parquet" in names
    assert f"runs/suite-1/{TRACK}-zero3-0-0.parquet" in names


NUMBERS = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "text": st.text(max_size=20),
    "timestamp": st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC)),
}


@given(data=st.data(), table=st.sampled_from(TRACK_TABLES))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_comes_back_as_it_was_written(
    data: st.DataObject, table: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = {"suite_id", "track", "case", "round", "attempt"}
    columns = {n: st.none() | NUMBERS[k] for n, k in TABLES[table].items() if n not in keys}
    rows = data.draw(st.lists(st.fixed_dictionaries({}, optional=columns), min_size=1, max_size=3))
    rows = rows[:1] if table == "runs" else rows
    folder = tmp_path_factory.mktemp("store")
    Writer(folder, "s").write_round("t", "c", 1, 0, {"runs": [{}], table: rows})
    frame = getattr(load(folder), table)
    found = [{k: None if pd.isna(v) else v for k, v in row.items()} for row in frame.to_dict("records")]
    for row, back in zip(rows, found, strict=True):
        for name in columns:
            assert back[name] == row.get(name), name


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"runs": [{"speed": 1}]}, "unknown columns"),
        ({"runs": [{}], "speeds": []}, "unknown tables"),
        ({"runs": []}, "exactly one row"),
        ({"runs": [{}, {}]}, "exactly one row"),
        ({"runs": [{"window_ns": 1.5}]}, "window_ns"),
        ({"runs": [{"window_ns": 2**63}]}, "window_ns"),
        ({"runs": [{"loss": "low"}]}, "loss"),
        ({"runs": [{"reason": 7}]}, "reason"),
        ({"runs": [{"case": "other"}]}, "case is 'other'"),
        ({"runs": [{"started_at": datetime(2026, 1, 1)}]}, "time zone"),
    ],
)
def test_wrong_rows_are_refused_before_anything_is_written(
    tmp_path: Path, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Writer(tmp_path, "s").write_round("t", "c", 1, 0, tables)
    assert visible(tmp_path) == []


def test_text_that_is_no_unicode_and_other_time_zones_are_kept(tmp_path: Path) -> None:
    stack = os.fsdecode(b"\xff bad \x00 byte")
    there = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    Writer(tmp_path, "s").write_round("t", "c", 1, 0, {"runs": [{"started_at": there}], "ranks": [{"stack": stack}]})
    results = load(tmp_path)
    assert "bad" in results.ranks["stack"][0]
    assert results.runs.started_at[0] == pd.Timestamp("2026-01-01 07:00", tz="UTC")


def test_names_that_ask_for_one_file_do_not_overwrite_each_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    for track, case, loss in (("a", "b-c", 1.0), ("a-b", "c", 2.0), ("a=b/../c", "d" * 300, 3.0)):
        writer.write_round(track, case, 1, 0, {"runs": [{"loss": loss}]})
    writer.write_round("a", "b-c", 2, 0, {"runs": [{"loss": 4.0}]})
    runs = load(tmp_path).runs
    assert sorted(zip(runs.track, runs.loss, strict=True)) == [("a", 4.0), ("a-b", 2.0), ("a=b/../c", 3.0)]
    assert "a" not in pd.read_parquet(tmp_path / "runs").columns


def test_a_later_attempt_takes_the_place_of_a_round_and_of_the_placeholder(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    steps = step_rows([[1, 2]])
    writer.write_round("t", "c", 0, 0, {"runs": [skipped_row("interrupted")]})
    writer.write_round("t", "c", 1, 1, {"runs": [run_row(status="timeout")], "steps": steps})
    assert recorded_rounds(tmp_path, "s") == {("t", "c", 1): "timeout"}
    Writer(tmp_path, "s").write_round("t", "c", 2, 1, {"runs": [run_row()], "steps": steps})
    assert completed_rounds(tmp_path, "s") == {("t", "c", 1)}
    assert last_attempts(tmp_path, "s") == {"t": 2}
    assert len(pd.read_parquet(tmp_path / "steps")) == 2
    assert len(pd.read_parquet(tmp_path / "evaluations")) == 0


def test_a_round_is_written_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    writer.write_round("t", "c", 1, 0, {"runs": [{}]})
    with pytest.raises(ValueError, match="written already"):
        writer.write_round("t", "c", 1, 0, {"runs": [{}]})
    with pytest.raises(ValueError, match="written already"):
        Writer(tmp_path, "s").write_round("t", "c", 1, 0, {"runs": [{}]})
    with pytest.raises(ValueError, match="written already, by attempt 1"):
        writer.write_round("t", "c", 0, 0, {"runs": [skipped_row("interrupted")]})


def test_suites_know_what_they_were_asked_for(tmp_path: Path) -> None:
    for index, (suite, request) in enumerate([("s3", {"a": 1}), ("s1", {"a": 2}), ("s2", {"a": 1}), ("s4", None)]):
        row = run_row(started_at=STARTED + timedelta(hours=index))
        Writer(tmp_path, suite, request).write_round("t", "c", 1, 0, {"runs": [row]})
    assert [suite.suite_id for suite in suites(tmp_path)] == ["s3", "s1", "s2", "s4"]
    newest = newest_suite(tmp_path, {"a": 1})
    assert newest is not None
    assert (newest.suite_id, newest.request_hash, newest.tracks) == ("s2", request_hash({"a": 1}), ("t",))
    assert newest.versions["git_dirty"] is False
    assert newest_suite(tmp_path, {"a": 3}) is None
    assert suites(tmp_path)[-1].request_hash is None
    assert suites(tmp_path / "nowhere") == []


def test_results_are_named_by_folder_suite_or_both(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(store).suite_ids == ["suite-1", "suite-2"]
    assert load(str(store), "suite-1").suite_ids == ["suite-1"]
    assert load(f"{store}@suite-2").suite_ids == ["suite-2"]
    monkeypatch.chdir(store.parent)
    assert load().suite_ids == ["suite-1", "suite-2"]
    assert load("suite-2").suite_ids == ["suite-2"]
    assert load(Path("results")).suite_ids == ["suite-1", "suite-2"]


@pytest.mark.parametrize("name", ["nowhere", "results@suite-9", "empty", "file", "empty@suite-1"])
def test_missing_results_are_one_sentence(store: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(store.parent)
    Path("empty").mkdir()
    Path("file").write_text("no folder")
    with pytest.raises(RequestError, match=name.split("@")[-1]) as caught:
        load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suite_id", ["", "a/b", "a=b", "..", ".hidden", "a b"])
def test_a_suite_id_is_a_plain_name(tmp_path: Path, suite_id: str) -> None:
    with pytest.raises(StoreError, match="suite_id"):
        Writer(tmp_path, suite_id)


def test_the_newest_suite_that_measured_a_track_is_the_latest(tmp_path: Path) -> None:
    for index, (suite, window) in enumerate([("old", 10), ("measured", 20), ("verified", None)]):
        row = run_row(started_at=STARTED + timedelta(hours=index), window_ns=window)
        Writer(tmp_path, suite).write_round("t", "c", 1, 0, {"runs": [row]})
    Writer(tmp_path, "other").write_round("u", "c", 0, 0, {"runs": [skipped_row("no")]})
    latest = load(tmp_path).latest()
    assert latest.suite_ids == ["measured", "other"]
    assert sorted(latest.runs.track) == ["t", "u"]
