"""What ranks timed becomes rows by nccl-tests' formulas, and nothing wrong has a speed."""

from __future__ import annotations

import pytest

from raybench.comm.render import legend
from raybench.comm.rows import LEFT_OUT, rows_of
from raybench.comm.sweep import SweepCase
from tests.comm.made import CASE, parts, timed


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """The algorithm bandwidth of an all-reduce is S ÷ t and never 2S ÷ t; its bus bandwidth is 2(n-1)/n of it."""
    (row,) = rows_of(CASE, parts(*[[timed(8_000_000, 4_000_000)]] * 4, group_size=4))
    assert row["algorithm_bandwidth_bytes_per_s"] == pytest.approx(2e9)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(3e9)
    assert (row["status"], row["time_ns"], row["group"], row["kind"]) == ("ok", 4_000_000, "across", "all_reduce")


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("reduce_scatter", 0.75), ("all_gather", 0.75), ("all_to_all", 0.75), ("broadcast", 1), ("send_receive", 1)],
)
def test_every_operation_s_factor(kind: str, factor: float) -> None:
    case = SweepCase(group="all", kind=kind, dtype="bf16")
    (row,) = rows_of(case, parts(*[[timed(1000, 1000)]] * 4, group_size=4))
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(factor * 1e9)


def test_a_bus_bandwidth_above_the_wire_stays_and_is_explained() -> None:
    """A tree, or a reduction inside the network, can show more than the wire carries."""
    import pandas as pd

    (row,) = rows_of(CASE, parts([timed(4_000_000, 1_000_000)], [timed(4_000_000, 1_000_000)]))
    assert row["fraction_of_link"] == pytest.approx(3.2)
    frame = pd.DataFrame([{**row, "setting": "default"}])
    (sentence,) = [line for line in legend(frame) if "above the link" in line]
    assert sentence.startswith("across all_reduce: its bus bandwidth is above the link, so it is no speed of a wire")
    frame["fraction_of_link"] = 0.99
    assert not [line for line in legend(frame) if "above the link" in line]


def test_the_window_ends_with_the_last_rank_and_percentiles_are_over_ranks_and_repeats() -> None:
    fast, slow = timed(1000, 100, 50), timed(1000, 300, 50)
    (row,) = rows_of(CASE, parts([fast], [slow]))
    assert row["time_ns"] == 300
    assert row["p50_ns"] == 200
    assert (row["p95_ns"], row["p99_ns"]) == (300, 300)


def test_a_message_that_goes_round_is_several_hops() -> None:
    case = SweepCase(group="across", kind="send", dtype="fp32")
    (row,) = rows_of(case, parts([timed(1000, 900)], [timed(1000, 900)], [timed(1000, 900)], hops=3, group_size=3))
    assert (row["time_ns"], row["p50_ns"]) == (300, 300)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(1000 / 300e-9)


def test_bytes_are_those_of_one_operation_of_one_group() -> None:
    first = timed(1000, 100, 10, network_bytes=20_000, loopback_bytes=None)
    other = timed(1000, 100, 10, network_bytes=40_000, loopback_bytes=500)
    (row,) = rows_of(CASE, parts([first], [timed(1000, 100)], [other], [timed(1000, 100)], num_groups=2))
    assert row["network_bytes"] == 3000
    assert row["loopback_bytes"] == 25
    (row,) = rows_of(CASE, parts([timed(1000, 100)], [timed(1000, 100)]))
    assert row["network_bytes"] is None


def test_a_wrong_value_has_no_speed() -> None:
    (row,) = rows_of(CASE, parts([timed(1000, 100)], [timed(1000, 100, num_wrong=3)]))
    assert (row["status"], row["num_wrong"], row["reason"]) == ("failed", 3, "3 of 500 values are wrong")
    assert not {"time_ns", "p50_ns", "bus_bandwidth_bytes_per_s"} & row.keys()


def test_what_the_budget_left_out_is_said() -> None:
    left_out = {"payload_bytes": 2000, "num_repeats": 0}
    rows = rows_of(CASE, parts([timed(1000, 100), left_out], [timed(1000, 100), left_out]))
    assert [(row["payload_bytes"], row["status"]) for row in rows] == [(1000, "ok"), (2000, "skipped")]
    assert rows[1]["reason"] == LEFT_OUT


@pytest.mark.parametrize(
    ("num_nodes", "told", "given", "link"),
    [
        (2, 1.25e9, None, 1.25e9),
        (2, 1.25e9, 3e9, 3e9),
        (1, 1.25e9, None, None),
        (1, 1.25e9, 3e9, 3e9),
        (2, None, None, None),
    ],
)
def test_the_link_is_given_or_that_of_the_interface_between_nodes(num_nodes, told, given, link) -> None:
    found = parts([timed(1000, 1000)], [timed(1000, 1000)], num_nodes=num_nodes, link_bytes_per_s=told)
    (row,) = rows_of(CASE, found, link_bytes_per_s=given)
    assert row["link_bytes_per_s"] == link
    assert row["fraction_of_link"] == (None if link is None else pytest.approx(1e9 / link))


def test_the_slowest_node_s_link_counts() -> None:
    found = parts([timed(1000, 1000)], [timed(1000, 1000)])
    found[1].ranks["link_bytes_per_s"] = 1e8
    (row,) = rows_of(CASE, found)
    assert row["link_bytes_per_s"] == 1e8


def test_slowdowns_are_the_ranks_mean_where_known() -> None:
    first = timed(1000, 100, overlap_slowdown=1.2, overlap_compute_slowdown=None)
    (row,) = rows_of(CASE, parts([first], [timed(1000, 100, overlap_slowdown=1.4, overlap_compute_slowdown=2.0)]))
    assert row["overlap_slowdown"] == pytest.approx(1.3)
    assert row["overlap_compute_slowdown"] == 2.0
