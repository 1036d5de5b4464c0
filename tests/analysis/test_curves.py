"""A case that does not learn as one process does is marked, whatever its speed."""

from __future__ import annotations

import numpy as np
import pytest

from raybench.analysis.curves import BOUND, curve_deviations, warnings_of
from raybench.results.store import Writer, load
from tests.results.made import TRACK, rank_rows, run_row

LOSSES = np.linspace(2.0, 1.0, 50)


def write(folder, curves, **columns):
    writer = Writer(folder, "suite-1", {})
    for case, losses in curves.items():
        alone = case == "single"
        run = run_row(data_size=1 if alone else 2, data_strategy=None if alone else case, seed=1, **columns)
        steps = [
            {"rank": rank, "step": step, "loss": float(loss), "begin_ns": 0, "duration_ns": 1, "tokens": 1}
            for rank in range(2)
            for step, loss in enumerate(losses)
        ]
        writer.write_round(TRACK, case, 1, 1, {"runs": [run], "ranks": rank_rows(), "steps": steps})
    return load(folder, "suite-1")


def test_the_deviation_is_relative_and_over_all_steps(tmp_path):
    results = write(tmp_path, {"single": LOSSES, "same": LOSSES, "near": LOSSES * 1.01, "off": LOSSES * 1.1})
    found = curve_deviations(results).set_index("case")
    assert found.deviation["same"] == 0
    assert found.deviation["near"] == pytest.approx(0.01)
    assert found.deviation["off"] == pytest.approx(0.1)
    assert found.leaves.to_dict() == {"same": False, "near": False, "off": True}
    assert set(found.num_steps) == {50}
    assert set(found.control) == {"single"}
    (warning,) = warnings_of(results)
    assert warning.startswith(f"{TRACK}:off does not learn as one process does: over 50 steps its loss is off by 10.0%")


def test_a_loss_that_is_no_number_leaves(tmp_path):
    results = write(tmp_path, {"single": LOSSES, "infinite": np.where(LOSSES < 1.2, np.inf, LOSSES)})
    assert curve_deviations(results).leaves.tolist() == [True]


def test_without_a_control_nothing_is_said(tmp_path):
    results = write(tmp_path, {"one": LOSSES, "other": LOSSES * 2})
    assert len(curve_deviations(results)) == 0
    assert warnings_of(results) == []
    assert 0 < BOUND < 0.1
