"""What sweeps of `raybench comm` say in a report: a table for each group of ranks, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.links import CASE, links, operations, sizes
from raybench.report.text import MISSING, known, number, percent, plain, rate, short_size, whole, words
from raybench.wording import count

if TYPE_CHECKING:
    from raybench.results.reader import Results

OPERATION = [name for name in CASE if name != "suite_id"]
PLACE = ["suite_id", "setting", "group"]


@dataclass(frozen=True)
class Sweep:
    """The groups of one name under one setting, as one suite measured them."""

    suite_id: str
    setting: str
    group: str
    measured: pd.DataFrame
    """Of `raybench.analysis.links.sizes`."""
    fitted: pd.DataFrame
    """Of `links`."""

    @property
    def key(self) -> str:
        """Another for each sweep of a report."""
        return f"{self.suite_id} {self.setting} {self.group}"

    @property
    def title(self) -> str:
        return f"{self.group}, {plain(self.setting, 40)}"

    @property
    def basis(self) -> str:
        """Ranks, nodes, backend and link in a line."""
        known_rows = self.measured[self.measured.group_size.notna()]
        return where_of(known_rows.iloc[0]) if len(known_rows) else "nothing measured"

    @cached_property
    def operations(self) -> pd.DataFrame:
        """One row an operation."""
        return operations(self.measured, self.fitted)

    @property
    def rows(self) -> list[Any]:
        """The operations one by one, their columns as attributes."""
        return list(self.operations.itertuples(index=False))

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and cells, without the columns that say nothing."""
        rows = self.rows
        told = {title: [cell(row) for row in rows] for title, cell in COLUMNS.items()}
        told = {title: cells for title, cells in told.items() if any(cell != MISSING for cell in cells)}
        return list(told), [list(cells) for cells in zip(*told.values(), strict=True)]

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """Operation, status and reason of what has no time, or not for every size."""
        bad = [row for row in self.rows if row.status != "ok"]
        return [(f"{row.kind} {row.dtype}", words(row.status), plain(row.reason or "no reason known")) for row in bad]


def where_of(row: Any) -> str:
    """Who took part, over what: of a row that was measured."""
    groups = "" if row.num_groups == 1 else f"{int(row.num_groups)} groups at once, each of "
    link = f", link {rate(row.link_bytes_per_s)}" if known(row.link_bytes_per_s) else ""
    ranks, nodes = count(int(row.group_size), "rank"), count(int(row.num_nodes), "node")
    return f"{groups}{ranks} on {nodes}, {row.backend}{link}"


def microseconds(seconds: Any) -> str:
    return number(seconds * 1e6) if known(seconds) else MISSING


def gigabytes(bytes_per_s: Any) -> str:
    if not known(bytes_per_s):
        return MISSING
    return number(bytes_per_s / 1e9) if bytes_per_s >= 1e6 else f"{bytes_per_s / 1e9:.0e}"


def uncertainty(error: Any) -> str:
    """A relative error."""
    return percent(error, 0 if known(error) and error > 0.1 else 1)


COLUMNS: dict[str, Callable[[Any], str]] = {
    "operation": lambda row: str(row.kind),
    "dtype": lambda row: str(row.dtype),
    "ranks": lambda row: whole(row.group_size),
    "α, µs": lambda row: microseconds(row.alpha_s),
    "fitted, GB/s": lambda row: gigabytes(row.fitted_bus_bandwidth_bytes_per_s),
    "±": lambda row: uncertainty(row.fitted_error),
    "best, GB/s": lambda row: gigabytes(row.best_bus_bandwidth_bytes_per_s),
    "at": lambda row: short_size(row.best_payload_bytes),
    "of link": lambda row: percent(row.best_fraction_of_link, 0),
    "wrong": lambda row: whole(row.num_wrong) if known(row.group_size) else MISSING,
    "status": lambda row: words(row.status),
}
TEXT_COLUMNS = ("operation", "dtype", "status")

HOW_TO_READ = """\
- **α**: latency, from the line *time = α + factor · payload ÷ bandwidth* fitted to the smallest sizes.
- **fitted, ±**: bus bandwidth of the line through the largest sizes, and its standard error.
- **best, at**: the largest median bus bandwidth of any size, and that size. Bus bandwidth is payload ÷ time × the
  factor of nccl-tests, so that operations can be compared with each other and with a link.
- **of link**: best ÷ the link's speed. Above 100 % it is no speed of a wire: fewer bytes than a ring's crossed it.
- **wrong**: elements of results that were not what they must be; a size with any has no time."""


def sweeps(results: Results) -> tuple[Sweep, ...]:
    """Of every operation the newest sweep that measured it, or tried to where none did."""
    if results.collectives.empty:
        return ()
    measured, fitted = sizes(results), links(results)
    tried = measured.time_ns.notna().groupby([measured[name] for name in CASE]).any().reset_index()
    newest = tried.sort_values(["time_ns", "suite_id"]).drop_duplicates(OPERATION, keep="last")[CASE]
    lines = dict(list(fitted.merge(newest).groupby(PLACE)))
    found = []
    for place, part in measured.merge(newest).groupby(PLACE, sort=False):
        suite_id, setting, group = map(str, place)
        found.append(Sweep(suite_id, setting, group, part, lines.get(place, fitted[:0])))
    return tuple(found)
