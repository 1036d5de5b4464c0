"""Cases beside each other, round by round."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.analysis.comparison import Ranking, rank_cases, rates, scaling
from raybench.report.content import build
from raybench.results.store import Results, Writer, load
from tests.results.made import TRACK, run_row, write_cases


def ranking(results: Results) -> Ranking:
    found = rank_cases(results.summary(), rates(results.runs))
    assert found is not None
    return found


def test_cases_are_paired_by_round(tmp_path: Path) -> None:
    # The machine gets slower from round to round: by much more than the cases differ.
    base = [10_000.0, 8_000.0, 6_000.0, 4_000.0, 3_000.0]
    found = ranking(write_cases(tmp_path, {"naive": base, "bucketed": [1.05 * rate for rate in base]}))
    assert found.cases == ("bucketed", "naive")
    assert found.over_second is not None
    assert found.over_second.estimate.value == pytest.approx(1.05)
    assert found.over_second.is_clear


def test_noise_is_no_winner(tmp_path: Path) -> None:
    rates_of = {"naive": [100.0, 110.0, 95.0, 104.0], "bucketed": [104.0, 100.0, 101.0, 103.0]}
    found = ranking(write_cases(tmp_path, rates_of))
    assert found.over_second is not None
    assert not found.over_second.is_clear


def test_one_round_is_never_clear(tmp_path: Path) -> None:
    found = ranking(write_cases(tmp_path, {"naive": [100.0], "bucketed": [200.0]}))
    assert found.over_second is not None
    assert found.over_second.estimate.value == pytest.approx(2.0)
    assert not found.over_second.is_clear


def test_the_fastest_peer_and_the_slowest_are_named_where_they_are_others(tmp_path: Path) -> None:
    four = {"bucketed": [400.0] * 2, "overlapped": [300.0] * 2, "torch-ddp": [200.0] * 2, "naive": [100.0] * 2}
    found = ranking(write_cases(tmp_path, four))
    assert found.over_peer is not None
    assert found.over_slowest is not None
    assert (found.over_peer.other, found.over_slowest.other) == ("torch-ddp", "naive")
    two = ranking(write_cases(tmp_path / "two", {"bucketed": [400.0] * 2, "torch-ddp": [200.0] * 2}))
    assert (two.over_peer, two.over_slowest) == (None, None)


def test_layouts_of_another_size_are_scaling_and_not_ranking(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "s")
    for number in range(3):
        one = run_row(num_ranks=2, tokens_per_step=1000, tokens=10_000)
        two = run_row(num_ranks=4, tokens_per_step=2000, tokens=20_000, window_ns=1_250_000_000)
        naive = run_row(num_ranks=4, tokens_per_step=2000, tokens=20_000, data_strategy="naive")
        for case, row in (("bucketed-one-node", one), ("bucketed", two), ("naive", naive)):
            writer.write_round(TRACK, case, 1, number, {"runs": [row]})
    results = load(tmp_path)
    assert ranking(results).cases == ("naive", "bucketed")
    (kept,) = scaling(results.summary(), rates(results.runs))
    assert (kept.case, kept.other) == ("bucketed", "bucketed-one-node")
    assert kept.estimate.value == pytest.approx(0.8)


def write_nodes(folder: Path, num_nodes: dict[str, int]) -> Results:
    """Each case faster than the one before it."""
    writer = Writer(folder, "s")
    for number in range(3):
        for place, (case, nodes) in enumerate(num_nodes.items()):
            row = run_row(num_nodes=nodes, window_ns=10**9 - place * 10**8)
            writer.write_round(TRACK, case, 1, number, {"runs": [row]})
    return load(folder)


def test_a_case_that_was_left_on_fewer_nodes_is_not_ranked_beside_the_others(tmp_path: Path) -> None:
    results = write_nodes(tmp_path / "died", {"naive": 2, "hooked": 2, "bucketed": 1, "torch-ddp": 1, "overlapped": 2})
    found = ranking(results)
    assert found.cases == ("overlapped", "hooked", "naive")
    assert found.elsewhere == ("bucketed", "torch-ddp")
    winner, apart = build(results).sections[0].answer
    assert "overlapped was fastest" in winner
    assert apart == "Measured on 1 node, not on 2, and so not ranked: bucketed, torch-ddp."


def test_of_two_halves_the_one_on_more_nodes_is_ranked(tmp_path: Path) -> None:
    results = write_nodes(tmp_path, {"naive": 2, "bucketed": 1})
    assert ranking(results).cases == ("naive",)
    assert build(results).sections[0].answer[0].startswith("naive alone was timed on 2 nodes: ")


def write_sizes(folder: Path, **columns: str) -> Results:
    """zero3 trains on more tokens a step than the two others, and more of them a second."""
    writer = Writer(folder, "s")
    batches = {"bucketed": (5, 1.0), "torch-ddp": (5, 1.25), "zero3": (8, 1.25)}
    for number in range(3):
        for case, (size, seconds) in batches.items():
            tokens = 200 * size
            row = run_row(
                micro_batch_size=size,
                tokens_per_step=tokens,
                tokens=10 * tokens,
                window_ns=int(seconds * 1e9),
                data_strategy=case,
                peer="torch" if case == "torch-ddp" else None,
                **columns,
            )
            writer.write_round(TRACK, case, 1, number, {"runs": [row]})
    return load(folder)


def test_sizes_found_by_each_case_are_compared(tmp_path: Path) -> None:
    found = ranking(write_sizes(tmp_path / "largest", micro_batch="largest"))
    assert found.cases == ("zero3", "bucketed", "torch-ddp")
    assert found.over_second is not None
    assert found.over_second.estimate.value == pytest.approx(1.28)
    assert ranking(write_sizes(tmp_path / "given", micro_batch="given")).cases == ("bucketed", "torch-ddp")
    assert ranking(write_sizes(tmp_path / "older")).cases == ("bucketed", "torch-ddp")


def test_the_words_compare_sizes_token_by_token(tmp_path: Path) -> None:
    (section,) = build(write_sizes(tmp_path, micro_batch="largest")).sections
    assert section.answer[0].startswith("zero3 was fastest, 12,800 tokens/s")
    assert "largest micro-batch that fits, 5 to 8 × 1 a data rank" in section.workload
    told = "bucketed takes 35.0 ms more for the tokens of a step of zero3"
    assert any(sentence.startswith(told) for sentence in section.explanation)


def test_failed_cases_are_not_ranked(tmp_path: Path) -> None:
    results = write_cases(tmp_path, {"naive": [100.0] * 2, "bucketed": [200.0] * 2})
    Writer(tmp_path, "suite-1").write_round(TRACK, "bucketed", 1, 2, {"runs": [run_row(status="crashed")]})
    results = load(tmp_path)
    assert ranking(results).cases == ("naive",)
    nothing = write_cases(tmp_path / "failed", {"naive": [100.0]}, status="timeout")
    assert rank_cases(nothing.summary(), rates(nothing.runs)) is None
