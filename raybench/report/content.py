"""What a report says, before it is laid out: one section a track, and where everything was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.comparison import Ranking, Ratio, rank_cases, rates, scaling
from raybench.analysis.efficiency import cost_per_million_tokens
from raybench.analysis.metrics import summary
from raybench.analysis.statistics import Estimate
from raybench.report.collectives import Sweep, sweeps
from raybench.report.details import Details, gather
from raybench.report.explain import explain
from raybench.report.facts import cautions, every, facts_of, peaks_of
from raybench.report.reference import Published, published
from raybench.report.text import has_numbers, interval, known, number, percent, plain, whole, words
from raybench.wording import count

if TYPE_CHECKING:
    from raybench.results.reader import Results

WIDEST = 4
"""Largest quotient of an interval's ends that a sentence still mentions."""


@dataclass(frozen=True)
class Section:
    """One track: its question, its cases, and the answer in words."""

    track: str
    title: str
    question: str | None
    suite_id: str
    workload: str
    """What was trained, and how long it was measured."""
    basis: str
    """Hardware, scale and gate in a line: what every figure rests on."""
    answer: tuple[str, ...]
    """What won, by how much."""
    explanation: tuple[str, ...]
    """Where the others' time went."""
    cases: pd.DataFrame
    """Rows of `summary`, and `usd_per_million_tokens`."""
    details: Details
    published: tuple[Published, ...]
    """Of other works, where they were asked for."""

    @property
    def rows(self) -> list[Any]:
        """The cases one by one, their columns as attributes."""
        return list(self.cases.itertuples(index=False))

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """Case, status and reason of what has no measurement, or not all of its rounds."""
        return [(plain(row.case), words(row.status), _reason(row)) for row in self.rows if row.status != "ok"]


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    sections: tuple[Section, ...]
    facts: Mapping[str, str]
    """Hardware, scale and versions, each in a few words."""
    warnings: tuple[str, ...] = field(default=())
    """What a reader has to know before trusting a number."""
    sweeps: tuple[Sweep, ...] = ()
    """Of collectives, where there are any."""


def build(results: Results, *, price: float | None = None, references: Results | None = None) -> Report:
    """The report of the newest suite of every track in `results`, and of the newest sweeps.

    Args:
        price: of one rank, which is one GPU, for an hour, in USD.
        references: published measurements to be shown beside them.
    """
    newest = results.latest()
    whole = summary(newest)
    costs = [
        cost_per_million_tokens(num_ranks, speed, price)
        for num_ranks, speed in zip(whole.num_ranks, whole.tokens_per_s, strict=True)
    ]
    whole = whole.assign(usd_per_million_tokens=pd.Series(costs, dtype="float64"))
    details = gather(newest)
    shown = () if references is None else published(references)
    sections = [
        _section(newest, cases.reset_index(drop=True), details, shown)
        for _, cases in whole.groupby(["track"], sort=True, observed=True)
    ]
    measured = sweeps(results)
    suite_ids = sorted({*newest.suite_ids, *(sweep.suite_id for sweep in measured)})
    swept = results.collectives[results.collectives.suite_id.isin(suite_ids)]
    rows = pd.concat([newest.runs, swept.astype("object")]) if len(swept) else newest.runs
    warnings = [*cautions(newest, rows), *(f"Left out: {plain(problem)}" for problem in results.problems)]
    if older := len(results.suite_ids) - len(suite_ids):
        warnings.append(f"{count(older, 'older suite')} in {results.folder} not shown (name one: FOLDER@SUITE_ID)")
    facts = facts_of(rows, suite_ids, results.folder) | peaks_of(whole)
    return Report(tuple(sections), facts, tuple(warnings), measured)


def _section(results: Results, cases: pd.DataFrame, details: Details, shown: Sequence[Published]) -> Section:
    track, suite_id = str(cases.track.iloc[0]), str(cases.suite_id.iloc[0])
    asked = results.asked(suite_id, track)
    runs = results.runs[(results.runs.track == track) & (results.runs.suite_id == suite_id)]
    speeds = rates(runs)
    own = details.of(suite_id, track)
    ranking = rank_cases(cases, speeds)
    return Section(
        track=track,
        title=plain(asked.get("title") or track),
        question=plain(asked["question"]) if asked.get("question") else None,
        suite_id=suite_id,
        workload=_workload(runs),
        basis=_basis(cases),
        answer=_answer(cases, speeds, ranking),
        explanation=() if ranking is None else explain(cases, ranking, own.late),
        cases=cases,
        details=own,
        published=tuple(row for row in shown if row.track[:2] == track[:2]),
    )


def _reason(row: Any) -> str:
    reason = plain(row.reason) if known(row.reason) else "no reason was recorded"
    return f"{reason} after {count(row.rounds, 'round')}" if has_numbers(row) else reason


def _basis(cases: pd.DataFrame) -> str:
    device, backend, precision, scale = (every(cases[n]) for n in ("device", "backend", "precision", "scale"))
    sizes = cases[cases.num_ranks.notna()]
    ranks = _range(sizes.num_ranks, "rank")
    nodes = f" on {_range(sizes.num_nodes, 'node')}" if sizes.num_nodes.notna().any() else ""
    passed = int((cases.gate == "passed").sum())
    gate = f"gate passed by {passed} of {count(len(cases), 'case')}"
    parts = [f"{ranks}{nodes}", device, backend, precision, f"scale {scale}" if scale else "", gate]
    return ", ".join(part for part in parts if part)


