"""From the store to the fit and the medians, as the advisor and the table take them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pandas as pd
import pytest

from raybench.analysis.links import LINK_COLUMNS, links, sizes
from raybench.comm.figure import draw
from raybench.comm.render import as_rows, legend, table
from raybench.results.folder import StoreError
from raybench.results.store import load
from raybench.results.sweep_writer import SweepWriter
from raybench.suite.console import console_for
from tests.comm.made import row

PAYLOADS = [8 * 4**k for k in range(11)]


def write(folder: Path, suite_id: str, rows: dict[tuple[str, int], list[dict]], kinds: str = "all_reduce") -> None:
    writer = SweepWriter(folder, suite_id, {"operations": [kinds]})
    writer.check()
    for attempt, ((case, number), found) in enumerate(rows.items()):
        writer.write("comm", case, attempt, number, found)


def straight(alpha_ns: float, gigabytes_per_s: float, **more) -> list[dict]:
    return [row(size, round(alpha_ns + size / gigabytes_per_s), **more) for size in PAYLOADS]


def test_links_of_a_sweep(tmp_path: Path) -> None:
    gathers = straight(50_000, 4, kind="all_gather")
    write(tmp_path, "s1", {("a", 1): straight(30_000, 1), ("a", 2): straight(30_000, 1), ("b", 1): gathers})
    found = links(tmp_path)
    assert list(found.columns) == LINK_COLUMNS
    assert list(found.kind) == ["all_reduce", "all_gather"]
    reduce, gather = found.itertuples()
    assert reduce.alpha_s == pytest.approx(30e-6, rel=1e-3)
    assert reduce.bus_bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert gather.beta_s_per_byte == pytest.approx(0.25e-9, rel=1e-3)
    assert gather.bus_bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-3)  # half of the payload crosses
    assert (reduce.num_rounds, gather.num_rounds, reduce.group, reduce.num_nodes) == (2, 1, "across", 2)
    assert reduce.fit_error < 0.01


def test_sizes_are_medians_over_rounds(tmp_path: Path) -> None:
    rounds = {("a", n): [row(8, time), row(32, 2 * time)] for n, time in enumerate((100, 300, 200), 1)}
    rounds["b", 1] = [row(8, 100, kind="send"), {**row(32, 1, kind="send"), "status": "failed", "num_wrong": 2}]
    rounds["b", 1][1] |= {"time_ns": None, "reason": "2 of 4 values are wrong"}
    write(tmp_path, "s1", rounds)
    found = sizes(load(tmp_path, of="collectives"))
    assert list(found.time_ns[:2]) == [200, 400]
    assert list(found.num_rounds) == [3, 3, 1, 0]
    assert found.speedup.isna().all()
    bad = found.iloc[-1]
    assert (bad.status, bad.num_wrong, bad.reason) == ("failed", 2, "2 of 4 values are wrong")
    assert pd.isna(bad.time_ns)
    assert as_rows(found)[3]["time_ns"] is None


def test_settings_are_compared_within_their_round(tmp_path: Path) -> None:
    rounds = {}
    for number, weather in enumerate((1, 10, 2), 1):
        rounds["a", number] = [row(8, 100 * weather, setting="none")]
        rounds["b", number] = [row(8, 50 * weather, setting="proto-ll")]
    write(tmp_path, "s1", rounds)
    found = sizes(tmp_path)
    assert list(found.setting) == ["none", "proto-ll"]
    assert list(found.speedup) == [1.0, 2.0]
    assert "× first: time under none ÷ time here, paired by round" in legend(found)


def test_table_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = {"setting": "default", "group": "across", "kind": "all_reduce", "dtype": "fp32", "status": "skipped"}
    refused = {**left_out, "kind": "send", "reason": "gloo has no send of fp32: no"}
    whole = [
        *straight(30_000, 1, network_bytes=16, loopback_bytes=None),
        {**left_out, "payload_bytes": 1 << 30, "reason": "budget"},
    ]
    write(tmp_path, "s1", {("a", 1): whole, ("b", 1): [refused], ("c", 1): [row(8, 100, kind="all_gather")]})
    measured, fitted = sizes(tmp_path), links(tmp_path)
    console_for(sys.stdout, width=160).print(table(measured, fitted, by_size=False))
    out = capsys.readouterr().out
    assert "across fp32  2 ranks on 2 nodes, gloo, link 1.25 GB/s" in out
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["all_reduce"]]
    assert line.split()[1:8] == ["30.0", "1.00", "0.0", "%", "0", "%", "8"]
    assert "budget" not in out
    assert "1 size left out for the budget, the largest of each operation first" in legend(measured)
    assert not [line for line in legend(measured, by_size=True) if "fitted" in line]
    narrow = io.StringIO()
    console_for(narrow, width=70).print(table(measured, fitted, by_size=False))
    assert "algbw" in out
    assert "algbw" not in narrow.getvalue()
    assert "…" not in narrow.getvalue()
    assert "send: skipped: gloo has no send of fp32: no" in out
    console_for(sys.stdout, width=160).print(table(measured, fitted, by_size=True))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["all_reduce"]]
    assert len(lines) == len(PAYLOADS)
    draw(measured, fitted, tmp_path / "comm.figure")
    assert (tmp_path / "comm.figure").read_bytes().startswith(b"\x89PNG")


def test_sizes_left_out_are_told_as_ranges(tmp_path: Path) -> None:
    rows, unmeasured = {}, {"status": "skipped", "time_ns": None}
    for kind, tried in {"all_reduce": 3, "all_gather": 3, "send": 4}.items():
        more = [row(size, 1, kind=kind) | unmeasured for size in PAYLOADS[tried:6]]
        rows[kind, 1] = [row(size, size, kind=kind) for size in PAYLOADS[:tried]] + more
    rows["send", 1].pop()
    write(tmp_path, "s1", rows)
    narrow = io.StringIO()
    console_for(narrow, width=100).print(table(sizes(tmp_path), links(tmp_path), by_size=True))
    told = [line.strip() for line in narrow.getvalue().splitlines() if "left out" in line]
    assert told == ["left out: 512 B to 8 KiB (all_gather, all_reduce)", "left out: 2 KiB (send)"]
    assert narrow.getvalue().count("all_gather ") == 3


def test_a_store_without_sweeps_or_with_them_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a folder, a suite_id"):
        links(tmp_path / "gone")
    write(tmp_path, "s1", {("a", 1): [row(8, 100)]})
    with pytest.raises(StoreError, match=r"there are no results in it but sweeps of `raybench comm`"):
        load(tmp_path)
    assert len(load(tmp_path, "s1", of="collectives").collectives) == 1
    assert len(load(f"{tmp_path}@s1", of="collectives").collectives) == 1
    with pytest.raises(StoreError, match="there is no suite 's2'"):
        load(tmp_path, "s2", of="collectives")
    assert len(pd.read_parquet(tmp_path / "collectives")) == 1
