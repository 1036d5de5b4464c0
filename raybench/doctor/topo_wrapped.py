"""Mends a matrix that a narrow terminal has wrapped: a header that goes on in the next line, and so do its rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raybench.doctor.topo_table import header_of, read_row, row_name

_MOST_PARTS = 8
_HEADER = re.compile(r"\s*GPU\d")
_HEADER_WORD = re.compile(r"GPU|NIC|mlx|Aff|NUMA|\bID")
_REST = re.compile(r"\s*(?:X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|N/A|[\d,\-]+|[A-Z]{1,4}\d{0,2})(?=\s|$)")


def unwrapped(lines: Sequence[str]) -> list[str]:
    """The lines with each wrapped header and row joined; all as they are where no header is wrapped."""
    mended: list[str] = []
    devices: list[str] = []
    titles: list[str] = []
    at = 0
    while at < len(lines):
        line, used = lines[at], 1
        if _HEADER.match(line) and not row_name(line):
            line, used = _header(lines, at)
            devices, titles = header_of(line) if used > 1 else ([], [])
        elif devices and (name := row_name(line)):
            line, used = _row(lines, at, name, devices, titles)
        mended.append(line)
        at += used
    return mended


def _header(lines: Sequence[str], at: int) -> tuple[str, int]:
    """A header, joined with as many of the next lines as add devices or titles to it."""
    line, best, used = lines[at], _size(lines[at]), 1
    for count in range(2, _MOST_PARTS + 1):
        rest = lines[at + count - 1 : at + count]
        if not rest or not _HEADER_WORD.search(rest[0]) or row_name(rest[0]):
            break
        joined = "".join(lines[at : at + count])
        if _size(joined) > best:
            line, best, used = joined, _size(joined), count
    return line, used


def _size(line: str) -> tuple[int, int]:
    devices, titles = header_of(line)
    return len(devices), len(titles)


def _row(lines: Sequence[str], at: int, name: str, devices: Sequence[str], titles: Sequence[str]) -> tuple[str, int]:
    """A row goes on while cells or affinities are missing and the next line holds nothing else."""
    line, used = lines[at], 1
    while used < _MOST_PARTS and at + used < len(lines):
        rest = lines[at + used]
        row = read_row(line, name, devices, titles)
        full = row.whole and (row.num_after >= len(titles) or not name.startswith("GPU"))
        if full or not rest.strip() or rest.split()[0] in devices or not _REST.match(rest):
            break
        glued, apart = (read_row(line + blank + rest, name, devices, titles) for blank in ("", " "))
        line += ("" if _known(glued.cells) >= _known(apart.cells) else " ") + rest
        used += 1
    return line, used


def _known(cells: Sequence[str | None]) -> int:
    return sum(cell is not None for cell in cells)