def _range(values: Any, noun: str) -> str:
    if not (known_values := values.dropna()).size:
        return ""
    low, high = int(known_values.min()), int(known_values.max())
    return count(low, noun) if low == high else f"{low}–{high} {noun}s"


def _workload(runs: pd.DataFrame) -> str:
    """In one line, from the first row that knows."""
    row = {name: _one(runs[name]) for name in runs.columns}
    parts = [plain(row["model"] or "model unknown")]
    if row["num_parameters"] is not None:
        parts.append(f"{number(row['num_parameters'] / 1e6)}M parameters")
    parts += [f"{plain(row['weights'])} weights"] if row["weights"] is not None else []
    parts += [f"data {plain(row['data'])}"] if row["data"] is not None else []
    if row["sequence_length"] is not None:
        parts.append(f"sequence {row['sequence_length']}")
    if row["micro_batch_size"] is not None:
        parts.append(_batch(runs, row["micro_batch_size"], row["num_micro_batches"]))
    parts += [plain(row[name]) for name in ("precision", "optimizer") if row[name] is not None]
    parts += ["TF32"] if row["tf32"] else []
    parts += ["recomputation"] if row["recompute"] not in (None, "none") else []
    parts += ["compiled"] if row["compiled"] else []
    if row["num_steps"] is not None:
        parts.append(f"windows of {row['num_steps']} steps after {row['num_warmup_steps']} of warm-up")
    return ", ".join(parts)


def _batch(runs: pd.DataFrame, first: int, number_a_step: int) -> str:
    if not runs.micro_batch.eq("largest").any():
        return f"micro-batch {first} × {number_a_step} a data rank"
    low, high = int(runs.micro_batch_size.min()), int(runs.micro_batch_size.max())
    sizes = f"{low}" if low == high else f"{low} to {high}"
    return f"each case with the largest micro-batch that fits, {sizes} × {number_a_step} a data rank"


def _answer(cases: pd.DataFrame, speeds: pd.DataFrame, ranking: Ranking | None) -> tuple[str, ...]:
    if ranking is None:
        passed = int(((cases.status == "ok") & (cases.gate == "passed")).sum())
        verified = f" {count(passed, 'case')} passed the gate." if passed else ""
        return (f"No case was timed.{verified}",)
    return (_winner(cases, ranking), *_elsewhere(cases, ranking), *map(_scaled, scaling(cases, speeds)))


def _elsewhere(cases: pd.DataFrame, ranking: Ranking) -> Iterator[str]:
    """Who was measured across another network than the winner."""
    ranked = cases[cases.case == ranking.cases[0]].num_nodes.iloc[0]
    for _, apart in cases[cases.case.isin(ranking.elsewhere)].groupby("num_nodes"):
        where, names = count(int(apart.num_nodes.iloc[0]), "node"), ", ".join(map(plain, apart.case))
        yield f"Measured on {where}, not on {whole(ranked)}, and so not ranked: {names}."


def _winner(cases: pd.DataFrame, ranking: Ranking) -> str:
    best = plain(ranking.cases[0])
    row = cases[cases.case == ranking.cases[0]].iloc[0]
    rate = Estimate(row.tokens_per_s, _known(row.tokens_per_s_low), _known(row.tokens_per_s_high), int(row.rounds))
    speed = f"{number(rate.value, 4)} tokens/s{_between(rate, '95 % interval ')}"
    if ranking.over_second is None:
        where = f" on {count(int(row.num_nodes), 'node')}" if ranking.elsewhere and known(row.num_nodes) else ""
        return f"{best} alone was timed{where}: {speed}."
    second = ranking.over_second
    if second.estimate.low is None:
        only = "the only round" + (f" that {plain(second.other)} has too" if rate.num_rounds > 1 else "")
        sentence = f"{best} was fastest in {only}, which gives no interval, {speed}: {_times(second)}"
    elif second.is_clear:
        sentence = f"{best} was fastest, {speed}: {_times(second)}"
    else:
        sentence = f"{best} and {plain(second.other)} are the same within noise: {_times(second)}, {best} at {speed}"
    more = [_times(r) for r in (ranking.over_peer, ranking.over_slowest) if r is not None]
    return f"{'; '.join([sentence, *more])}."


def _times(ratio: Ratio) -> str:
    return f"{number(ratio.estimate.value, 4)} × {plain(ratio.other)}{_between(ratio.estimate)}"


def _between(estimate: Estimate, name: str = "") -> str:
    """An interval in brackets, or that it says nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    if estimate.high > WIDEST * estimate.low:
        return f" (no useful interval from {count(estimate.num_rounds, 'round')})"
    return f" ({name}{interval(estimate.low, estimate.high, 4)})"


def _known(value: Any) -> float | None:
    return float(value) if known(value) else None


def _scaled(ratio: Ratio) -> str:
    estimate = ratio.estimate
    between = ""
    if estimate.low is not None:
        between = f" ({percent(estimate.low)} – {percent(estimate.high)})"
    speed = f"{percent(estimate.value)}{between} of the speed of a rank of {plain(ratio.other)}"
    return f"A rank of {plain(ratio.case)} keeps {speed}."


def _one(values: Any) -> Any:
    kept = values.dropna()
    return kept.iloc[0] if len(kept) else None
