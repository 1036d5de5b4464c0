"""What collective sweeps say of the links between ranks: medians by size, and latency and bandwidth by operation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.alpha_beta import fit
from raybench.analysis.communication import bus_factor

if TYPE_CHECKING:
    from raybench.results.reader import Results

CASE = ["suite_id", "setting", "group", "kind", "dtype"]
FACTS = ["group_size", "num_groups", "num_nodes", "backend", "link_bytes_per_s", "interface"]
LINK_COLUMNS = [
    *CASE, "group_size", "num_nodes", "backend", "from_bytes", "to_bytes", "alpha_s", "alpha_error_s",
    "beta_s_per_byte", "beta_error_s_per_byte", "bus_bandwidth_bytes_per_s", "bus_bandwidth_error", "fit_error",
    "num_rounds",
]  # fmt: skip
MEDIANS = [
    "time_ns", "p50_ns", "p95_ns", "p99_ns", "algorithm_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s",
    "fraction_of_link", "network_bytes", "loopback_bytes", "overlap_slowdown", "overlap_compute_slowdown",
]  # fmt: skip

FIT = ("alpha_s", "fitted_bus_bandwidth_bytes_per_s", "fitted_error", "fit_error")
BEST = ("bus_bandwidth_bytes_per_s", "payload_bytes", "fraction_of_link")


def links(results: Results | str | Path) -> pd.DataFrame:
    """Latency and bandwidth of every operation of the sweeps: one row a range of sizes.

    Columns: suite_id, setting, group (node, across, all, or an axis of the layout), kind, dtype, group_size, num_nodes,
    backend; from_bytes, to_bytes (payloads measured at the ends of the range); alpha_s and beta_s_per_byte, so that an
    operation of payload S takes alpha_s + beta_s_per_byte · S seconds, with their standard errors;
    bus_bandwidth_bytes_per_s (bus factor ÷ beta; null where the time does not grow) and its relative standard
    error; fit_error (relative, root mean square); num_rounds. Derived in docs/metrics.md.

    Args:
        results: loaded with `of="collectives"`, or where to load them from.

    Raises:
        StoreError: there are none.
    """
    frame = _frame(results)
    measured = frame[frame.time_ns.notna()]
    rows: list[dict[str, Any]] = []
    for key, case in measured.groupby(CASE, observed=True, sort=False):
        facts = {name: case[name].iloc[0] for name in ("group_size", "num_nodes", "backend")}
        factor = bus_factor(str(case["kind"].iloc[0]), int(facts["group_size"]))
        for line in fit(case.payload_bytes.tolist(), (case.time_ns.astype(float) / 1e9).tolist()):
            beta = line.beta_s_per_byte
            rows.append(
                {
                    **dict(zip(CASE, key, strict=True)),
                    **facts,
                    **vars(line),
                    "bus_bandwidth_bytes_per_s": factor / beta if beta > 0 else None,
                    "bus_bandwidth_error": line.beta_error_s_per_byte / beta if beta > 0 else None,
                    "num_rounds": case["round"].nunique(),
                }
            )
    return _numeric(pd.DataFrame(rows, columns=LINK_COLUMNS), ["bus_bandwidth_bytes_per_s", "bus_bandwidth_error"])


def sizes(results: Results | str | Path) -> pd.DataFrame:
    """What the sweeps measured: one row a case and size, in the order of the sweep, medians over rounds.

    Columns: those of a case (suite_id, setting, group, kind, dtype, and its group's), payload_bytes (null where nothing
    was measured), status, reason, num_rounds, num_wrong (sum), `MEDIANS`, and speedup: the first setting's time ÷
    this one's in the same round, median over rounds; null for a sweep of one setting.

    Raises:
        StoreError: there are none.
    """
    frame = _paired(_frame(results))
    by_size = [*CASE, "payload_bytes"]
    rows = [_size_row(dict(zip(by_size, key, strict=True)), rounds) for key, rounds in _groups(frame, by_size)]
    columns = [*by_size, *FACTS, "status", "reason", "num_rounds", "num_wrong", *MEDIANS, "speedup"]
    return _numeric(pd.DataFrame(rows, columns=columns), ["link_bytes_per_s", *MEDIANS, "speedup"])


def operations(measured: pd.DataFrame, fitted: pd.DataFrame) -> pd.DataFrame:
    """One row an operation of `sizes`, with its fit among `links`: latency, bandwidth, and what went wrong.

    Columns: those of a case and its group; status, reason (of the first size that should have a time and has none);
    num_wrong (sum); those of `fit_of`; best_bus_bandwidth_bytes_per_s, best_payload_bytes and best_fraction_of_link of
    the size whose median bus bandwidth is the largest.
    """
    lines = dict(list(fitted.groupby(CASE, sort=False)))
    rows = []
    for key, part in measured.groupby(CASE, sort=False):
        bad = unmeasured(part)
        best = part.nlargest(1, "bus_bandwidth_bytes_per_s")
        rows.append(
            {
                **dict(zip(CASE, key, strict=True)),
                **{name: _first(part[name]) for name in FACTS},
                "status": bad.status.iloc[0] if len(bad) else "ok",
                "reason": bad.reason.iloc[0] if len(bad) else None,
                "num_wrong": int(part.num_wrong.sum()),
                **fit_of(lines.get(key, fitted[:0])),
                **{f"best_{name}": _first(best[name]) for name in BEST},
            }
        )
    columns = [*CASE, *FACTS, "status", "reason", "num_wrong", *FIT, *(f"best_{name}" for name in BEST)]
    numbers = ["link_bytes_per_s", *FIT, *(f"best_{name}" for name in BEST)]
    return _numeric(pd.DataFrame(rows, columns=columns), numbers)


def fit_of(lines: pd.DataFrame) -> dict[str, float | None]:
    """An operation's ranges in one: latency of the smallest sizes, bandwidth of the largest, the worst error."""
    if lines.empty:
        return dict.fromkeys(FIT)
    first, last = lines.iloc[0], lines.iloc[-1]
    values = (first.alpha_s, last.bus_bandwidth_bytes_per_s, last.bus_bandwidth_error, lines.fit_error.max())
    return dict(zip(FIT, values, strict=True))


