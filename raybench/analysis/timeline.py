"""One instrumented step of a case on the time axis: what every rank did, and when its communication was under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.split import STEP

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey

COLUMNS = ("rank", "step", "kind", "label", "axis", "begin_ns", "end_ns", "exposed_ns")
FINEST = 1 / 800
"""Gaps and blocks shorter than this share of the step are not told apart."""


@dataclass(frozen=True)
class Block:
    """A stretch of time, in seconds from the step's begin."""

    kind: str
    """`forward`, `backward`, `optimizer`, or the name of an operation."""
    begin_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True)
class Lane:
    """One rank."""

    rank: int
    work: tuple[Block, ...]
    """What it did by itself."""
    standing: tuple[Block, ...]
    """When it could do nothing but wait for an operation."""
    under_way: tuple[Block, ...]
    """When an operation was under way, hidden or not."""


@dataclass(frozen=True)
class Timeline:
    """All ranks over one step."""

    step_s: float
    lanes: tuple[Lane, ...]


def timeline(results: Results, key: RoundKey) -> Timeline | None:
    """The last instrumented step of a round on the first rank's clock; None where no spans were recorded."""
    piece = results.piece("operations", key, COLUMNS)
    if piece is None or not piece.num_rows:
        return None
    rows: pd.DataFrame = piece.to_pandas().astype({"kind": str, "label": object})
    if not (rows.kind == STEP).any():
        return None
    rows = rows[rows.step == rows.step.max()]
    rows = rows.assign(offset_ns=rows["rank"].map(_offsets(results, key)).fillna(0))
    whole = rows[rows.kind == STEP]
    origin = (whole.begin_ns + whole.offset_ns).min()
    rows = rows.assign(
        begin_s=(rows.begin_ns + rows.offset_ns - origin) / 1e9, end_s=(rows.end_ns + rows.offset_ns - origin) / 1e9
    )
    step_s = float(rows.end_s[rows.kind == STEP].max())
    ranks = sorted({int(rank) for rank in rows["rank"]})
    lanes = tuple(_lane(rank, rows[rows["rank"] == rank], step_s) for rank in ranks)
    return Timeline(step_s, lanes)


def _offsets(results: Results, key: RoundKey) -> dict[int, int]:
    ranks = results.piece("ranks", key, ["rank", "clock_offset_ns"])
    return {} if ranks is None else {r["rank"]: r["clock_offset_ns"] or 0 for r in ranks.to_pylist()}


def _lane(rank: int, rows: pd.DataFrame, step_s: float) -> Lane:
    operations = rows[rows.axis.notna() & rows.end_s.notna()]
    exposed = operations.assign(begin_s=operations.end_s - operations.exposed_ns.fillna(0) / 1e9)
    work = rows[rows.axis.isna() & (rows.kind != STEP)]
    finest = step_s * FINEST
    unnamed = [part.assign(label="") for part in (exposed, operations)]
    return Lane(rank, *(merged(_blocks(part), finest) for part in (work, *unnamed)))


def _blocks(rows: pd.DataFrame) -> Iterable[Block]:
    for row in rows.sort_values("begin_s").to_dict("records"):
        label: Any = row["label"]
        yield Block(row["kind"], row["begin_s"], row["end_s"], label if isinstance(label, str) else "")


def merged(blocks: Iterable[Block], finest: float) -> tuple[Block, ...]:
    """Blocks in order; those of one kind and label that nearly touch as one, those hardly wide enough to see left out.

    Args:
        finest: seconds under which gaps and blocks are not told apart.
    """
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last and last.kind == block.kind and last.label == block.label and block.begin_s - last.end_s < finest:
            found[-1] = Block(last.kind, last.begin_s, max(last.end_s, block.end_s), last.label)
        else:
            found.append(block)
    return tuple(block for block in found if block.end_s - block.begin_s >= finest)
