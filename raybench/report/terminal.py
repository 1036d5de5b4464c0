"""The report on a terminal: a table a track, with the columns that its width allows."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raybench.report.collectives import Sweep
from raybench.report.content import Report, Section, build
from raybench.report.text import (
    MISSING,
    has_numbers,
    interval,
    known,
    milliseconds,
    number,
    percent,
    plain,
    size,
    spread,
    whole,
    words,
)

if TYPE_CHECKING:
    from raybench.results.reader import Results

WIDE = 110
"""Columns of a terminal from which on the table shows everything."""
PEER_MARK = " *"
GATE_STYLES = {"passed": "green", "failed": "red", "not run": "yellow"}


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Any], str]
    is_number: bool = True
    from_width: int = 0
    """Columns that the terminal must have."""


COLUMNS = (
    _Column("case", lambda row: plain(row.case) + (PEER_MARK if known(row.peer) else ""), is_number=False),
    _Column("ranks", lambda row: whole(row.num_ranks), from_width=WIDE),
    _Column("gate", lambda row: words(row.gate), is_number=False),
    _Column("tokens/s", lambda row: speed(row)),
    _Column("95 % interval", lambda row: interval(row.tokens_per_s_low, row.tokens_per_s_high, 4), from_width=WIDE),
    _Column("±", lambda row: spread(row.tokens_per_s, row.tokens_per_s_low, row.tokens_per_s_high)[2:]),
    _Column("×\ncontrol", lambda row: number(row.ratio_to_control)),
    _Column("step\nms", lambda row: milliseconds(row.step_time_s)),
    _Column("scaling", lambda row: percent(row.scaling_efficiency, 0), from_width=WIDE + 20),
    _Column("MFU\n6N", lambda row: percent(row.mfu_6n), from_width=WIDE),
    _Column("USD per\nM tokens", lambda row: number(row.usd_per_million_tokens), from_width=72),
    _Column("comm.", lambda row: percent(row.communication_fraction), from_width=72),
    _Column("state", lambda row: size(state_bytes(row)), from_width=80),
    _Column("peak", lambda row: size(peak_bytes(row)), from_width=WIDE),
)


def speed(row: Any) -> str:
    """Tokens per second, or the status of a case that has none."""
    return number(row.tokens_per_s, 4) if has_numbers(row) else words(row.status)


def state_bytes(row: Any) -> Any:
    """Parameters, gradients and optimizer state of the rank that holds most."""
    parts = [row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes]
    return sum(int(part) for part in parts) if all(known(part) for part in parts) else None


def peak_bytes(row: Any) -> Any:
    return row.peak_device_bytes if known(row.peak_device_bytes) else row.peak_rss_bytes


def table(results: Results) -> RenderableType:
    """What `raybench report` and the end of a run print."""
    return tables(build(results))


def terminal_table(results: Results, *, width: int | None = None, color: bool | None = None) -> str:
    """The same as text, for the width of this terminal, or with every column where there is none."""
    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((WIDE, 24)).columns,
        force_terminal=sys.stdout.isatty() if color is None else color,
    )
    with console.capture() as capture:
        console.print(table(results))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def tables(report: Report) -> RenderableType:
    facts = "  ".join(f"{name}: {value}" for name, value in report.facts.items() if name in SHOWN_FACTS)
    blocks: list[RenderableType] = [Text(facts, style="dim")]
    blocks += [_SectionView(section) for section in report.sections]
    if report.sections:
        blocks.append(Text(f"\n{LEGEND}", style="dim"))
    if report.sweeps:
        blocks += _collectives(report.sweeps)
    blocks += [Text(f"! {warning}", style="yellow") for warning in report.warnings]
    return Group(*blocks)


def _collectives(sweeps: Sequence[Sweep]) -> Iterator[RenderableType]:
    """As `raybench comm` shows them."""
    from raybench.comm.render import legend, table

    yield Text("\nCollectives", style="bold")
    for sweep in sweeps:
        yield Text(f"{sweep.title}  {sweep.suite_id}", style="dim")
        yield table(sweep.measured, sweep.fitted, by_size=False)
    yield Text("\n".join(legend(pd.concat([sweep.measured for sweep in sweeps]))), style="dim")


SHOWN_FACTS = ("Device", "Backend", "Scale", "torch", "Ray")
LEGEND = (
    "tokens/s: median over rounds ± the longer arm of its 95 % interval · × control: against as many single "
    "processes · comm.: exposed communication ÷ step · state: parameters, gradients and optimizer state of the "
    "fullest rank · * peer: a library's own implementation"
)


class _SectionView:
    """One track; chooses its columns when it learns how much room there is."""

    def __init__(self, section: Section) -> None:
        self.section = section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        section = self.section
        yield Text.assemble("\n", (section.title, "bold"), (f"  {section.track}", "dim"))
        if section.question:
            yield Text(section.question, style="italic")
        yield self._table(options.max_width)
        for case, status, reason in section.failures:
            yield Padding(Text.assemble((f"{case}: {status}", "red"), f", {reason}"), (0, 0, 0, 1))
        for sentence in section.answer:
            yield Padding(Text(sentence, style="bold"), (0, 0, 0, 1))
        for sentence in section.explanation:
            yield Padding(Text(sentence), (0, 0, 0, 1))

    def _table(self, width: int) -> Table:
        wide = width >= WIDE
        columns = [c for c in COLUMNS if c.from_width <= width and not (wide and c.title == "±")]
        rows = self.section.rows
        # A column that says nothing in any row only takes room.
        columns = [c for c in columns if any(c.cell(row) not in (MISSING, "") for row in rows)]
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if wide else 0, 0, 1), pad_edge=False)
        for column in columns:
            grid.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=column.is_number)
        for row in rows:
            grid.add_row(*(self._cell(column, row) for column in columns))
        return grid

    @staticmethod
    def _cell(column: _Column, row: Any) -> Text:
        text = column.cell(row)
        if column.title == "tokens/s" and not has_numbers(row):
            return Text(text, style="red")
        return Text(text, style=GATE_STYLES.get(text, "") if column.title == "gate" else "")