def unmeasured(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows without a time that should have one: not the sizes that the budget left out."""
    return measured[(measured.status != "ok") & ((measured.status != "skipped") | measured.payload_bytes.isna())]


def _size_row(key: dict[str, Any], rounds: pd.DataFrame) -> dict[str, Any]:
    bad = rounds[rounds.status != "ok"]
    wrong = rounds[~rounds.status.isin(("ok", "skipped"))]
    shown = wrong if len(wrong) else bad if len(bad) == len(rounds) else bad[:0]
    good = rounds[rounds.status == "ok"]
    return {
        **key,
        **{name: _first(rounds[name]) for name in FACTS},
        "status": shown.status.iloc[0] if len(shown) else "ok",
        "reason": shown.reason.iloc[0] if len(shown) else None,
        "num_rounds": len(good),
        "num_wrong": int(rounds.num_wrong.fillna(0).sum()),
        **{name: _median(good[name]) for name in (*MEDIANS, "speedup")},
    }


def _paired(frame: pd.DataFrame) -> pd.DataFrame:
    """With `speedup`, of each row against the first setting of its suite in the same round."""
    place = ["suite_id", "group", "kind", "dtype", "payload_bytes", "round"]
    first = frame.groupby("suite_id", observed=True).setting.transform("first") == frame.setting
    alone = frame.groupby("suite_id", observed=True).setting.transform("nunique") == 1
    base = frame[first].drop_duplicates(place)[[*place, "time_ns"]].rename(columns={"time_ns": "base_ns"})
    joined = frame.merge(base, on=place, how="left")
    speedup = joined.base_ns.astype("float64") / joined.time_ns.astype("float64")
    return joined.assign(speedup=speedup.mask(alone.to_numpy()))


def _frame(results: Results | str | Path) -> pd.DataFrame:
    """The rows, in the order in which they were measured, with texts as plain values."""
    if isinstance(results, str | Path):
        from raybench.results.reader import load

        results = load(results, of="collectives")
    frame = results.collectives
    texts = [name for name in frame.columns if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    frame = frame.astype(dict.fromkeys(texts, "object"))
    return frame.sort_values(["suite_id", "started_at", "payload_bytes"], kind="stable").reset_index(drop=True)


def _groups(frame: pd.DataFrame, by: list[str]) -> Iterable[tuple[Any, pd.DataFrame]]:
    """Groups in the order of their cases' first rows, sizes ascending within a case."""
    ranked = frame.assign(case_rank=frame.groupby(CASE, observed=True, sort=False).ngroup())
    ordered = ranked.sort_values(["case_rank", "payload_bytes"], kind="stable").drop(columns="case_rank")
    return ordered.groupby(by, observed=True, sort=False, dropna=False)


def _numeric(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Columns that may hold nothing but nulls, as numbers all the same."""
    return frame.astype(dict.fromkeys(columns, "float64"))


def _median(values: pd.Series) -> float | None:
    known = values.dropna()
    return None if known.empty else float(known.astype("float64").median())


def _first(values: pd.Series) -> Any:
    known = values.dropna()
    return None if known.empty else known.iloc[0]
