"""Sweeps of `raybench comm` in a report: beside tracks or alone, with what failed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raybench.cli import main
from raybench.report import build, terminal_table, write_report
from raybench.report.charts import Curves, log_ticks
from raybench.report.plots import figures
from raybench.report.summary import render
from raybench.report.svg import draw
from raybench.results.folder import StoreError
from raybench.results.store import load
from raybench.results.sweep_writer import SweepWriter
from tests.comm.made import row
from tests.report.chromium import chromium
from tests.results.made import STARTED, write_measured

PAYLOADS = [8 * 4**power for power in range(11)]
HOSTILE = "<script>alert(1)</script> | **bold** \u202etxet"
ENVIRONMENT = json.dumps({"launcher": "ray", "ranks_share_cores": True, "nodes": []})


def straight(alpha_ns: float, gigabytes_per_s: float, **more: Any) -> list[dict[str, Any]]:
    more |= {"device": "Some CPU", "environment": ENVIRONMENT}
    return [row(size, round(alpha_ns + size / gigabytes_per_s), **more) for size in PAYLOADS]


def write_sweep(folder: Path, suite_id: str = "20260301-120000-aaaa", **more: Any) -> None:
    """One all-reduce that is well, an all-gather with a wrong size, and a send that crashed."""
    gathers = straight(50_000, 4, kind="all_gather", **more)
    for unknown in ("time_ns", "bus_bandwidth_bytes_per_s", "fraction_of_link"):
        gathers[-1][unknown] = None
    gathers[-1] |= {"status": "failed", "num_wrong": 7, "reason": "7 of 64 values are wrong"}
    crashed = {"setting": "default", "group": "across", "kind": "send", "dtype": "fp32"} | more
    crashed |= {"status": "crashed", "reason": HOSTILE}
    cases = {"all_reduce": straight(30_000, 1, **more), "all_gather": gathers, "send": [crashed]}
    writer = SweepWriter(folder, suite_id, {"operations": list(cases)})
    writer.check()
    for minute, (case, rows) in enumerate(cases.items()):
        begun = {"started_at": STARTED + timedelta(minutes=minute)}
        writer.write("comm", case, 1, 1, [one | begun for one in rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sweep(tmp_path / "results")
    return tmp_path / "results"


def test_each_operation_has_its_line(folder: Path) -> None:
    (sweep,) = build(load(folder, of="any")).sweeps
    assert (sweep.title, sweep.basis) == ("across, default", "2 ranks on 2 nodes, gloo, link 1.25 GB/s")
    titles, rows = sweep.table
    cells = {line[0]: dict(zip(titles, line, strict=True)) for line in rows}
    assert cells["all_reduce"] == {
        "operation": "all_reduce", "dtype": "fp32", "ranks": "2", "α, µs": "30.0", "fitted, GB/s": "1.00", "±": "0.0 %",
        "best, GB/s": "0.996", "at": "8 MiB", "of link": "80 %", "wrong": "0", "status": "ok",
    }  # fmt: skip
    gather = cells["all_gather"]
    assert (gather["at"], gather["wrong"], gather["status"], gather["fitted, GB/s"]) == ("2 MiB", "7", "failed", "2.00")
    assert set(cells["send"].values()) == {"send", "fp32", "–", "crashed"}
    told = [(operation, status) for operation, status, _ in sweep.failures]
    assert told == [("all_gather fp32", "failed"), ("send fp32", "crashed")]


def test_sweeps_alone_make_a_report(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    assert main(["report", str(folder), "-o", str(out), "--json"]) == 0
    body = json.loads(capfd.readouterr().out)
    assert body["rows"] == []
    assert [(link["kind"], link["status"]) for link in body["links"]] == [
        ("all_reduce", "ok"), ("all_gather", "failed"), ("send", "crashed")
    ]  # fmt: skip
    assert body["links"][0]["alpha_s"] == pytest.approx(30e-6, rel=1e-3)
    assert sorted(path.name for path in out.iterdir()) == ["BENCHMARK_SUMMARY.md", "collectives.png", "report.html"]
    assert (out / "collectives.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "BENCHMARK_SUMMARY.md").read_text()
    assert "Ranks shared CPU cores" in text
    assert "| Device " in text
    assert "- send fp32: **crashed**, &lt;script&gt;alert(1)" in text
    assert "\u202e" not in text
    assert "tokens/s" not in text
    page = (out / "report.html").read_text()
    assert "All cases" not in page
    assert "<script>alert" not in page
    assert main(["report", str(folder), "-o", str(out), "--export", "csv"]) == 2
    assert "--export: there are no cases in these results, only sweeps" in capfd.readouterr().err


def test_sweeps_stand_beside_tracks(folder: Path) -> None:
    write_measured(folder, ["bucketed", "naive"])
    report = build(load(folder, of="any"))
    text = render(report)
    assert text.index("## Data parallelism on one node") < text.index("## Collectives")
    assert "- **tokens/s**" in text
    assert "- **best, at**" in text
    assert report.facts["Suites"] == "20260301-120000-aaaa, suite-1"
    assert not [warning for warning in report.warnings if "older" in warning]
    assert build(load(folder)).sweeps == ()
    assert "Collectives" in terminal_table(load(folder, of="any"), width=100, color=False)


def test_of_every_operation_the_newest_sweep_that_measured_it_is_shown(folder: Path) -> None:
    writer = SweepWriter(folder, "20260302-120000-bbbb", {})
    writer.check()
    writer.write("comm", "all_reduce", 1, 1, straight(10_000, 2))
    unmeasured = {"time_ns": None, "bus_bandwidth_bytes_per_s": None, "status": "timeout", "reason": "too slow"}
    writer.write("comm", "all_gather", 1, 1, [row(8, 1, kind="all_gather") | unmeasured])
    write_sweep(folder, "20260228-120000-cccc")
    report = build(load(folder, of="any"))
    shown = {sweep.suite_id: [line[0] for line in sweep.table[1]] for sweep in report.sweeps}
    assert shown == {"20260301-120000-aaaa": ["all_gather", "send"], "20260302-120000-bbbb": ["all_reduce"]}
    assert [warning for warning in report.warnings if warning.startswith("1 older suite in")]
    (named,) = build(load(f"{folder}@20260228-120000-cccc", of="any")).sweeps
    assert [line[0] for line in named.table[1]] == ["all_reduce", "all_gather", "send"]


def test_what_must_be_there_is_either(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there are no results in it"):
        load(folder, of="runs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="there are no results in it"):
        load(tmp_path / "empty", of="any")


def test_the_figure_has_a_curve_an_operation(folder: Path) -> None:
    (figure,) = figures(build(load(folder, of="any")))
    ((_, chart, basis),) = figure.charts
    assert isinstance(chart, Curves)
    assert basis == "2 ranks on 2 nodes, gloo, link 1.25 GB/s"
    assert {line.label: len(line.points) for line in chart.lines} == {"all_reduce": 11, "all_gather": 10}
    assert chart.lines[0].points[-1] == pytest.approx((8 * 2**20, 0.996), rel=1e-3)
    assert chart.mark == 1.25
    picture = ET.fromstring(str(draw(chart, figure.colors, "x", "t", "d")))
    points = [point for point in picture.iter("circle") if point.attrib["class"] == "c-blue"]
    assert len(points) == 11
    assert points[-1].findtext("title") == "all_reduce: 8 MiB, 0.996"
    heights = [float(point.attrib["cy"]) for point in points]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize(
    ("ends", "binary", "expected"),
    [
        ((8, 2**23), True, [2**3, 2**7, 2**11, 2**15, 2**19, 2**23]),
        ((1024, 4096), True, [1024, 2048, 4096]),
        ((3e-5, 2), False, [1e-4, 1e-3, 1e-2, 1e-1, 1]),
        ((0.3, 3), False, [0.5, 1, 2]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round(ends: tuple[float, float], binary: bool, expected: list[float]) -> None:
    assert log_ticks(ends, binary=binary) == pytest.approx(expected)


def test_the_page_can_be_used_and_is_quiet(folder: Path, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    write_sweep(folder, "20260302-120000-bbbb", setting="proto-ll")
    write_report(build(load(folder, of="any")), tmp_path / "report")
    with chromium() as browser:
        for scheme, width in (("light", 1280), ("dark", 360)):
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
            page, noise = context.new_page(), []
            page.on("console", lambda message, noise=noise: noise.append(message.text))
            page.on("pageerror", lambda error, noise=noise: noise.append(str(error)))
            page.goto((tmp_path / "report" / "report.html").as_uri())
            found = Axe().run(page).response["violations"]
            assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] != "minor"] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#collectives ~ figure svg[role=img]").count() == 2
            assert noise == []
