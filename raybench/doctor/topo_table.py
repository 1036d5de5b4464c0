"""The table itself: header, rows, legend, each recognised by its content in any of nvidia-smi's layouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

HOPS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
_LINK = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")
_PEER = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
_DEVICE = re.compile(r"GPU\d{1,4}|NIC\d{1,4}|mlx\d+_(?:bond_?)?\d+|(?=[\w.\-]*\d)[A-Za-z][\w.\-]*", re.ASCII)
# Names may be glued to each other and to the titles, so no blank is required anywhere.
_HEADER_TOKEN = re.compile(
    r"GPU\s+NUMA(?:\s+ID)?|CPU\s+Aff\w*?(?=CPU|NUMA|GPU|\W|$)|NUMA\s+Aff\w*?(?=CPU|NUMA|GPU|\W|$)"
    r"|GPU\d{1,4}|NIC\d{1,4}|mlx\d+_(?:bond_?)?\d+|[A-Za-z](?:(?!CPU|NUMA|GPU\d|NIC\d)[\w.\-])*"
    r"|\S",
    re.ASCII,
)
_TITLE_TOKEN = re.compile(r"GPU\s+NUMA|CPU\s+Aff|NUMA\s+Aff|(?:CPU|NUMA|GPU|Aff\w*|ID)$")
_LEGEND_ENTRY = re.compile(r"(?<![\w.\-])(NIC\d+)\s*:[ \t]*")
_LEGEND_VALUE = re.compile(r"[\w.\-]+", re.ASCII)
_LINK_LEGEND = re.compile(r"\s*(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*=\s*(?:Self|Connection)")
_PREFIX = re.compile(
    r"\s*(?:\([^()]{1,80}\)|\[[^\]]{1,60}\](?:<\w+>)?:?|[A-Za-z][\w.\-]{0,63}(?::| +\|)|\d{1,6}(?::|(?=\s\s|\t))|[>|#]+"
    r"|\d{4}-\d\d-\d\dT[\d:.,+Z-]+(?: std\w+ [FP])?|[A-Z][a-z]{2} +\d+ [\d:]+ \S+ [^\s:]+:)(?=\s|GPU|NIC|mlx)[ ]?"
)
_TAB = 8


@dataclass
class Row:
    """One device's line: what joins it to each device of the header (None: not printed), and its affinities."""

    name: str
    line: str
    cells: list[str | None]
    affinity: dict[str, str]
    num_after: int  # what is printed after the cells

    @property
    def whole(self) -> bool:
        """Every link cell is there."""
        return None not in self.cells


@dataclass
class Table:
    """One matrix with the legend that follows it."""

    devices: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    header: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)
    rebuilt: bool = False
    host: int = 0

    def add(self, row: Row) -> None:
        """The first row of a device counts, unless it was cut and this one is not."""
        if row.name in self.devices and (row.name not in self.rows or not self.rows[row.name].whole):
            self.rows[row.name] = row

    def cut_last_row(self, name: str) -> None:
        """The text stops inside this row: where it has less after its cells than the others, that is not all."""
        row = self.rows.get(name)
        others = [other.num_after for other in self.rows.values() if other is not row and other.whole]
        if row is not None and name.startswith("GPU") and others and row.num_after < min(others):
            row.affinity = {}

    def add_legend(self, entries: dict[str, str]) -> None:
        """The first usable value of a name counts."""
        for name, value in entries.items():
            if not self.legend.get(name):
                self.legend[name] = value

    @property
    def is_topology(self) -> bool:
        """Link types, not the OK/CNS/NS of `topo -p2p`."""
        cells = {cell for row in self.rows.values() for cell in row.cells if cell and cell != "X"}
        if cells:
            return any(_LINK.fullmatch(cell) for cell in cells)
        return bool(self.devices) and bool(self.titles)

    @property
    def complete(self) -> bool:
        """Every device of the header has a row with all its cells."""
        rows = [self.rows.get(name) for name in self.devices]
        return bool(rows) and not self.rebuilt and all(row is not None and row.whole for row in rows)

    def link(self, one: str, other: str) -> str | None:
        """What joins two devices, from either's row."""
        for name, column in ((one, other), (other, one)):
            row = self.rows.get(name)
            if row is None or column not in self.devices:
                continue
            cell = row.cells[self.devices.index(column)]
            if cell and cell != "X" and _LINK.fullmatch(cell):
                return cell
        return None

    def device(self, name: str) -> str | None:
        """The device behind a NIC column: its legend's value, or the column itself where that is a device's name."""
        if not re.fullmatch(r"NIC\d+", name):
            return name
        value = self.legend.get(name, "")
        return value if _LEGEND_VALUE.fullmatch(value) else None

    def affinity(self, title: str) -> dict[str, str]:
        """What is printed in one of the affinity columns, of the GPUs whose row is whole."""
        return {
            name: row.affinity[title]
            for name, row in self.rows.items()
            if name.startswith("GPU") and row.whole and title in row.affinity
        }


