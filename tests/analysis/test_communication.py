"""Where the time of a step goes, from operations that can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raybench.analysis.communication import bus_factor, communication, stragglers, time_split
from raybench.results.store import Results, Writer, load
from tests.results.made import TRACK, run_row

MS = 1_000_000


def operation(rank: int, begin: int, end: int, wait: int, exposed: int, **columns: Any) -> dict[str, Any]:
    """An all-reduce of 1 MB between two ranks, its times in milliseconds."""
    return {
        "rank": rank,
        "sequence": begin,
        "step": 13,
        "kind": "all_reduce",
        "axis": "data",
        "group_size": 2,
        "payload_bytes": 1_000_000,
        "wire_bytes": 1_000_000,
        "begin_ns": begin * MS,
        "end_ns": end * MS,
        "wait_ns": wait * MS,
        "exposed_ns": exposed * MS,
        **columns,
    }


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A step of 100 ms. Rank 1 begins its first all-reduce 10 ms after rank 0, which waits for it from the start."""
    operations = [
        operation(0, begin=0, end=30, wait=10, exposed=30),
        operation(1, begin=10, end=30, wait=0, exposed=20),
        # Asynchronous: the rank computes for 15 ms, and waits only for the rest.
        operation(0, begin=40, end=60, wait=10, exposed=5),
        operation(1, begin=50, end=60, wait=0, exposed=5),
    ]
    Writer(tmp_path, "s").write_round(TRACK, "naive", 1, 0, {"runs": [run_row()], "operations": operations})
    return load(tmp_path)


def test_operations_alone_leave_the_rest_undivided(results: Results) -> None:
    (row,) = results.summary().to_dict("records")
    assert row["waiting_s"] == pytest.approx(0.005)  # rank 0: 10 ms, rank 1: none
    assert row["communication_s"] == pytest.approx(0.025)  # rank 0: 20 + 5, rank 1: 20 + 5
    assert row["other_s"] == pytest.approx(0.070)
    assert row["compute_s"] != row["compute_s"]  # not a number: unknown
    assert row["communication_fraction"] == pytest.approx(0.30)
    split = time_split(results.summary())
    assert split.part.to_list() == ["communication", "waiting", "other"]
    assert split.seconds.sum() == pytest.approx(row["step_time_s"])
    assert split.share.sum() == pytest.approx(1)


def span(rank: int, kind: str, begin: int, end: int) -> dict[str, Any]:
    """A stretch of a rank's own work, in milliseconds."""
    return {"rank": rank, "sequence": 0, "step": 13, "kind": kind, "begin_ns": begin * MS, "end_ns": end * MS}


def test_the_parts_of_a_step_sum_to_it(tmp_path: Path) -> None:
    """An instrumented step of 200 ms stands for the window's of 100: shares count, not times."""
    operations = [
        span(0, "step", 0, 200),
        span(0, "forward", 10, 60),
        span(0, "backward", 60, 150),
        # Two all-reduces in backward: the second is waited for in the optimizer, which works while it is under way.
        operation(0, begin=100, end=120, wait=5, exposed=20),
        operation(0, begin=130, end=170, wait=0, exposed=10),
        span(0, "optimizer", 150, 160),
        span(0, "optimizer", 155, 180),
    ]
    tables = {"runs": [run_row()], "operations": operations}
    Writer(tmp_path, "s").write_round(TRACK, "naive", 1, 0, tables)
    summary = load(tmp_path).summary()
    split = time_split(summary).set_index("part").seconds
    assert split.to_dict() == pytest.approx(
        {"compute": 0.060, "communication": 0.0125, "waiting": 0.0025, "optimizer": 0.010, "other": 0.015}
    )
    assert split.sum() == pytest.approx(summary.step_time_s[0])


def test_operations_are_told_by_axis_and_kind(results: Results) -> None:
    (row,) = communication(results).to_dict("records")
    assert (row["axis"], row["kind"], row["count"]) == ("data", "all_reduce", 2)
    assert (row["payload_bytes"], row["wire_bytes"]) == (2_000_000, 2_000_000)
    assert row["exposed_s"] == pytest.approx(0.030)
    assert row["wait_s"] == pytest.approx(0.010)
    # 1 MB took 20, 20, 10 and 10 ms once all ranks were there, and a ring of two sends each byte once.
    assert row["exposed_share"] == pytest.approx(0.30)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx((50e6 + 100e6) / 2)


def test_the_rank_that_keeps_the_others_waiting_is_found(results: Results) -> None:
    late = stragglers(results).set_index("rank")
    assert late.last_share.to_dict() == {0: 0.0, 1: 1.0}
    assert late.lateness_s.to_dict() == pytest.approx({0: 0.0, 1: 0.010})


def test_nothing_recorded_is_an_empty_table(tmp_path: Path) -> None:
    Writer(tmp_path, "s").write_round(TRACK, "naive", 1, 0, {"runs": [run_row()]})
    found = load(tmp_path)
    for frame in (communication(found), time_split(found.summary()), stragglers(found)):
        assert frame.empty
        assert "case" in frame.columns


def test_a_failed_case_has_no_split(tmp_path: Path) -> None:
    tables = {"runs": [run_row(status="timeout")], "operations": [operation(0, 0, 30, 10, 30)]}
    Writer(tmp_path, "s").write_round(TRACK, "naive", 1, 0, tables)
    assert time_split(load(tmp_path).summary()).empty


def test_bus_factors_are_those_of_the_field() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0
    assert bus_factor("send", 2) == bus_factor("send_receive", 4) == 1.0
