"""Where the time of a step goes, operation by operation, from the instrumented steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from raybench.analysis.split import PARTS, STEP
from raybench.results.reader import in_threads

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey

CASE = ["suite_id", "track", "case"]
COLUMNS = (
    "rank",
    "step",
    "kind",
    "axis",
    "group_size",
    "payload_bytes",
    "wire_bytes",
    "begin_ns",
    "end_ns",
    "wait_ns",
    "exposed_ns",
)
POINT_TO_POINT = ("send", "receive")
HALF_RING = ("all_gather", "reduce_scatter", "all_to_all")


def bus_factor(kind: str, group_size: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth of an operation, as nccl-tests defines it (its doc/PERFORMANCE.md).

    All that a broadcast or a reduction to one rank moves leaves or enters that rank: no ring shares it out.
    """
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    return (group_size - 1) / group_size if kind in HALF_RING else 1.0


def communication(results: Results) -> pd.DataFrame:
    """One row a case, axis and kind of operation; counts, bytes and seconds are of one rank in one step.

    Columns: suite_id, track, case, axis, kind, group_size, count, payload_bytes, wire_bytes, exposed_s, wait_s,
    exposed_share (of the step), bus_bandwidth_bytes_per_s. Means over ranks and steps, medians over rounds.
    """
    by_kind = ["axis", "kind", "group_size"]
    rounds = []
    for round_ in _rounds(results):
        grouped = round_.operations.groupby(by_kind, observed=True, dropna=False)
        sums = grouped[["payload_bytes", "wire_bytes", "exposed_ns", "wait_ns"]].sum(min_count=1) / round_.num_steps
        sums["count"] = grouped.size() / round_.num_steps
        sums["exposed_share"] = sums.exposed_ns / round_.step_ns
        sums["bus_bandwidth_bytes_per_s"] = grouped.bus_bandwidth_bytes_per_s.median()
        rounds.append(sums.reset_index().assign(**dict(zip(CASE, round_.key[:3], strict=True))))
    names = [
        *CASE,
        *by_kind,
        "count",
        "payload_bytes",
        "wire_bytes",
        "exposed_s",
        "wait_s",
        "exposed_share",
        "bus_bandwidth_bytes_per_s",
    ]
    if not rounds:
        return pd.DataFrame({name: pd.Series(dtype="float64") for name in names})
    whole = pd.concat(rounds, ignore_index=True)
    whole["exposed_s"], whole["wait_s"] = whole.exposed_ns / 1e9, whole.wait_ns / 1e9
    values = names[len(CASE) + len(by_kind) :]
    medians = whole.groupby([*CASE, *by_kind], dropna=False)[values].median().reset_index()
    return medians[names]


def time_split(summary: pd.DataFrame) -> pd.DataFrame:
    """One row a part of a step: its seconds, which sum to the step, and its share.

    Columns: suite_id, track, case, part (compute, communication, waiting, optimizer, other), seconds, share. Of the
    cases of `summary` whose operations were recorded.
    """
    columns = {f"{part}_s": part for part in PARTS}
    known = summary[summary.other_s.notna()]
    parts = known.melt([*CASE, "step_time_s"], list(columns), var_name="part", value_name="seconds")
    parts = parts.assign(part=parts.part.map(columns), share=parts.seconds / parts.step_time_s).dropna(subset="seconds")
    return parts[[*CASE, "part", "seconds", "share"]].reset_index(drop=True)


def stragglers(results: Results) -> pd.DataFrame:
    """One row a case and rank: how often it was the last to begin an operation, and how long it kept the others.

    Columns: suite_id, track, case, rank, last_share (of the operations it took part in), lateness_s (how much later
    than the first rank it began, in each step's latest operation, mean over steps). Medians over rounds.
    """
    rounds = []
    for round_ in _rounds(results):
        operations = round_.operations[~round_.operations.kind.isin(POINT_TO_POINT)]
        place = ["step", "axis", "group_size", "number"]
        number = operations.groupby(["rank", "step", "axis", "group_size"], observed=True).cumcount()
        numbered = operations.assign(number=number)
        waits = numbered.groupby(place, observed=True).wait_ns
        late = waits.transform("max") - numbered.wait_ns
        is_last = (numbered.wait_ns == waits.transform("min")) & (late > 0)
        latest = (late / 1e9).groupby([numbered["rank"], numbered.step]).max()
        row = pd.DataFrame(
            {
                "last_share": is_last.groupby(numbered["rank"]).mean(),
                "lateness_s": latest.groupby("rank").mean(),
            }
        )
        rounds.append(row.reset_index().assign(**dict(zip(CASE, round_.key[:3], strict=True))))
    names = [*CASE, "rank", "last_share", "lateness_s"]
    if not rounds:
        return pd.DataFrame({name: pd.Series(dtype="float64") for name in names})
    return pd.concat(rounds).groupby([*CASE, "rank"]).median().reset_index()[names]


@dataclass(frozen=True)
class _Round:
    """The communication of one round."""

    key: RoundKey
    operations: pd.DataFrame
    """With what is derived from one row alone; without spans of the ranks' own work."""
    num_steps: int
    """Steps recorded, of all ranks together."""
    step_ns: float
    """Mean instrumented step; of the window where those were not recorded."""


def _rounds(results: Results) -> list[_Round]:
    """Every round that recorded any communication."""
    window, steps = (results.runs[name].astype("float64") for name in ("window_ns", "num_steps"))
    pieces = in_threads(lambda key: results.piece("operations", key, COLUMNS), results.rounds)
    return [
        _round(key, piece.to_pandas(), mean_ns)
        for key, piece, mean_ns in zip(results.rounds, pieces, window / steps, strict=True)
        if _is_recorded(piece)
    ]


def _round(key: RoundKey, rows: pd.DataFrame, window_step_ns: float) -> _Round:
    spans = rows[rows.kind == STEP]
    step_ns = window_step_ns if spans.empty else float((spans.end_ns - spans.begin_ns).mean())
    num_steps = rows.groupby(["rank", "step"]).ngroups
    return _Round(key, _derived(rows[rows.axis.notna()].copy()), num_steps, step_ns)


def _is_recorded(piece: Any) -> bool:
    return piece is not None and piece.num_rows > 0 and piece.column("exposed_ns").null_count < piece.num_rows


def _derived(operations: pd.DataFrame) -> pd.DataFrame:
    moving_s = (operations.end_ns - operations.begin_ns - operations.wait_ns.fillna(0)) / 1e9
    factors = [
        bus_factor(str(k), int(n)) for k, n in zip(operations.kind, operations.group_size.fillna(1), strict=True)
    ]
    speed = operations.payload_bytes * np.asarray(factors) / moving_s.where(moving_s > 0)
    return operations.assign(bus_bandwidth_bytes_per_s=speed)
