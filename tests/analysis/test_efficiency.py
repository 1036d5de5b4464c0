"""Scaling, MFU and cost, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raybench.analysis.efficiency import cost_per_million_tokens, kind_of
from raybench.analysis.peaks import PEAKS, peak_of
from raybench.results.store import Writer, load
from tests.results.made import TRACK, run_row

A10 = {"device": "NVIDIA A10", "backend": "nccl", "flops_per_token_6n": 1e9, "flops_per_token_non_causal": 1.2e9}


def summary_of(folder: Path, rows: dict[str, dict[str, Any]]) -> pd.DataFrame:
    writer = Writer(folder, "s")
    for case, columns in rows.items():
        for number in (1, 2):
            writer.write_round(TRACK, case, 1, number, {"runs": [run_row(**columns)]})
    return load(folder).summary().set_index("case")


def test_mfu_is_the_share_of_all_ranks_peaks_under_both_conventions(tmp_path: Path) -> None:
    # 10,000 tokens/s of 1 GFLOP each by two GPUs of 31.2 TFLOP/s.
    row = summary_of(tmp_path, {"bucketed": A10}).loc["bucketed"]
    assert row.mfu_6n == pytest.approx(1e13 / (2 * 31.2e12))
    assert row.mfu_non_causal == pytest.approx(1.2e13 / (2 * 31.2e12))
    assert (row.peak_flops_per_s, row.peak_source) == (31.2e12, "NVIDIA A10 datasheet, fp32")


@pytest.mark.parametrize(
    "columns",
    [
        {"device": "NVIDIA A10X"},
        {"device": "NVIDIA A10, NVIDIA L4"},
        {"backend": "gloo"},
        {"precision": None},
        {"device": None},
        {"flops_per_token_6n": None, "flops_per_token_non_causal": None},
    ],
)
def test_what_is_unknown_has_no_mfu(tmp_path: Path, columns: dict[str, Any]) -> None:
    row = summary_of(tmp_path, {"bucketed": A10 | columns}).loc["bucketed"]
    assert pd.isna(row.mfu_6n)
    assert pd.isna(row.mfu_non_causal)


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "tflops"),
    [
        ("NVIDIA A10", "fp32", True, 62.5),
        ("NVIDIA A10", "bf16", False, 125),
        ("NVIDIA A10G", "fp32", False, None),
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312),
        ("NVIDIA A100 80GB PCIe", "fp32", False, 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", True, 989),
        ("NVIDIA H100 PCIe", "bf16", False, 756),
        ("NVIDIA H100 NVL", "bf16", False, None),
        ("NVIDIA H200", "bf16", False, 989),
        ("NVIDIA L4", "bf16", False, 121),
        ("NVIDIA L40S", "bf16", False, 362),
        ("NVIDIA L40", "bf16", False, None),
        ("Tesla T4", "bf16", False, None),
        ("Tesla T4", "fp32", True, 8.1),
        ("NVIDIA T400", "fp32", False, None),
        ("Tesla V100-SXM2-16GB", "fp32", False, 15.7),
        ("AMD Instinct MI300X", "bf16", False, 1300),
        ("Some CPU", "fp32", False, None),
    ],
)
def test_peaks_are_of_the_very_device(device: str, precision: str, tf32: bool, tflops: float | None) -> None:
    found = peak_of(device, precision, tf32)
    assert (None if found is None else found[0] / 1e12) == tflops
    assert found is None or found[1]


def test_every_peak_is_ordered_and_sourced() -> None:
    for peak in PEAKS:
        assert peak.source
        assert peak.fp32 < (peak.tf32 or peak.fp32 + 1) < (peak.bf16 or float("inf"))


def test_scaling_is_against_the_tracks_own_baseline(tmp_path: Path) -> None:
    second = 1_000_000_000
    two = {"num_ranks": 2, "data_size": 2, "tokens_per_step": 1000, "tokens": 10_000, "window_ns": second}
    four = two | {"num_ranks": 4, "data_size": 4}
    rows = {
        "one-node": two,
        "weak": four | {"tokens_per_step": 2000, "tokens": 20_000, "window_ns": int(1.25 * second)},
        "strong": four | {"window_ns": int(0.8 * second)},
        "pipeline": {"data_strategy": None, "pipeline_strategy": "gpipe", "data_size": 1, "control_tokens": 10_000},
        "alone": {"data_strategy": "naive", "control_tokens": None},
    }
    frame = summary_of(tmp_path, rows)
    assert frame.loc["weak", ["scaling_baseline", "scaling_kind"]].tolist() == ["one-node", "weak"]
    assert frame.loc["weak", "scaling_efficiency"] == pytest.approx(0.8)
    assert frame.loc["strong", ["scaling_baseline", "scaling_kind"]].tolist() == ["one-node", "strong"]
    assert frame.loc["strong", "scaling_efficiency"] == pytest.approx(0.625)
    # Two ranks and one process, on the same batch: one process takes the same second.
    assert frame.loc["pipeline", ["scaling_baseline", "scaling_kind"]].tolist() == ["control", "strong"]
    assert frame.loc["pipeline", "scaling_efficiency"] == pytest.approx(0.5)
    assert frame.loc["one-node", ["scaling_baseline", "scaling_kind"]].tolist() == ["control", "weak"]
    assert frame.loc["alone", ["scaling_baseline", "scaling_efficiency"]].isna().all()


def test_kinds_of_scaling() -> None:
    assert [kind_of(4, 4), kind_of(4, 1), kind_of(4, 2)] == ["weak", "strong", "mixed"]


def test_cost_is_that_of_all_ranks() -> None:
    # Two ranks at 1.80 an hour cost 0.001 a second; a million tokens take 100 seconds.
    assert cost_per_million_tokens(2, 10_000.0, 1.80) == pytest.approx(0.10)
    assert cost_per_million_tokens(2, 10_000.0, None) is None
    assert cost_per_million_tokens(2, float("nan"), 1.80) is None
