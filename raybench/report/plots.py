"""The report's figures: from a track's section to the chart that answers one question about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from raybench.analysis.split import PARTS
from raybench.analysis.timeline import Lane
from raybench.report.architecture import architecture
from raybench.report.charts import Bar, Bars, Chart, Curves, Figure, Line, Lines, Row, Rows, Stretch, Tone
from raybench.report.collectives import Sweep
from raybench.report.content import Report, Section
from raybench.report.simulated import simulated
from raybench.report.text import (
    has_numbers,
    interval,
    known,
    milliseconds,
    number,
    percent,
    plain,
    rate,
    short_size,
    size,
    spread,
    words,
)

MEMORY = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
}
AMONG = {"all": "all ranks", "model": "ranks of one model"}
"""Axes whose names say little."""
MOST_TIMELINES, MOST_RANKS = 6, 8


def figures(report: Report) -> list[Figure]:
    """Every figure that has something to show."""
    found = []
    for name, title, alternative, plot in FIGURES:
        charts = [(s.track, chart, s.basis) for s in report.sections if (chart := plot(s)) is not None]
        if charts:
            found.append(Figure(name, title, alternative, tuple(charts)))
    curves = [(sweep.key, chart, sweep.basis) for sweep in report.sweeps if (chart := bandwidth(sweep)) is not None]
    if curves:
        alternative = "Bus bandwidth against the size of the message, operation by operation"
        found.append(Figure("collectives", "Bus bandwidth of collectives", alternative, tuple(curves)))
    return found


def throughput(section: Section) -> Bars | None:
    def bar(row: Any) -> Bar:
        told = number(row.tokens_per_s, 4), spread(row.tokens_per_s, row.tokens_per_s_low, row.tokens_per_s_high)
        text = " ".join(filter(None, told))
        if known(row.ratio_to_control):
            text += f" · {number(row.ratio_to_control)} × control"
        return _bar(row, text, (("tokens/s", float(row.tokens_per_s)),), "tokens_per_s")

    title = "tokens/s: median over rounds, 95 % interval"
    return _bars(section, title, section.cases.tokens_per_s, bar, lambda value: f"{value:,.0f}", "not timed")


def scaling(section: Section) -> Bars | None:
    def bar(row: Any) -> Bar:
        between = interval(row.scaling_efficiency_low * 100, row.scaling_efficiency_high * 100)
        kind = f", {row.scaling_kind}" if known(row.scaling_kind) else ""
        base = "one process" if row.scaling_baseline == "control" else plain(row.scaling_baseline)
        text = f"{percent(row.scaling_efficiency)}{f' ({between})' if between else ''} of {base}{kind}"
        return _bar(row, text, (("efficiency", float(row.scaling_efficiency)),), "scaling_efficiency")

    title = "speed of a rank ÷ speed of a rank of the baseline, 95 % interval"
    chart = _bars(section, title, section.cases.scaling_efficiency, bar, lambda v: percent(v, 0), "no baseline")
    return None if chart is None else Bars(chart.title, chart.unit, chart.bars, chart.tick, mark=1.0)


def memory(section: Section) -> Bars | None:
    def bar(row: Any) -> Bar:
        parts = {name: getattr(row, column) for name, column in MEMORY.items()}
        kept = tuple((name, float(value)) for name, value in parts.items() if known(value))
        return _bar(row, size(int(sum(value for _, value in kept))), kept)

    def tick(value: float) -> str:
        return size(int(value)).replace(".00 ", " ").replace(".0 ", " ") if value else "0"

    title = "bytes of the rank that holds most"
    chart = _bars(section, title, section.cases.parameter_bytes, bar, tick, "not counted")
    return None if chart is None else Bars(chart.title, chart.unit, chart.bars, chart.tick, binary=True)


def time_split(section: Section) -> Bars | None:
    def bar(row: Any) -> Bar:
        kept = tuple((part, float(v)) for part in PARTS if known(v := getattr(row, f"{part}_s")))
        exposed = percent(row.communication_fraction)
        return _bar(row, f"{milliseconds(row.step_time_s)} ms, {exposed} exposed", kept)

    title = "milliseconds a step, mean over ranks"
    return _bars(section, title, section.cases.other_s, bar, _ms, "not recorded")


def communication(section: Section) -> Bars | None:
    frame = section.details.communication

    def bar(row: Any) -> Bar:
        own = frame[frame.case == row.case]
        parts = tuple(
            (_operation(o.kind, o.axis), float(o.exposed_s) if known(o.exposed_s) else 0.0)
            for o in own.itertuples(index=False)
        )
        text = f"{milliseconds(sum(value for _, value in parts))} ms, {percent(own.exposed_share.sum())} of the step"
        fastest = own.sort_values("wire_bytes").bus_bandwidth_bytes_per_s.dropna()
        return _bar(row, text + (f", {rate(fastest.iloc[-1])}" if len(fastest) else ""), parts)

    measured = section.cases.case.isin(set(frame.case)) & section.cases.apply(has_numbers, axis=1)
    title = "exposed milliseconds a step by operation and axis; bus bandwidth of the operation that moves most"
    return _bars(section, title, measured.where(measured), bar, _ms, "not recorded")


def _operation(kind: str, axis: str) -> str:
    return f"{str(kind).replace('_', '-')}, {AMONG.get(axis, plain(axis))}"


def convergence(section: Section) -> Lines | None:
    losses = section.details.losses
    lines = []
    for (case, data), rows in losses.groupby(["case", "data"], sort=False):
        points = tuple((float(step), float(loss)) for step, loss in zip(rows.step, rows.loss, strict=True))
        lines.append(Line(plain(case), points, dashed=data == "evaluation"))
    unit = "loss; equal curves lie on one another, the first is the widest"
    unit += "; dashed: on held-out data" if any(line.dashed for line in lines) else ""
    return Lines(section.title, unit, "step", tuple(lines)) if lines else None


def timelines(section: Section) -> Rows | None:
    groups: list[tuple[str, tuple[Row, ...]]] = []
    for row in section.rows:
        found = section.details.timelines.get((section.suite_id, section.track, row.case))
        if found is None or len(groups) >= MOST_TIMELINES:
            continue
        groups.append((plain(row.case), tuple(_lane(lane) for lane in found.lanes[:MOST_RANKS])))
        allowed = section.details.simulated.get((section.suite_id, section.track, row.case))
        groups += [] if allowed is None else [(f"{plain(row.case)}, simulated", simulated(allowed))]
    return Rows(section.title, "milliseconds of one instrumented step", tuple(groups)) if groups else None


def _lane(lane: Lane) -> Row:
    work = [Stretch(words(block.kind), block.begin_s, block.end_s, block.label) for block in lane.work]
    standing = [Stretch("communication", block.begin_s, block.end_s) for block in lane.standing]
    thin = [Stretch("communication", block.begin_s, block.end_s) for block in lane.under_way]
    return Row(f"rank {lane.rank}", (*work, *standing), tuple(thin))


def bandwidth(sweep: Sweep) -> Curves | None:
    timed = sweep.measured[sweep.measured.bus_bandwidth_bytes_per_s.gt(0)]
    lines = []
    for (kind, dtype), sizes in timed.groupby(["kind", "dtype"], sort=False):
        points = zip(sizes.payload_bytes.astype(float), sizes.bus_bandwidth_bytes_per_s / 1e9, strict=True)
        lines.append(Line(str(kind), tuple(points), dashed=dtype == "bf16"))
    link = timed.link_bytes_per_s.dropna()
    unit = "GB/s by size of the message: medians over rounds, both axes logarithmic"
    unit += "; dashed: bf16" if any(line.dashed for line in lines) else ""
    unit += "; level: the link" if len(link) else ""
    mark = float(link.iloc[0]) / 1e9 if len(link) else None
    return Curves(sweep.title, unit, tuple(lines), short_size, lambda v: f"{v:.3g}", mark) if lines else None


def _bars(
    section: Section,
    unit: str,
    values: pd.Series[Any],
    bar: Callable[[Any], Bar],
    tick: Callable[[float], str],
    otherwise: str,
) -> Bars | None:
    """A bar a case; in place of one without a value, why there is none."""
    if not values.notna().any():
        return None
    bars = [
        bar(row) if known(value) and has_numbers(row) else _missing(row, otherwise)
        for row, value in zip(section.rows, values, strict=True)
    ]
    return Bars(section.title, unit, tuple(bars), tick)


def _bar(row: Any, text: str, parts: tuple[tuple[str, float], ...], measure: str | None = None) -> Bar:
    tone: Tone = "peer" if known(row.peer) else "own"
    low, high = (getattr(row, f"{measure}_{end}") if measure else None for end in ("low", "high"))
    if low is None or high is None or not known(low) or not known(high):
        return Bar(_label(row), text, parts, tone=tone)
    return Bar(_label(row), text, parts, float(low), float(high), tone=tone)


def _missing(row: Any, otherwise: str) -> Bar:
    text = otherwise if has_numbers(row) else words(row.status)
    return Bar(_label(row), text, tone="muted" if row.status in ("ok", "skipped") else "bad")


def _label(row: Any) -> str:
    return plain(row.case, 40) + (" (peer)" if known(row.peer) else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"


FIGURES: tuple[tuple[str, str, str, Callable[[Section], Chart | None]], ...] = (
    ("benchmark", "Throughput", "Tokens per second of every case, with intervals", throughput),
    ("scaling", "Scaling efficiency", "Speed of a rank against the baseline of each track", scaling),
    ("time-split", "Where the time of a step goes", "Parts of the mean step, stacked", time_split),
    ("communication", "Exposed communication", "Exposed time by operation and axis, stacked", communication),
    ("memory", "Memory of the fullest rank", "Bytes by category, stacked", memory),
    ("convergence", "Convergence", "Loss by step", convergence),
    ("timelines", "One step on the time axis", "What every rank did when", timelines),
    ("architecture", "Who holds what on which node", "Ranks on their nodes with what they hold", architecture),
)
