"""Reports say what was measured, and show what was not as such."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from raybench.errors import RequestError
from raybench.report import build, table, terminal_table, write_report
from raybench.report.summary import render
from raybench.report.text import MISSING, markdown, number, percent, plain, size, spread
from raybench.results.store import Results, Writer, load
from tests.results.made import (
    REQUEST,
    TRACK,
    operation_rows,
    rank_rows,
    run_row,
    skipped_row,
    write_cases,
    write_measured,
)

HOSTILE = "<script>alert(1)</script> | **bold** [x](javascript:y) `code`\n# heading \x1b[31mred\x07 \u202etxet"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Three good cases, one that crashed, one whose gate failed, one never run, and text that means harm."""
    write_cases(tmp_path, {"naive": [800, 810, 805], "bucketed": [950, 955, 960], "torch-ddp": [900, 910, 905]})
    writer = Writer(tmp_path, "suite-1", REQUEST)
    crashed = run_row(status="crashed", reason=HOSTILE, window_ns=None)
    gate = run_row(status="failed", gate="failed", reason="gradient of head.weight is off by 0.5", window_ns=5)
    operations = operation_rows({(0, 13): [10_000_000]})
    writer.write_round(TRACK, "overlapped", 1, 0, {"runs": [crashed]})
    writer.write_round(TRACK, "hooked", 1, 0, {"runs": [gate], "ranks": rank_rows(), "operations": operations})
    writer.write_round(TRACK, "zero3", 0, 0, {"runs": [skipped_row("needs 4 GPUs, the cluster has 2")]})
    return load(tmp_path)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_terminal_of_any_width_shows_every_case(results: Results, width: int) -> None:
    text = terminal_table(results, width=width, color=False)
    assert max(map(len, text.splitlines())) <= width
    for name in ("naive", "bucketed", "torch-ddp *", "overlapped", "hooked", "zero3", "crashed", "failed", "skipped"):
        assert name in text, name
    assert "…" not in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_eighty_columns_hold_the_numbers(results: Results) -> None:
    lines = terminal_table(results, width=80, color=False).splitlines()
    row = next(line for line in lines if "bucketed" in line and "passed" in line)
    assert row.split() == ["bucketed", "passed", "955.0", "2.2", "%", "0.0955", "1,047", "259", "MiB"]


def test_no_row_without_a_measurement_shows_a_number(results: Results) -> None:
    for line in terminal_table(results, width=120, color=False).splitlines():
        if any(line.strip().startswith(name) for name in ("overlapped ", "hooked ", "zero3 ")):
            cells = line.split()
            assert not any(re.fullmatch(r"[\d.,]+", cell) for cell in cells[2:]), line
    for line in render(build(results)).splitlines():
        if re.match(r"\| (overlapped|hooked|zero3)", line):
            speed = [cell.strip() for cell in line.split("|")][5]
            assert speed in ("**crashed**", "**failed**", "**skipped**")


def test_an_interrupted_suite_shows_the_rounds_before(tmp_path: Path) -> None:
    write_measured(tmp_path, ["bucketed", "naive"])
    lines = terminal_table(load(tmp_path), width=120, color=False).splitlines()
    whole = next(line.split() for line in lines if line.startswith(" naive"))
    writer = Writer(tmp_path, "suite-1", REQUEST)
    for case in ("naive", "bucketed", "hooked"):
        writer.write_round(TRACK, case, 0, 0, {"runs": [skipped_row("interrupted")]})
    text = terminal_table(load(tmp_path), width=120, color=False)
    assert whole in [line.split() for line in text.splitlines()]
    assert "bucketed: skipped, interrupted after 3 rounds" in text
    assert "hooked: skipped, interrupted" in text
    assert "No case was timed" not in text


def test_the_answer_names_the_winner_by_how_much_and_how_surely(results: Results) -> None:
    (section,) = build(results).sections
    assert section.title == "Data parallelism on one node"
    assert section.question == "Which all-reduce keeps most of two single processes' speed?"
    (answer,) = section.answer
    assert answer.startswith("bucketed was fastest, 955.0 tokens/s (95 % interval ")
    assert "1.056 × torch-ddp (" in answer
    assert "1.188 × naive (" in answer


