"""Charts as data and as vector graphics."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from raybench.analysis.timeline import Block, merged
from raybench.report import build
from raybench.report.charts import Bar, Bars, Figure, Rows, colors, ticks
from raybench.report.plots import figures
from raybench.report.svg import draw
from raybench.report.text import rate
from raybench.results.store import Results, Writer, load
from tests.results.made import TRACK, rank_rows, run_row, span_row, write_measured

STAGES = 2


@pytest.fixture
def results(tmp_path: Path) -> Results:
    write_measured(tmp_path, ["bucketed", "naive", "torch-ddp"])
    return load(tmp_path)


def test_every_figure_rests_on_hardware_scale_and_gate(results: Results) -> None:
    found = figures(build(results))
    names = ["benchmark", "scaling", "time-split", "communication", "memory", "convergence", "timelines"]
    assert [figure.name for figure in found] == [*names, "architecture"]
    for figure in found:
        for _, chart, basis in figure.charts:
            assert basis == "2 ranks on 1 node, Some CPU, gloo, fp32, scale smoke, gate passed by 3 of 3 cases"
            assert chart.unit


def test_the_words_say_where_the_others_time_went(results: Results) -> None:
    (section,) = build(results).sections
    own, second, third = section.explanation[:3]
    assert own.startswith("bucketed spends 76.5 % in forward and backward, ")
    assert "2.5 % in waiting for other ranks" in own
    assert second.startswith("naive takes 5.0")
    assert third.startswith("torch-ddp takes 10.")
    assert "ms in exposed communication" in third
    assert section.explanation[3].startswith(
        "Rank 1 comes last to most operations and keeps the others waiting: 5.00 ms a step in bucketed, 5.00"
    )


def test_a_chart_is_one_picture_with_a_name(results: Results) -> None:
    for figure in figures(build(results)):
        for _, chart, basis in figure.charts:
            picture = ET.fromstring(
                str(draw(chart, figure.colors, "x", figure.title, f"{figure.alternative}. {basis}"))
            )
            assert picture.attrib["role"] == "img"
            assert picture.attrib["aria-labelledby"] == "x-t x-d"
            assert [child.tag for child in picture[:2]] == ["title", "desc"]
            shapes = {element.tag for element in picture.iter()}
            assert shapes & {"rect", "polyline", "path"}


def test_bars_are_as_long_as_their_values() -> None:
    bars = Bars("t", "u", (Bar("a <b>", "1", (("x", 1.0), ("y", 3.0))), Bar("c", "failed", tone="bad")), str)
    picture = ET.fromstring(str(draw(bars, {}, "x", "t", "d")))
    rects = [rect.attrib for rect in picture.iter("rect")]
    assert [(r["x"], r["width"]) for r in rects] == [("0.000%", "25.000%"), ("25.000%", "75.000%")]
    assert [text.text for text in picture.iter("text")][:1] == ["0.0"]
    assert {"a <b>", "failed"} <= {text.text for text in picture.iter("text")}


def test_an_interval_that_says_nothing_does_not_shrink_the_bars() -> None:
    assert Bars("t", "u", (Bar("a", "", (("x", 2.0),), low=0.1, high=900.0),), str).reach == 3.0
    assert Bars("t", "u", (Bar("a", ""),), str).reach == 1.0


@pytest.mark.parametrize(
    ("reach", "binary", "expected"),
    [(10, False, [0, 2, 4, 6, 8, 10]), (0.07, False, [0, 0.02, 0.04, 0.06]), (1000, True, [0, 256, 512, 768])],
)
def test_ticks_are_round(reach: float, binary: bool, expected: list[float]) -> None:
    assert ticks(reach, binary=binary) == pytest.approx(expected)


def test_series_keep_their_colour_and_others_take_what_is_free() -> None:
    found = colors([["compute", "all-reduce, data", "waiting"]])
    assert (found["compute"], found["waiting"], found["all-reduce, data"]) == ("teal", "orange", "blue")


def test_an_operation_has_one_colour_in_every_tracks_chart() -> None:
    """Whatever stands before it there, and another than what stands beside it."""
    one, two, three = ["a", "b"], ["c", "b", "d"], [f"e{i}" for i in range(6)] + ["d", "a"]
    found = colors([one, two, three])
    for series in (one, two, three):
        assert len({found[name] for name in series}) == len(series)
    charts = tuple(
        (str(i), Bars("t", "u", (Bar("case", "", tuple((name, 1.0) for name in series)),), str), "basis")
        for i, series in enumerate((one, two, three))
    )
    assert Figure("n", "t", "a", charts).colors == found


def test_blocks_that_touch_become_one_and_the_invisible_go() -> None:
    blocks = [Block("f", 0, 1), Block("f", 1.05, 2), Block("b", 2, 2.01), Block("f", 3, 4)]
    assert merged(blocks, 0.1) == (Block("f", 0, 2), Block("f", 3, 4))


def test_a_pipelines_step_stands_beside_the_one_that_its_schedule_allows(tmp_path: Path) -> None:
    """Stage 1 idles between its passes when measured, and not when simulated."""
    begins = {"0F0": 0, "0F1": 10, "0B0": 60, "0B1": 90, "1F0": 10, "1B0": 30, "1F1": 60, "1B1": 70}
    kinds = {"F": ("forward", 10), "B": ("backward", 20)}
    spans = [
        span_row(int(action[0]), kinds[action[1]][0], begin, begin + kinds[action[1]][1], action)
        for action, begin in begins.items()
    ]
    spans += [span_row(rank, "step", 0, 110) for rank in range(STAGES)]
    run = run_row(
        pipeline_strategy="one-f-one-b", data_strategy=None, data_size=1, pipeline_size=STAGES, num_micro_batches=2
    )
    tables = {"runs": [run], "ranks": rank_rows(node_rank=0), "operations": spans}
    Writer(tmp_path, "s").write_round(TRACK, "one-f-one-b", 1, 1, tables)
    (figure,) = [figure for figure in figures(build(load(tmp_path))) if figure.name == "timelines"]
    ((_, chart, _),) = figure.charts
    assert isinstance(chart, Rows)
    assert [name for name, _ in chart.groups] == ["one-f-one-b", "one-f-one-b, simulated"]
    ends = [max(block.end for row in rows for block in row.thick) for _, rows in chart.groups]
    assert ends == pytest.approx([0.110, 0.090])  # F F B F B B of 10 and 20 ms on two stages


def test_rates_are_decimal() -> None:
    assert [rate(v) for v in (0.5, 999, 1.1e9, 25e12, None)] == [
        "0.500 B/s",
        "999 B/s",
        "1.10 GB/s",
        "25,000 GB/s",
        "–",
    ]
