"""The words under a track's winner: where the others' time went, who came late, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from raybench.analysis.comparison import Ranking
from raybench.analysis.split import PARTS
from raybench.report.text import known, milliseconds, number, percent, plain

NAMES = {
    "compute": "forward and backward",
    "communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "optimizer": "the optimizer",
    "other": "the rest",
}
WORTH_SAYING = 0.005
"""Share of the step from which on a difference is mentioned."""
OFTEN, LATE = 0.7, 0.02
"""A rank is a straggler that is last in more than this share of operations and later than this share of a step."""


def explain(cases: pd.DataFrame, ranking: Ranking, late: pd.DataFrame) -> tuple[str, ...]:
    """Sentences about one track's timed cases."""
    records = [{str(name): value for name, value in row.items()} for row in cases.to_dict("records")]
    rows = {row["case"]: row for row in records}
    ranked = [rows[case] for case in ranking.cases]
    best, others = ranked[0], ranked[1:]
    return (*_own(best), *_others(best, others), *_stragglers(ranked, late), *_cost(best, others))


def _own(best: dict[str, Any]) -> Iterator[str]:
    parts = {part: best[f"{part}_s"] / best["step_time_s"] for part in PARTS if known(best[f"{part}_s"])}
    if parts and known(best["compute_s"]):
        told = [f"{percent(share)} in {NAMES[part]}" for part, share in parts.items()]
        yield f"{plain(best['case'])} spends {', '.join(told[:-1])} and {told[-1]}."


def _others(best: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[str]:
    """Of each slower case, the two parts of the step that it spends most more on, for as many tokens."""
    for row in others:
        share = best["tokens_per_step"] / row["tokens_per_step"] if known(row["tokens_per_step"]) else 1.0
        more = share * row["step_time_s"] - best["step_time_s"]
        if not more > WORTH_SAYING * best["step_time_s"]:
            continue
        parts = {part: share * row[f"{part}_s"] - best[f"{part}_s"] for part in PARTS}
        largest = sorted((part for part in parts if known(parts[part])), key=lambda part: -parts[part])
        told = [
            f"{milliseconds(parts[part])} ms in {NAMES[part]}"
            for part in largest[:2]
            if parts[part] > WORTH_SAYING * best["step_time_s"]
        ]
        where = f": {' and '.join(told)}" if told else ""
        every = "a step" if share == 1 else f"for the tokens of a step of {plain(best['case'])}"
        yield f"{plain(row['case'])} takes {milliseconds(more)} ms more {every}{where}."


def _stragglers(rows: list[dict[str, Any]], late: pd.DataFrame) -> Iterator[str]:
    """Ranks that keep the others waiting, each with the cases in which it does."""
    found: dict[int, list[str]] = {}
    for row in rows:
        for rank in late[late.case == row["case"]].itertuples(index=False):
            if rank.last_share > OFTEN and rank.lateness_s > LATE * row["step_time_s"]:
                found.setdefault(int(rank.rank), []).append(
                    f"{milliseconds(rank.lateness_s)} ms a step in {plain(row['case'])}"
                )
    for number_of_rank, cases in sorted(found.items()):
        yield f"Rank {number_of_rank} comes last to most operations and keeps the others waiting: {', '.join(cases)}."


def _cost(best: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[str]:
    if not known(best["usd_per_million_tokens"]):
        return
    worst = max((row["usd_per_million_tokens"] for row in others), default=None)
    more = f"; the dearest case takes {number(worst)}" if worst is not None else ""
    yield f"A million tokens cost {number(best['usd_per_million_tokens'])} USD with {plain(best['case'])}{more}."