def prefixed(line: str) -> tuple[str, str]:
    """(what a parallel shell or launcher put before the line, the line), where a header, row or legend follows it."""
    match = _PREFIX.match(line)
    if match and not _LEGEND_ENTRY.match(line.lstrip()):
        body = line[match.end() :]
        if header_of(body)[0] or row_name(body) or _LEGEND_ENTRY.match(body.lstrip()):
            prefix = match.group().strip()
            return ("" if re.search(r"\d:\d\d", prefix) else prefix), body  # a time differs from line to line
    return "", line


def without_line_numbers(parts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Numbers that differ from line to line are an editor's; a launcher's (the rank) come again."""
    numbers = [prefix for prefix, _ in parts if prefix.rstrip(":").isdecimal()]
    if len(numbers) < 2 or len(set(numbers)) < len(numbers):
        return list(parts)
    return [("" if prefix.rstrip(":").isdecimal() else prefix, body) for prefix, body in parts]


def header_of(line: str) -> tuple[list[str], list[str]]:
    """(devices, titles) where the line is the header of a matrix, else two empty lists."""
    devices: list[str] = []
    titles: list[str] = []
    if "GPU" not in line:
        return [], []
    for match in _HEADER_TOKEN.finditer(line):
        token = match.group()
        if _TITLE_TOKEN.match(token):
            titles.append(token)
        elif titles and not token.startswith("GPU"):
            continue  # a title of a newer driver
        elif titles or _cell(token) or not _DEVICE.fullmatch(token):
            return [], []
        else:
            devices.append(token)
    gpus = [name for name in devices if name.startswith("GPU")]
    named = [title for title in titles if " " in title or "\t" in title]
    if not gpus or len(set(devices)) < len(devices) or not devices[0].startswith(("GPU", "NIC", "mlx")):
        return [], []
    leading_blank = line[:1] in (" ", "\t")
    return (devices, _columns(titles)) if named or len(devices) > 1 or leading_blank else ([], [])


def _columns(titles: Sequence[str]) -> list[str]:
    names = {"C": "cpu", "N": "numa", "G": "gpu"}
    columns: list[str] = []
    for title in titles:
        name = names.get(title[0])
        if name and name not in columns:
            columns.append(name)
    return columns


def row_name(line: str) -> str | None:
    """The device whose row this is: a device's name followed by at least one cell of a matrix."""
    parts = line.split(None, 2)
    if len(parts) < 2 or not _DEVICE.fullmatch(parts[0]):
        return None
    return parts[0] if _cell(parts[1]) else None


def read_row(line: str, name: str, devices: Sequence[str], titles: Sequence[str]) -> Row:
    """Cells by device, then the affinities."""
    tokens = list(re.finditer(r"\S+", line))[1:]
    num_cells = _num_cells([token.group() for token in tokens], len(devices))
    cells = _aligned([_cell(token.group()) for token in tokens[:num_cells]], line, name, devices)
    tail = tokens[num_cells:]
    affinity: dict[str, str] = {}
    if tail and titles:
        end_of_cells = tokens[num_cells - 1].end() if num_cells else len(name)
        affinity = _affinity(line, end_of_cells, tail, titles)
    return Row(name, line, cells, affinity, len(tail))


def _cell(token: str) -> str | None:
    if _LINK.fullmatch(token) or _PEER.fullmatch(token):
        return "SYS" if token == "SOC" else token
    return None


def _num_cells(tokens: Sequence[str], num_devices: int) -> int:
    """How many tokens are cells: up to the last that is one, garbled ones between them included."""
    last = 0
    for position, token in enumerate(tokens[:num_devices]):
        if _cell(token):
            last = position + 1
    return last


def _aligned(cells: list[str | None], line: str, name: str, devices: Sequence[str]) -> list[str | None]:
    """Cells on their columns; X stands on a device's own column, which shows where a cell is missing before it."""
    width = len(devices)
    if name not in devices or "X" not in cells:
        return (cells + [None] * width)[:width]
    own, found = devices.index(name), cells.index("X")
    if own == found:
        return (cells + [None] * width)[:width]
    by_tab = [_cell(part.strip()) for part in line.split("\t")[1 : width + 1]]
    if len(by_tab) == width and by_tab[own] == "X":
        return by_tab
    aligned: list[str | None] = [None] * width
    for position, cell in enumerate(cells[found:], start=own):
        if position < width:
            aligned[position] = cell
    return aligned


def _affinity(line: str, end: int, tail: Sequence[re.Match[str]], titles: Sequence[str]) -> dict[str, str]:
    tokens = [token.group() for token in tail]
    if len(tokens) >= len(titles):
        return dict(zip(titles, tokens, strict=False))
    slots = _slots(line, end, tail)
    if slots is None:  # no columns to go by: a list of CPUs is one, and the last column is always printed
        return {titles[0] if re.search(r"\d[-,]\d", tokens[0]) else titles[-1]: tokens[0]}
    answer: dict[str, str] = {}
    extra = max(0, len(slots) - len(titles))  # an extra tab stands before the last column that is printed
    for title, position in zip(titles, range(len(titles)), strict=True):
        is_last = position == len(titles) - 1
        candidates = slots[position : position + 1 + extra] if is_last else slots[position : position + 1]
        value = next((slot for slot in candidates if slot), "")
        if value:
            answer[title] = value
    return answer


def _slots(line: str, end: int, tail: Sequence[re.Match[str]]) -> list[str] | None:
    """The columns after the cells with empty ones kept: by tabs, or by the tab stops that blanks have replaced."""
    if "\t" in line[end:]:
        return [part.strip() for part in line[end:].split("\t")[1:]]
    slots: list[str] = []
    for token in tail:
        if token.start() % _TAB:
            return None
        slots += [""] * max(0, token.start() // _TAB - end // _TAB - 1)
        slots.append(token.group())
        end = token.end()
    return slots


def legend_entries(line: str) -> dict[str, str]:
    """`NIC0: mlx5_0` entries of a line, however many; an empty value is taken from the next line."""
    marks = list(_LEGEND_ENTRY.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)] * bool(marks)
    return {mark.group(1): line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def is_link_legend(line: str) -> bool:
    """`SYS = Connection traversing ...`."""
    return _LINK_LEGEND.match(line) is not None


def table_without_header(lines: Sequence[str]) -> Table:
    """A matrix whose header was cut away: the X of each row tells its column."""
    places: dict[int, str] = {}
    width = 0
    for line in lines:
        name, *cells = line.split()
        cells = cells[: _num_cells(cells, len(cells))]
        width = max(width, len(cells))
        if "X" in cells:
            places.setdefault(cells.index("X"), name)
    devices: list[str] = []
    for position in range(width):
        devices.append(places.get(position) or f"GPU{position}")
    table = Table(devices=devices if len(set(devices)) == width else [], rebuilt=True)
    for line in lines:
        table.add(read_row(line, line.split()[0], table.devices, []))
    return table
