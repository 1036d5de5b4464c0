"""The right number from small stores that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raybench.analysis.metrics import SUMMARY_DTYPES, summary
from raybench.analysis.rows import rows
from raybench.results.store import Results, Writer, load
from tests.results.made import (
    REQUEST,
    TRACK,
    operation_rows,
    rank_rows,
    run_row,
    skipped_row,
    step_rows,
    write_cases,
)

ROW_KEYS = [
    "track",
    "case",
    "peer",
    "layout",
    "strategy",
    "status",
    "reason",
    "gate",
    "rounds",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "step_time_s",
    "ratio_to_control",
    "bytes",
    "communication_fraction",
    "bubble",
]


def write(folder: Path, rounds: list[dict[str, Any]], case: str = "bucketed") -> Results:
    """A case from its rounds, each given by its tables; the first has number 1."""
    writer = Writer(folder, "s", REQUEST)
    for number, tables in enumerate(rounds, 1):
        writer.write_round(TRACK, case, 1, number, tables)
    return load(folder)


def only_row(results: Results) -> dict[str, Any]:
    (row,) = rows(results)
    return row


def test_throughput_is_the_windows_tokens_over_its_time(tmp_path: Path) -> None:
    windows = [1.00e9, 1.25e9, 2.00e9]
    row = only_row(write(tmp_path, [{"runs": [run_row(window_ns=int(w))]} for w in windows]))
    assert row["tokens_per_s"] == 8000.0  # 10,000 tokens in 1.25 s, the middle round
    assert row["step_time_s"] == 0.125  # 10 steps
    assert row["rounds"] == 3
    assert row["tokens_per_s_low"] < 8000.0 < row["tokens_per_s_high"]


def test_one_round_has_no_interval(tmp_path: Path) -> None:
    row = only_row(write(tmp_path, [{"runs": [run_row()]}]))
    assert (row["tokens_per_s"], row["tokens_per_s_low"], row["tokens_per_s_high"]) == (10_000.0, None, None)


def test_the_ratio_to_the_control_is_paired_by_round(tmp_path: Path) -> None:
    # The machine slows down by half in the second round: both do, and the ratio stays 0.8.
    rounds = [run_row(window_ns=w, control_window_ns=int(w * 0.8)) for w in (10**9, 2 * 10**9, 10**9)]
    frame = summary(write(tmp_path, [{"runs": [r]} for r in rounds]))
    # 10,000 tokens by 2 ranks over the control's 5,000 in 0.8 of the time.
    assert frame.ratio_to_control[0] == pytest.approx(0.8)
    assert frame.ratio_to_control_low[0] == frame.ratio_to_control_high[0] == pytest.approx(0.8)


def test_a_missing_control_is_null(tmp_path: Path) -> None:
    row = only_row(write(tmp_path, [{"runs": [run_row(control_window_ns=None, control_tokens=None)]}]))
    assert row["ratio_to_control"] is None
    assert row["tokens_per_s"] == 10_000.0


def test_communication_is_exposed_time_over_the_window_step(tmp_path: Path) -> None:
    # A step of the window takes 100 ms. Rank 0 stands 10 + 20 and 30 ms, rank 1 twice 10: mean (30+30+10+10)/4.
    ms = 1_000_000
    operations = operation_rows(
        {(0, 10): [10 * ms, 20 * ms], (0, 11): [30 * ms], (1, 10): [10 * ms], (1, 11): [10 * ms]}
    )
    row = only_row(write(tmp_path, [{"runs": [run_row()], "operations": operations}]))
    assert row["communication_fraction"] == pytest.approx(0.20)


def test_communication_is_over_the_instrumented_step_where_that_is_recorded(tmp_path: Path) -> None:
    operations = operation_rows({(0, 2): [10, None], (1, 2): [30, None]})
    steps = step_rows([[100, 100, 50], [100, 100, 100]])
    results = write(tmp_path, [{"runs": [run_row()], "operations": operations, "steps": steps}])
    assert only_row(results)["communication_fraction"] == pytest.approx((10 / 50 + 30 / 100) / 2)
    # The instrumented step 2 is no step of the window.
    assert results.summary().step_time_p50_s[0] == pytest.approx(100e-9)


@pytest.mark.parametrize("operations", [[], operation_rows({(0, 1): [None]})])
def test_communication_that_was_not_measured_is_null(tmp_path: Path, operations: list[dict[str, Any]]) -> None:
    row = only_row(write(tmp_path, [{"runs": [run_row()], "operations": operations}]))
    assert row["communication_fraction"] is None


def test_step_percentiles_are_of_the_slowest_rank(tmp_path: Path) -> None:
    slow, fast = list(range(1, 102)), [1] * 101
    frame = summary(write(tmp_path, [{"runs": [run_row()], "steps": step_rows([fast, slow], first=3)}]))
    assert frame.step_time_p50_s[0] == pytest.approx(51e-9)
    assert frame.step_time_p95_s[0] == pytest.approx(96e-9)


def test_bytes_are_those_of_the_fullest_rank_and_round(tmp_path: Path) -> None:
    small, large = rank_rows(), rank_rows(parameter_bytes=90_000_000, activation_bytes=None)
    row = only_row(write(tmp_path, [{"runs": [run_row()], "ranks": r} for r in (large, small)]))
    assert row["bytes"] == {
        "parameters": 90_000_000,
        "gradients": 68_000_000,
        "optimizer": 136_000_001,
        "activations": 1000,
        "peak": 900_000_000,
    }
    device = only_row(write(tmp_path / "gpu", [{"runs": [run_row()], "ranks": rank_rows(peak_device_bytes=7)}]))
    assert device["bytes"]["peak"] == 7


@pytest.mark.parametrize("status", ["failed", "out_of_memory", "timeout", "crashed"])
def test_a_case_with_any_bad_round_has_no_measurement(tmp_path: Path, status: str) -> None:
    bad = run_row(status=status, reason="something happened")
    rounds = [{"runs": [run_row()], "ranks": rank_rows()}, {"runs": [bad], "ranks": rank_rows()}, {"runs": [run_row()]}]
    row = only_row(write(tmp_path, rounds))
    assert (row["status"], row["reason"], row["rounds"]) == (status, "something happened", 2)
    assert {row[k] for k in row if k.startswith(("tokens", "step", "ratio", "comm"))} == {None}
    assert set(row["bytes"].values()) == {None}


@pytest.mark.parametrize(("gate", "rate"), [("passed", 1000.0), ("failed", None)])
def test_an_interrupted_case_keeps_its_rounds(tmp_path: Path, gate: str, rate: float | None) -> None:
    windows = [run_row(window_ns=10**9 * k, tokens=3000, gate=gate) for k in (2, 3, 6)]
    write(tmp_path, [{"runs": [run], "ranks": rank_rows()} for run in windows])
    Writer(tmp_path, "s", REQUEST).write_round(TRACK, "bucketed", 0, 0, {"runs": [skipped_row("interrupted")]})
    row = only_row(load(tmp_path))
    assert (row["status"], row["reason"], row["rounds"]) == ("skipped", "interrupted", 3)
    assert row["tokens_per_s"] == rate
    assert (row["bytes"]["parameters"] is None) == (rate is None)


def test_what_went_wrong_is_told_before_what_was_never_run(tmp_path: Path) -> None:
    results = write(tmp_path, [{"runs": [run_row(status="timeout", reason="took too long")]}])
    Writer(tmp_path, "s", REQUEST).write_round(TRACK, "bucketed", 0, 0, {"runs": [skipped_row("interrupted")]})
    results = load(tmp_path)
    assert (only_row(results)["status"], only_row(results)["reason"]) == ("timeout", "took too long")


def test_a_failed_gate_never_has_a_throughput(tmp_path: Path) -> None:
    row = only_row(write(tmp_path, [{"runs": [run_row(gate="failed", gate_worst_error=0.5)]}]))
    assert (row["gate"], row["status"], row["tokens_per_s"]) == ("failed", "failed", None)
    assert row["reason"]


def test_the_gate_of_the_first_round_speaks_for_all(tmp_path: Path) -> None:
    frame = summary(
        write(tmp_path, [{"runs": [run_row()]}, {"runs": [run_row(gate="not_run", gate_worst_error=None)]}])
    )
    assert frame.gate[0] == "passed"
    assert (frame.gate_worst_error[0], frame.gate_worst_parameter[0]) == (1e-6, "head.weight")


def test_a_verified_case_is_ok_without_numbers(tmp_path: Path) -> None:
    row = only_row(write(tmp_path, [{"runs": [run_row(window_ns=None, tokens=None, loss=None)]}]))
    assert (row["status"], row["gate"], row["tokens_per_s"], row["step_time_s"]) == ("ok", "passed", None, None)


def test_rows_are_the_object_that_json_promises(tmp_path: Path) -> None:
    write_cases(tmp_path, {"bucketed": [9000, 9100], "torch-ddp": [8000, 8100]})
    Writer(tmp_path, "suite-1", REQUEST).write_round(TRACK, "zero3", 0, 0, {"runs": [skipped_row("needs 4 GPUs")]})
    found = rows(load(tmp_path))
    assert [tuple(row) for row in found] == [tuple(ROW_KEYS)] * 3
    assert [(row["case"], row["peer"]) for row in found] == [
        ("bucketed", None),
        ("torch-ddp", "torch"),
        ("zero3", None),
    ]
    assert found[0]["layout"] == {"data": 2, "pipeline": 1, "tensor": 1, "nodes": 1}
    assert found[0]["strategy"] == {"data": "bucketed", "pipeline": None, "tensor": None}
    assert found[2]["layout"] == {"data": None, "pipeline": None, "tensor": None, "nodes": None}
    assert found[2]["bubble"] == {"theory": None, "simulated": None, "measured": None}
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found


def test_summary_has_the_documented_columns_and_order(tmp_path: Path) -> None:
    write_cases(tmp_path, {"torch-ddp": [8000], "bucketed": [9000], "naive": [7000]}, suite="suite-2")
    write_cases(tmp_path, {"naive": [7000]}, suite="suite-1")
    frame = load(tmp_path).summary()
    assert {n: str(d) for n, d in frame.dtypes.items()} == SUMMARY_DTYPES
    assert frame[["suite_id", "case"]].to_numpy().tolist() == [
        ["suite-1", "naive"],
        ["suite-2", "naive"],
        ["suite-2", "bucketed"],
        ["suite-2", "torch-ddp"],
    ]


def test_only_failures_are_still_a_table(tmp_path: Path) -> None:
    Writer(tmp_path, "s").write_round("t", "c", 0, 0, {"runs": [{"status": "skipped", "reason": "no GPU"}]})
    frame = load(tmp_path).summary()
    assert len(frame) == 1
    assert pd.isna(frame.tokens_per_s[0])
    assert frame.gate[0] == "not_run"
