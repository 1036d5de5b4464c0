"""The report as one page, `report.html`: no request leaves it, and it works without its script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from raybench.report.charts import Figure
from raybench.report.collectives import TEXT_COLUMNS
from raybench.report.content import Report
from raybench.report.summary import PUBLISHED_COLUMNS, PUBLISHED_TEXT, how_to_read, published_cells
from raybench.report.svg import draw
from raybench.report.terminal import peak_bytes, speed, state_bytes
from raybench.report.text import interval, known, milliseconds, number, percent, plain, size, whole, words

FILE_NAME = "report.html"


@dataclass(frozen=True)
class Column:
    """One column of the table of all cases."""

    title: str
    cell: Callable[[Any], str]
    value: Callable[[Any], Any] | None = None
    """What a number is sorted by; text is sorted as it stands."""
    help: str = ""


COLUMNS = (
    Column("track", lambda row: plain(row.track)),
    Column("case", lambda row: plain(row.case)),
    Column("by", lambda row: plain(row.peer) if known(row.peer) else "raybench", help="whose implementation it is"),
    Column("ranks", lambda row: whole(row.num_ranks), lambda row: row.num_ranks),
    Column("nodes", lambda row: whole(row.num_nodes), lambda row: row.num_nodes),
    Column("status", lambda row: words(row.status)),
    Column("gate", lambda row: words(row.gate)),
    Column("tokens/s", lambda row: speed(row), lambda row: row.tokens_per_s),
    Column(
        "95 % interval",
        lambda row: interval(row.tokens_per_s_low, row.tokens_per_s_high, 4) or "–",
        lambda row: row.tokens_per_s_low,
    ),
    Column("rounds", lambda row: whole(row.rounds), lambda row: row.rounds),
    Column("× control", lambda row: number(row.ratio_to_control), lambda row: row.ratio_to_control),
    Column("scaling", lambda row: percent(row.scaling_efficiency), lambda row: row.scaling_efficiency),
    Column("step, ms", lambda row: milliseconds(row.step_time_s), lambda row: row.step_time_s),
    Column("exposed", lambda row: percent(row.communication_fraction), lambda row: row.communication_fraction),
    Column("bubble", lambda row: percent(row.bubble_measured), lambda row: row.bubble_measured),
    Column("MFU, 6N", lambda row: percent(row.mfu_6n), lambda row: row.mfu_6n),
    Column("MFU, non-causal", lambda row: percent(row.mfu_non_causal), lambda row: row.mfu_non_causal),
    Column(
        "USD per million tokens",
        lambda row: number(row.usd_per_million_tokens),
        lambda row: row.usd_per_million_tokens,
    ),
    Column("state a rank", lambda row: size(state_bytes(row)), state_bytes),
    Column("peak a rank", lambda row: size(peak_bytes(row)), peak_bytes),
)
ALWAYS = ("track", "case", "status", "gate", "tokens/s")


@dataclass(frozen=True)
class Drawn:
    """A figure of one track as it stands in the page."""

    title: str
    unit: str
    basis: str
    svg: Markup
    legend: dict[str, str]
    """Colour by series."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table; `value` is what its column is sorted by."""

    text: str
    value: str | None = None
    is_bad: bool = False


def render(report: Report, all_figures: Sequence[Figure]) -> str:
    """The whole page with the report's figures."""
    environment = Environment(
        loader=PackageLoader("raybench.report", "template"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(zip=zip, unbroken=_unbroken)
    script, style = (Markup(_file(name)) for name in ("page.js", "page.css"))
    rows = [row for section in report.sections for row in section.rows]
    columns = [c for c in COLUMNS if c.title in ALWAYS or any(c.cell(row) not in ("–", "") for row in rows)]
    return environment.get_template("page.html").render(
        report=report,
        columns=columns,
        rows=[[_cell(column, row) for column in columns] for row in rows],
        statuses=list(dict.fromkeys(words(row.status) for row in rows)),
        figures={
            **{section.track: drawn(section.track, section.title, all_figures) for section in report.sections},
            **{sweep.key: drawn(sweep.key, sweep.title, all_figures) for sweep in report.sweeps},
        },
        how_to_read=_how_to_read(report),
        script=script,
        style=style,
        script_hash=_hash(script),
        sweep_text=TEXT_COLUMNS,
        published_columns=PUBLISHED_COLUMNS,
        published_text=PUBLISHED_TEXT,
        published_cells=published_cells,
    )


def drawn(key: str, shown: str, all_figures: Sequence[Figure]) -> list[Drawn]:
    """The figures of one track, or one sweep."""
    found: list[Drawn] = []
    for figure in all_figures:
        for track, chart, basis in figure.charts:
            if track == key:
                identity = f"{figure.name}-{len(found)}-{_hash(key)[:8]}".translate(_FOR_IDENTITIES)
                title = f"{figure.title}: {shown}"
                svg = draw(chart, figure.colors, identity, title, f"{figure.alternative}. {basis}.")
                legend = {name: figure.colors[name] for name in chart.series}
                found.append(Drawn(figure.title, chart.unit, basis, svg, legend))
    return found


def _unbroken(sentence: str) -> str:
    """With numbers kept on one line with their units."""
    return _BEFORE_UNIT.sub("\u00a0", sentence)


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|ms\b|×|tokens/s)|(?<=×) ")
_FOR_IDENTITIES = str.maketrans("+/=", "---")


def _cell(column: Column, row: Any) -> Cell:
    text = column.cell(row)
    is_bad = row.status not in ("ok", "skipped") and column.title in ("status", "tokens/s")
    is_bad = is_bad or (column.title == "gate" and row.gate == "failed")
    if column.value is None:
        return Cell(text, None, is_bad)
    value = column.value(row)
    # Without a number a row is sorted below all others, whatever the order.
    return Cell(text, f"{float(value):.9g}" if known(value) else "", is_bad)


def _how_to_read(report: Report) -> list[tuple[str, str]]:
    """Term and meaning, from the list that the Markdown shows."""
    entries = [entry.replace("\n  ", " ").removeprefix("- ") for entry in how_to_read(report).split("\n- ")]
    pairs = [entry.replace("**", "").replace("*", "").partition(": ") for entry in entries]
    return [(term, meaning) if meaning else ("no number", term) for term, _, meaning in pairs]


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return files("raybench.report").joinpath("template", name).read_text(encoding="utf-8")
