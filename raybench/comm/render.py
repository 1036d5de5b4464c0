"""A sweep as a reader sees it: a table on the terminal, and rows for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from raybench.analysis.links import fit_of, unmeasured
from raybench.report.collectives import gigabytes, microseconds, uncertainty, where_of
from raybench.report.text import MISSING, known, number, percent, plain, short_size, words
from raybench.wording import count

PLACE = ["setting", "group", "dtype"]


def table(measured: pd.DataFrame, fitted: pd.DataFrame, *, by_size: bool) -> RenderableType:
    """A table for each setting, group and type; a line an operation, or one a size.

    Args:
        measured: as `raybench.analysis.links.sizes` gives it.
        fitted: as `links` gives it.
    """
    blocks: list[RenderableType] = []
    for (setting, group, dtype), part in measured.groupby(PLACE, sort=False):
        first = part[part.group_size.notna()]
        where = where_of(first.iloc[0]) if len(first) else "nothing measured"
        title = Text.assemble(
            (f"{group} {dtype}", "bold"), (f"  {where}", "dim"), "" if is_alone(measured) else f"  {plain(setting)}"
        )
        own = fitted[(fitted.setting == setting) & (fitted.group == group) & (fitted.dtype == dtype)]
        blocks += [title, _by_size(part) if by_size else _by_operation(part, own)]
        for row in unmeasured(part).drop_duplicates("kind").itertuples():
            blocks.append(Text(f" {row.kind}: {words(row.status)}: {plain(row.reason)}", style="yellow"))
        if by_size:
            blocks += [Text(f" left out: {told}", style="dim") for told in _left_out(part)]
    return Group(*blocks)


def is_alone(measured: pd.DataFrame) -> bool:
    return bool(measured.setting.nunique() == 1)


def _short(measured: pd.DataFrame) -> pd.DataFrame:
    """The sizes that the budget left out."""
    return measured[(measured.status == "skipped") & measured.payload_bytes.notna()]


def _left_out(part: pd.DataFrame) -> list[str]:
    """Each range of sizes that the budget left out, with its operations."""
    ranges: dict[str, list[str]] = {}
    for kind, rows in _short(part).groupby("kind", sort=False):
        ends = dict.fromkeys(short_size(end) for end in (rows.payload_bytes.min(), rows.payload_bytes.max()))
        ranges.setdefault(" to ".join(ends), []).append(str(kind))
    return [f"{sizes} ({', '.join(kinds)})" for sizes, kinds in ranges.items()]


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[Any], str]
    rank: int = 0
    """Columns of the highest rank go first where the terminal is too narrow."""


TIMES = (
    _Column("wrong", lambda row: number(row.num_wrong)),
    _Column("p50\nµs", lambda row: microseconds(row.p50_ns / 1e9)),
    _Column("p95\nµs", lambda row: microseconds(row.p95_ns / 1e9), 2),
    _Column("p99\nµs", lambda row: microseconds(row.p99_ns / 1e9), 1),
    _Column("algbw\nGB/s", lambda row: gigabytes(row.algorithm_bandwidth_bytes_per_s), 3),
    _Column("busbw\nGB/s", lambda row: gigabytes(row.bus_bandwidth_bytes_per_s)),
    _Column("% of\nlink", lambda row: percent(row.fraction_of_link, 0)),
    _Column("sent\n× S", lambda row: _sent(row), 1),
    _Column("beside\ncomp.", lambda row: _times(row.overlap_slowdown), 4),
    _Column("comp.\nbeside", lambda row: _times(row.overlap_compute_slowdown), 4),
    _Column("×\nfirst", lambda row: number(row.speedup)),
)
SIZE = (
    _Column("operation", lambda row: str(row.kind)),
    _Column("size", lambda row: short_size(row.payload_bytes)),
)
FIT = (
    _Column("operation", lambda row: str(row.kind)),
    _Column("α\nµs", lambda row: microseconds(row.alpha_s)),
    _Column("fitted\nGB/s", lambda row: gigabytes(row.fitted_bus_bandwidth_bytes_per_s)),
    _Column("±", lambda row: uncertainty(row.fitted_error), 3),
    _Column("fit\nerror", lambda row: percent(row.fit_error, 0), 3),
    _Column("largest", lambda row: short_size(row.payload_bytes)),
)


def _by_operation(part: pd.DataFrame, fitted: pd.DataFrame) -> RenderableType:
    """A line an operation: the fit, and what its largest size took."""
    rows = []
    for kind, sizes in part.groupby("kind", sort=False):
        timed = sizes[sizes.time_ns.notna()]
        if timed.empty:
            continue
        fit = fit_of(fitted[fitted.kind == kind])
        rows.append(pd.Series({**timed.iloc[-1], "num_wrong": sizes.num_wrong.sum(), **fit}))
    return _Fitting((*FIT, *TIMES), rows)


def _by_size(part: pd.DataFrame) -> RenderableType:
    """A line a size that was tried, as nccl-tests prints them."""
    tried = part[part.payload_bytes.notna()].drop(_short(part).index)
    return _Fitting((*SIZE, *TIMES), list(tried.itertuples()))


class _Fitting:
    """A table without the columns that say nothing, or for which the terminal has no room."""

    def __init__(self, columns: Sequence[_Column], rows: Sequence[Any]) -> None:
        self._rows = rows
        self._columns = [c for c in columns if any(c.cell(row) not in (MISSING, "") for row in rows)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for highest in range(max((c.rank for c in self._columns), default=0), -1, -1):
            grid = self._grid([c for c in self._columns if c.rank <= highest])
            if console.measure(grid, options=options.update(max_width=1000)).maximum <= options.max_width:
                break
        yield grid

    def _grid(self, columns: Sequence[_Column]) -> Table:
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, column in enumerate(columns):
            grid.add_column(column.title, justify="right" if place else "left", no_wrap=True)
        for row in self._rows:
            grid.add_row(*(column.cell(row) for column in columns))
        return grid


def _times(ratio: Any) -> str:
    return f"{number(ratio)}×" if known(ratio) else MISSING


def _sent(row: Any) -> str:
    """What the interfaces sent for one operation, as a multiple of its payload."""
    told = [value for value in (row.network_bytes, row.loopback_bytes) if known(value)]
    return number(sum(told) / row.payload_bytes) if told and known(row.payload_bytes) else MISSING


LEGEND = (
    "α, fitted: time = α + factor · S ÷ bandwidth, of the smallest and the largest range of sizes; ±: standard error",
    "algbw = S ÷ time, busbw = algbw × nccl-tests' factor; send: one hop, send_receive: both ways at once",
    "sent × S: bytes that the nodes' interfaces sent, all ranks together, ÷ payload (shared memory and RDMA show none)",
    "beside compute, compute beside: how many times longer each takes while the other runs",
)


def legend(measured: pd.DataFrame, *, by_size: bool = False) -> list[str]:
    """What the columns mean, and what a reader could take for more than it is."""
    lines = list(LEGEND if measured.overlap_slowdown.notna().any() else LEGEND[:3])[int(by_size) :]
    if not is_alone(measured):
        lines.append(f"× first: time under {plain(measured.setting.iloc[0])} ÷ time here, paired by round")
    above = measured[(measured.fraction_of_link > 1).fillna(False)]
    for (group, kind), _ in above.groupby(["group", "kind"], sort=False):
        lines.append(
            f"{group} {kind}: its bus bandwidth is above the link, so it is no speed of a wire: a tree, a reduction in "
            "the network, or ranks of one node that share what crosses it move fewer bytes than a ring would, and a "
            "shaped link lets bursts through"
        )
    if len(short := _short(measured)):
        lines.append(f"{count(len(short), 'size')} left out for the budget, the largest of each operation first")
    return lines


def as_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain data; unknown is null, times are in nanoseconds unless their name says otherwise."""
    return [
        {str(name): value if known(value) else None for name, value in row.items()} for row in frame.to_dict("records")
    ]
