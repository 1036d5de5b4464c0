"""What a report says, before it is laid out: one section a track, and where everything was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.comparison import Ranking, Ratio, rank_cases, rates, scaling
from raybench.analysis.curves import warnings_of
from raybench.analysis.efficiency import cost_per_million_tokens
from raybench.analysis.metrics import summary
from raybench.analysis.statistics import Estimate
from raybench.report.details import Details, gather
from raybench.report.explain import explain
from raybench.report.reference import Published, published
from raybench.report.text import count, interval, known, number, percent, plain, size, words

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
        """Case, status and reason of what has no measurement."""
        return [
            (plain(row.case), words(row.status), plain(row.reason) if known(row.reason) else "no reason was recorded")
            for row in self.rows
            if row.status != "ok"
        ]


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    sections: tuple[Section, ...]
    facts: Mapping[str, str]
    """Hardware, scale and versions, each in a few words."""
    warnings: tuple[str, ...] = field(default=())
    """What a reader has to know before trusting a number."""


def build(results: Results, *, price: float | None = None, references: Results | None = None) -> Report:
    """The report of the newest suite of every track in `results`.

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
    warnings = [*_warnings(newest), *(f"Left out: {plain(problem)}" for problem in results.problems)]
    if older := len(results.suite_ids) - len(newest.suite_ids):
        warnings.append(f"{count(older, 'older suite')} in {results.folder} not shown (name one: FOLDER@SUITE_ID)")
    return Report(tuple(sections), _facts(newest) | _peaks(whole), tuple(warnings))


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


def _basis(cases: pd.DataFrame) -> str:
    device, backend, precision, scale = (_all(cases[n]) for n in ("device", "backend", "precision", "scale"))
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
    return (_winner(cases, ranking), *map(_scaled, scaling(cases, speeds)))


def _winner(cases: pd.DataFrame, ranking: Ranking) -> str:
    best = plain(ranking.cases[0])
    row = cases[cases.case == ranking.cases[0]].iloc[0]
    rate = Estimate(row.tokens_per_s, _known(row.tokens_per_s_low), _known(row.tokens_per_s_high), int(row.rounds))
    speed = f"{number(rate.value, 4)} tokens/s{_between(rate, '95 % interval ')}"
    if ranking.over_second is None:
        return f"{best} alone was timed: {speed}."
    second = ranking.over_second
    if second.estimate.low is None:
        sentence = f"{best} was fastest in the only round, which gives no interval, {speed}: {_times(second)}"
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


def _facts(results: Results) -> dict[str, str]:
    runs = results.runs
    environments = [_environment(text) for text in runs.environment.dropna().unique()]
    nodes = {str(n.get("address")): n for e in environments for n in e.get("nodes", []) if isinstance(n, dict)}
    device = _all(runs.device)
    if memory := _all(runs.device_memory_bytes, size):
        device += f" of {memory}"
    facts = {
        "Device": device,
        "Nodes": ", ".join(_node(node) for node in nodes.values()),
        "Backend": _all(runs.backend),
        "Launcher": ", ".join(sorted({plain(e["launcher"]) for e in environments if "launcher" in e})),
        "Scale": _all(runs.scale),
        "Measured": _period(runs.started_at.dropna()),
        "raybench": _version(runs),
        "torch": _all(runs.torch_version),
        "Ray": _all(runs.ray_version),
        "NCCL": _all(runs.nccl_version),
        "Python": _all(runs.python_version),
        "Suites": ", ".join(results.suite_ids),
        "Results": plain(results.folder),
    }
    return {name: value for name, value in facts.items() if value}


def _peaks(cases: pd.DataFrame) -> dict[str, str]:
    """What MFU is a share of, and where that was read."""
    pairs = cases[["peak_flops_per_s", "peak_source"]].dropna().drop_duplicates()
    told = [f"{number(speed / 1e12)} TFLOP/s a GPU ({plain(source)})" for speed, source in pairs.to_numpy()]
    return {"Peak": ", ".join(told)} if told else {}


def _node(node: Mapping[str, Any]) -> str:
    parts = [f"{node['num_cpus']:g} CPUs"] if isinstance(node.get("num_cpus"), int | float) else []
    parts += [size(node["memory_bytes"])] if isinstance(node.get("memory_bytes"), int) else []
    gpus = node.get("gpus") or []
    parts += [f"{gpus.count(gpu)} × {plain(gpu)}" for gpu in sorted(set(gpus))]
    return f"{plain(node.get('host') or node.get('address'))} ({', '.join(parts)})"


def _version(runs: pd.DataFrame) -> str:
    version = _all(runs.raybench_version)
    if commit := _all(runs.git_commit, lambda text: str(text)[:10]):
        version += f", commit {commit}"
    return f"{version}, with uncommitted changes" if runs.git_dirty.fillna(False).any() else version


def _period(times: Any) -> str:
    if times.empty:
        return ""
    first, last = (f"{t:%Y-%m-%d %H:%M}" for t in (times.min(), times.max()))
    return f"{first} UTC" if first == last else f"{first} – {last[11:] if first[:10] == last[:10] else last} UTC"


def _warnings(results: Results) -> list[str]:
    runs = results.runs
    found = []
    environments = [_environment(text) for text in runs.environment.dropna().unique()]
    if any(e.get("ranks_share_cores") for e in environments):
        found.append("Ranks shared CPU cores: times say little about computing, more about waiting and the network.")
    if (runs.scale == "smoke").any():
        found.append("Scale smoke: small models, to show that everything works; conclusions need scale full.")
    if (runs.gate_scope == "reduced").any():
        found.append("Some gates ran with fewer layers, since the control did not fit the device.")
    return found + warnings_of(results)


def _environment(text: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _one(values: Any) -> Any:
    kept = values.dropna()
    return kept.iloc[0] if len(kept) else None


def _all(values: Any, show: Any = plain) -> str:
    """Every different value, in the order in which they come."""
    seen: Sequence[Any] = list(dict.fromkeys(values.dropna()))
    return ", ".join(str(show(value)) for value in seen)