def test_noise_and_single_rounds_are_told_as_such(tmp_path: Path) -> None:
    noise = write_cases(tmp_path / "noise", {"naive": [100, 108, 95], "bucketed": [103, 100, 101]})
    assert "same within noise" in build(noise).sections[0].answer[0]
    once = write_cases(tmp_path / "once", {"naive": [100], "bucketed": [103]})
    assert "the only round, which gives no interval" in build(once).sections[0].answer[0]
    twice = write_cases(tmp_path / "twice", {"naive": [100, 150], "bucketed": [150, 100]})
    assert "(no useful interval from 2 rounds)" in build(twice).sections[0].answer[0]
    alone = write_cases(tmp_path / "alone", {"naive": [100]})
    assert build(alone).sections[0].answer == ("naive alone was timed: 100.0 tokens/s.",)


def test_verified_cases_are_not_called_slow(tmp_path: Path) -> None:
    verified = write_cases(tmp_path, {"naive": [100]}, tokens=None)
    assert build(verified).sections[0].answer == ("No case was timed. 1 case passed the gate.",)


def test_markdown_stays_one_table_whatever_the_text(results: Results) -> None:
    text = render(build(results))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    grids = [re.split(r"(?<!\\)\|", row) for row in rows]
    assert {len(cells) for cells in grids} == {14, 4}
    assert "- overlapped: **crashed**, &lt;script&gt;alert(1)" in text
    assert "Some CPU" in text
    assert "suite-1" in text


def test_the_report_is_written_into_a_new_folder(results: Results, tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    written = write_report(build(results), out)
    assert out / "BENCHMARK_SUMMARY.md" in written
    assert all(path.stat().st_size for path in written)


def test_a_report_that_cannot_be_written_is_one_message(results: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"-o .*file.*cannot be written"):
        write_report(build(results), tmp_path / "file")


def test_one_failure_alone_is_a_report(tmp_path: Path) -> None:
    Writer(tmp_path, "s").write_round("t", "c", 0, 0, {"runs": [{"status": "skipped", "reason": "no GPU"}]})
    found = load(tmp_path)
    assert "no GPU" in terminal_table(found, width=80, color=False)
    assert "no GPU" in render(build(found))


@pytest.mark.filterwarnings("ignore:results")
def test_what_was_left_out_is_said(results: Results, tmp_path: Path) -> None:
    (tmp_path / "runs" / "suite-1" / "bad.parquet").write_bytes(b"")
    write_cases(tmp_path, {"naive": [1]}, suite="suite-0", tokens=None)
    found = load(tmp_path)
    text = terminal_table(found, width=200, color=False)
    assert "bad.parquet" in text
    assert "1 older suite" in text


def test_a_colored_terminal_gets_colors(results: Results) -> None:
    assert "\x1b[" in terminal_table(results, width=80, color=True)
    console = Console(width=80, record=True, file=None)
    with console.capture():
        console.print(table(results))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12_345.6, "12,346"),
        (999.6, "1,000"),
        (0.09384, "0.0938"),
        (9.9999, "10.0"),
        (100.0, "100"),
        (0, "0"),
        (None, MISSING),
        (float("nan"), MISSING),
        (float("inf"), MISSING),
    ],
)
def test_numbers_have_digits_that_mean_something(value: float | None, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [size(b) for b in (0, 1023, 1024, 5 * 2**20, 2**30 * 23.6, 2**45)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "5.00 MiB",
        "23.6 GiB",
        "32.0 TiB",
    ]
    assert (percent(0.1234), percent(None)) == ("12.3 %", MISSING)
    assert spread(100, 98, 103) == "± 3.0 %"
    assert (spread(100, None, None), spread(100, 80, 110), spread(100, 5, 900)) == ("", "± 20 %", "± >100 %")
    assert markdown("a|b_c") == r"a\|b\_c"
    assert plain("x" * 600).endswith("…")


def test_figures_are_drawn_and_shown_for_what_was_measured(results: Results, tmp_path: Path) -> None:
    written = write_report(build(results), tmp_path / "report")
    assert [path.name for path in written] == [
        "BENCHMARK_SUMMARY.md",
        "report.html",
        "benchmark.png",
        "scaling.png",
        "memory.png",
        "architecture.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[2:])
    text = written[0].read_text(encoding="utf-8")
    assert "](benchmark.png)" in text
    assert "time-split" not in text


def test_all_that_was_recorded_is_drawn(tmp_path: Path) -> None:
    write_measured(tmp_path, ["naive $\\frac{$ <x>", "bucketed"])
    written = write_report(build(load(tmp_path)), tmp_path / "report")
    names = ["benchmark", "scaling", "time-split", "communication", "memory", "convergence", "timelines"]
    assert [path.stem for path in written[2:]] == [*names, "architecture"]


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    Writer(tmp_path, "s").write_round("t", "c", 0, 0, {"runs": [skipped_row("no GPU")]})
    assert len(write_report(build(load(tmp_path)), tmp_path / "report")) == 2
