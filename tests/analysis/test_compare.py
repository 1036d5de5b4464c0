"""Two sides of a suite: what is called slower is slower, what is the same is called the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raybench.analysis.compare import Comparison, compare, load_side, ratio_interval
from raybench.analysis.student import t_quantile, upper_tail
from raybench.cli import main
from raybench.results.schema import RUNS
from raybench.results.store import Results, StoreError, load
from tests.results.made import TRACK, run_row, write_cases

CASES = ("naive", "hooked", "overlapped", "bucketed", "torch-ddp", "zero1")
TRIES, ENOUGH = 40, 38


def simulated(
    random: np.random.Generator, launches: int, launch_noise: float, slow: dict[str, float] | None = None
) -> Any:
    """One side: every launch has its own luck, every round and case a little more."""
    rows = []
    for launch in range(launches):
        for case in CASES:
            luck = 1 + launch_noise * random.standard_normal()
            for number in range(1, 5):
                took = 1e9 * (slow or {}).get(case, 1) * luck * (1 + 0.005 * random.standard_normal())
                row = dict.fromkeys(RUNS) | run_row(window_ns=int(took), workload_hash="w")
                rows.append(row | {"suite_id": f"s{launch}", "track": TRACK, "case": case, "round": number})
    return SimpleNamespace(runs=pd.DataFrame(rows))


def verdicts(base: Any, new: Any) -> dict[str, str]:
    return {row.case: row.verdict for row in compare(base, new)}


@pytest.mark.parametrize(("launches", "noise"), [(3, 0.01), (5, 0.02)])
def test_the_same_code_is_called_the_same(launches: int, noise: float) -> None:
    random = np.random.default_rng(1)
    found = [verdicts(*(simulated(random, launches, noise) for _ in range(2))) for _ in range(TRIES)]
    assert sum(set(verdict.values()) == {"same within noise"} for verdict in found) >= ENOUGH


@pytest.mark.parametrize(("launches", "noise"), [(3, 0.002), (5, 0.005), (10, 0.015)])
def test_a_planted_slow_down_of_5_percent_is_found_and_nothing_else(launches: int, noise: float) -> None:
    random = np.random.default_rng(2)
    same = dict.fromkeys(CASES, "same within noise")
    found = []
    for _ in range(TRIES):
        sides = simulated(random, launches, noise), simulated(random, launches, noise, {"bucketed": 1.05})
        found.append(verdicts(*sides))
    assert sum(verdict == same | {"bucketed": "slower"} for verdict in found) >= ENOUGH


def test_certain_changes_below_the_minimum_are_the_same() -> None:
    random = np.random.default_rng(3)
    sides = [simulated(random, 20, 0.0001, slow) for slow in (None, {"naive": 1.015, "hooked": 0.97})]
    found = {row.case: row for row in compare(*sides)}
    assert found["naive"].ratio_high is not None
    assert found["naive"].ratio_high < 1
    assert (found["naive"].verdict, found["hooked"].verdict) == ("same within noise", "faster")


def test_the_interval_of_a_family_holds() -> None:
    """99 % for all cases together: hardly any interval of a true ratio of 1 leaves it out."""
    random = np.random.default_rng(4)
    missed = 0
    for _ in range(1000):
        base, new = np.exp(0.02 * random.standard_normal((2, 3)))
        _, low, high = ratio_interval(base, new, 0.99)
        missed += not low <= 1 <= high
    assert missed <= 20


def test_students_quantiles_are_those_of_the_tables() -> None:
    table = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.995, 4): 4.604, (0.9995, 3): 12.924, (0.995, 10): 3.169}
    for (probability, degrees), value in table.items():
        assert t_quantile(probability, degrees) == pytest.approx(value, abs=5e-4)
        assert upper_tail(value, degrees) == pytest.approx(1 - probability, rel=1e-3)
    assert t_quantile(0.975, 1000) == pytest.approx(1.96, abs=1e-3)
    with pytest.raises(ValueError, match="probability"):
        t_quantile(0.5, 3)


def stored(folder: Path, suites: int = 3, cases: tuple[str, ...] = ("bucketed",), **columns: Any) -> Results:
    for suite in range(suites):
        rates = {case: [10_000.0 + 10 * suite + number for number in range(2)] for case in cases}
        write_cases(folder, rates, suite=f"suite-{suite}", **columns)
    return load(folder)


def only(base: Results, new: Results) -> Comparison:
    (row,) = compare(base, new)
    return row


def test_a_store_compared_with_itself(tmp_path: Path) -> None:
    results = stored(tmp_path)
    row = only(results, results)
    assert (row.verdict, row.is_regression) == ("same within noise", False)
    assert row.ratio == pytest.approx(1)
    assert row.ratio_low is not None
    assert row.ratio_low < 1
    assert (row.base_launches, row.new_launches) == (3, 3)
    assert row.base_tokens_per_s == pytest.approx(10_010.5, rel=1e-6)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"device": "Another CPU"}, "hardware: device is Some CPU in BASE, Another CPU in NEW"),
        ({"torch_version": "2.14.0"}, "versions: torch_version is 2.13.0+cpu in BASE, 2.14.0 in NEW"),
        ({"workload_hash": "abc"}, "workload: workload_hash is none in BASE, abc in NEW"),
        ({"num_steps": 20}, "workload: num_steps is 10 in BASE, 20 in NEW"),
    ],
)
def test_what_differs_is_not_compared(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    row = only(stored(tmp_path / "a"), stored(tmp_path / "b", **columns))
    assert (row.verdict, row.reason, row.is_regression) == ("not comparable", reason, False)
    assert row.ratio is None


def test_few_launches_are_not_compared(tmp_path: Path) -> None:
    row = only(stored(tmp_path / "a"), stored(tmp_path / "b", suites=2))
    assert row.verdict == "not comparable"
    assert row.reason == "too few launches (3 in BASE, 2 in NEW; at least 3 suites a side)"


def test_launches_that_differ_among_themselves_are_not_compared(tmp_path: Path) -> None:
    stored(tmp_path)
    mixed = write_cases(tmp_path, {"bucketed": [10_000.0]}, suite="suite-9", device="Another CPU")
    assert only(load(tmp_path), load(tmp_path)).reason == (
        "hardware: device differs between launches (Another CPU or Some CPU)"
    )
    assert len(mixed.runs) == 1


def test_what_broke_is_a_regression_and_what_was_broken_is_not(tmp_path: Path) -> None:
    good = stored(tmp_path / "good")
    bad = stored(tmp_path / "bad", status="crashed", reason="signal 9")
    row = only(good, bad)
    assert (row.verdict, row.is_regression) == ("not comparable", True)
    assert row.reason == "NEW has no measurement in 3 of 3 launches (crashed, signal 9)"
    assert not only(bad, bad).is_regression
    assert not only(bad, good).is_regression


def test_cases_of_one_side_alone_are_named(tmp_path: Path) -> None:
    both = stored(tmp_path / "a", cases=("bucketed", "naive"))
    one = stored(tmp_path / "b")
    assert {row.case: row.reason for row in compare(both, one)} == {"bucketed": None, "naive": "only in BASE"}
    assert {row.case: row.reason for row in compare(one, both)}["naive"] == "only in NEW"


def test_a_side_is_a_folder_a_suite_or_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "results", suites=5)
    monkeypatch.chdir(tmp_path)
    assert len(load_side("results").suite_ids) == 5
    assert load_side("results@suite-1").suite_ids == ["suite-1"]
    assert load_side("results@suite-1,suite-3").suite_ids == ["suite-1", "suite-3"]
    assert load_side("suite-1,suite-4,suite-2").suite_ids == ["suite-1", "suite-2", "suite-4"]
    with pytest.raises(StoreError, match="suite-9"):
        load_side("results@suite-1,suite-9")


def test_the_command_exits_with_3_on_a_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "base", cases=("bucketed", "naive"))
    for suite in range(3):
        rates = {"bucketed": [9_000.0 + suite] * 2, "naive": [10_000.0 + suite] * 2}
        write_cases(tmp_path / "new", rates, suite=f"suite-{suite}")
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "base", "new"]) == 3
    out, _ = capfd.readouterr()
    assert "slower" in out
    assert f"Regression in {TRACK}:bucketed." in out
    assert main(["compare", "base", "new", "--json"]) == 3
    body = json.loads(capfd.readouterr().out)
    assert (body["exit_code"], body["minimum_effect"], body["confidence"]) == (3, 0.02, 0.99)
    row = next(row for row in body["rows"] if row["case"] == "bucketed")
    assert row["verdict"] == "slower"
    assert row["ratio"] == pytest.approx(0.9, rel=0.01)
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert main(["compare", "new", "base"]) == 0
    assert "faster" in capfd.readouterr().out
    assert main(["compare", "base@suite-0", "new@suite-0"]) == 1
    assert "too few launches" in " ".join(capfd.readouterr().out.split())
    assert main(["compare", "base", "nowhere"]) == 2
