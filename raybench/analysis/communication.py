"""Where the time of a step goes, operation by operation, from the instrumented steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

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
HALF_RING = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")


def bus_factor(kind: str, group_size: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth of an operation, as nccl-tests defines it."""
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    return (group_size - 1) / group_size if kind in HALF_RING else 1.0


def communication(results: Results) -> pd.DataFrame:
    """One row a case, axis and kind of operation; counts, bytes and seconds are of one rank in one step.

    Columns: suite_id, track, case, axis, kind, group_size, count, payload_bytes, wire_bytes, exposed_s, wait_s,
    bus_bandwidth_bytes_per_s. Means over ranks and steps, medians over rounds.
    """
    by_kind = ["axis", "kind", "group_size"]
    rounds = []
    for key, operations in _rounds(results):
        share = 1 / operations.groupby(["rank", "step"]).ngroups
        grouped = operations.groupby(by_kind, observed=True, dropna=False)
        sums = grouped[["payload_bytes", "wire_bytes", "exposed_ns", "wait_ns"]].sum(min_count=1) * share
        sums["count"] = grouped.size() * share
        sums["bus_bandwidth_bytes_per_s"] = grouped.bus_bandwidth_bytes_per_s.median()
        rounds.append(sums.reset_index().assign(**dict(zip(CASE, key[:3], strict=True))))
    names = [
        *CASE,
        *by_kind,
        "count",
        "payload_bytes",
        "wire_bytes",
        "exposed_s",
        "wait_s",
        "bus_bandwidth_bytes_per_s",
    ]
    if not rounds:
        return pd.DataFrame({name: pd.Series(dtype="float64") for name in names})
    whole = pd.concat(rounds, ignore_index=True)
    whole["exposed_s"], whole["wait_s"] = whole.exposed_ns / 1e9, whole.wait_ns / 1e9
    values = names[len(CASE) + len(by_kind) :]
    medians = whole.groupby([*CASE, *by_kind], dropna=False)[values].median().reset_index()
    return medians[names]


def time_split(results: Results) -> pd.DataFrame:
    """One row a case: the parts of a step in seconds, which sum to it.

    Columns: suite_id, track, case, step_s and its parts rest_s (computing and everything else), communication_s
    (exposed, without waiting) and waiting_s (exposed, before the last rank of the group had begun). Means over ranks
    and steps, medians over rounds of each part's share; only cases that recorded their operations.
    """
    shares: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    frame = results.summary()
    steps = frame.set_index(CASE).step_time_s
    means = dict(zip(results.rounds, _mean_steps(results.runs), strict=True))
    for key, operations in _rounds(results):
        spans = operations.groupby(["rank", "step"])[["waiting_ns", "exposed_ns"]].sum()
        waiting, exposed = spans.mean() / means[key]
        shares.setdefault(key[:3], []).append((waiting, exposed - waiting))
    rows = []
    for case, parts in shares.items():
        step = float(steps.get(case, np.nan))
        waiting, moving = (float(v) for v in np.median(np.asarray(parts), axis=0))
        if np.isfinite(step) and np.isfinite(waiting + moving):
            moving, waiting = moving * step, waiting * step
            rows.append((*case, step, step - moving - waiting, moving, waiting))
    return pd.DataFrame(rows, columns=[*CASE, "step_s", "rest_s", "communication_s", "waiting_s"])


def stragglers(results: Results) -> pd.DataFrame:
    """One row a case and rank: how often it was the last to begin an operation, and how long it kept the others.

    Columns: suite_id, track, case, rank, last_share (of the operations it took part in), lateness_s (a step: how much
    later than the first rank it began, summed over operations). Medians over rounds.
    """
    rounds = []
    for key, operations in _rounds(results):
        place = ["step", "axis", "group_size", "number"]
        number = operations.groupby(["rank", "step", "axis", "group_size"], observed=True).cumcount()
        numbered = operations.assign(number=number)
        waits = numbered.groupby(place, observed=True).wait_ns
        late = waits.transform("max") - numbered.wait_ns
        is_last = (numbered.wait_ns == waits.transform("min")) & (late > 0)
        by_rank = pd.DataFrame({"rank": numbered["rank"], "last_share": is_last, "lateness_s": late / 1e9})
        grouped = by_rank.groupby("rank")
        row = pd.DataFrame(
            {
                "last_share": grouped.last_share.mean(),
                "lateness_s": grouped.lateness_s.sum() / numbered.step.nunique(),
            }
        )
        rounds.append(row.reset_index().assign(**dict(zip(CASE, key[:3], strict=True))))
    names = [*CASE, "rank", "last_share", "lateness_s"]
    if not rounds:
        return pd.DataFrame({name: pd.Series(dtype="float64") for name in names})
    return pd.concat(rounds).groupby([*CASE, "rank"]).median().reset_index()[names]


def _rounds(results: Results) -> list[tuple[RoundKey, pd.DataFrame]]:
    """The operations of every round that recorded any, with what is derived from one row alone."""
    pieces = in_threads(lambda key: results.piece("operations", key, COLUMNS), results.rounds)
    return [(key, _derived(piece)) for key, piece in zip(results.rounds, pieces, strict=True) if _is_recorded(piece)]


def _is_recorded(piece: Any) -> bool:
    return piece is not None and piece.num_rows > 0 and piece.column("exposed_ns").null_count < piece.num_rows


def _derived(piece: Any) -> pd.DataFrame:
    operations: pd.DataFrame = piece.to_pandas()
    exposed, wait = operations.exposed_ns.fillna(0), operations.wait_ns.fillna(0)
    took = operations.end_ns - operations.begin_ns
    # The last rank began `wait` after this one; only what then was still ahead of its own waiting call is exposed.
    operations["waiting_ns"] = np.clip(wait - (took - exposed), 0, exposed)
    moving_s = (took - wait) / 1e9
    factors = [
        bus_factor(str(k), int(n)) for k, n in zip(operations.kind, operations.group_size.fillna(1), strict=True)
    ]
    speed = operations.payload_bytes * np.asarray(factors) / moving_s.where(moving_s > 0)
    operations["bus_bandwidth_bytes_per_s"] = speed
    return operations


def _mean_steps(runs: pd.DataFrame) -> Any:
    window, steps = runs.window_ns.astype("float64"), runs.num_steps.astype("float64")
    return (window / steps).to_numpy()
