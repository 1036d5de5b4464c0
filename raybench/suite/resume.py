"""What a suite already has, so that only the rest is run; refused where the rest would not be comparable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raybench.errors import RequestError
from raybench.results.schema import Status
from raybench.suite.cluster import Cluster
from raybench.suite.rows import BATCH_COLUMNS, this_code

if TYPE_CHECKING:
    import pandas as pd

    from raybench.suite.track_run import TrackRun

VERSIONED = ("torch", "ray", "python", "raybench")


@dataclass(frozen=True)
class Recorded:
    """The rounds of one suite so far."""

    suite_id: str
    rounds: Mapping[tuple[str, str], dict[int, tuple[Status, str | None]]] = field(default_factory=dict)
    """Status and reason of each round by track and case."""
    gates: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Gate columns of the cases that passed it."""
    batches: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """With `micro_batch: largest`, the columns that tell what was found, by track and case."""
    last_attempts: Mapping[str, int] = field(default_factory=dict)
    num_nodes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Nodes that each case's rounds were on, by track and case."""

    def num_left(self, track: str, case: str, num_rounds: int) -> int:
        """Rounds of a case that are still to be run; none of one that did not end well."""
        statuses = [status for status, _ in self.rounds.get((track, case), {}).values()]
        return 0 if self.bad_end(track, case) else num_rounds - statuses.count("ok")

    def bad_end(self, track: str, case: str) -> Status | None:
        """How a case ended that is not tried again."""
        statuses = (status for status, _ in self.rounds.get((track, case), {}).values())
        return next((status for status in statuses if status not in ("ok", "skipped")), None)

    def restore(self, run: TrackRun) -> None:
        """Put a track where the suite left it: what was measured is done, what failed is not tried again."""
        run.attempt = self.last_attempts.get(run.name, 0)
        for name, state in run.states.items():
            state.gate = self.gates.get((run.name, name))
            state.batch = self.batches.get((run.name, name), {})
            state.num_nodes = self.num_nodes.get((run.name, name))
            for number, (status, reason) in self.rounds.get((run.name, name), {}).items():
                if status == "ok":
                    state.done.add(number)
                elif status != "skipped":
                    state.status, state.reason = status, reason


def find_suite(results: str, suite_id: str, request: Mapping[str, Any]) -> str | None:
    """The suite to go on with: `suite_id`, or where that is empty the newest of the same request, or None.

    Raises:
        RequestError: the suite named is not there, or was asked for something else.
    """
    from raybench.results.folder import shown
    from raybench.results.store import newest_suite, request_hash, suites

    if not suite_id:
        newest = newest_suite(results, request)
        return None if newest is None else newest.suite_id
    found = {suite.suite_id: suite for suite in suites(results)}
    if suite_id not in found:
        raise RequestError(
            f"--resume: there is no suite {suite_id!r} in {shown(results)} (it has {_some(list(found))})"
        )
    if found[suite_id].request_hash != request_hash(request):
        raise RequestError(
            f"--resume: suite {suite_id} was asked for something else (repeat its tracks and options, or leave the "
            "suite's name out)"
        )
    return suite_id


def why_none(results: str, request: Mapping[str, Any]) -> str:
    """That no suite is of this request, and what the newest one was asked for instead."""
    from raybench.results.folder import shown
    from raybench.results.store import suites

    told = f"--resume: {shown(results)} has no suite of this request"
    newest = max(suites(results), key=lambda suite: suite.suite_id, default=None)
    if newest is None or newest.request is None:
        return told
    then = newest.request
    differing = [key for key in request if then.get(key) != request[key]]
    words = {key: f"{key.replace('_', ' ')} {_value(then.get(key))}, not {_value(request[key])}" for key in differing}
    words["tracks"] = "other tracks, cases or options"
    return f"{told} (its newest, {newest.suite_id}, has {'; '.join(words[key] for key in differing)})"


def _value(value: Any) -> str:
    """A value of a request's record, as one says it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if not value else str(value)


def read_suite(results: str, suite_id: str, cluster: Cluster, *, force: bool) -> Recorded:
    """The suite's rounds so far.

    Raises:
        RequestError: other code, versions or hardware made them, and `force` is not given.
    """
    from raybench.results.store import load

    runs = load(results, suite_id).runs
    if not force and (changed := _changes(runs, cluster)):
        raise RequestError(
            f"--resume: suite {suite_id} was run by {'; '.join(changed)} (--force mixes them, without it start anew)"
        )
    rounds: dict[tuple[str, str], dict[int, tuple[Status, str | None]]] = {}
    gates: dict[tuple[str, str], dict[str, Any]] = {}
    batches: dict[tuple[str, str], dict[str, Any]] = {}
    attempts: dict[str, int] = {}
    num_nodes: dict[tuple[str, str], int] = {}
    for row in runs.to_dict("records"):
        place = (str(row["track"]), str(row["case"]))
        rounds.setdefault(place, {})[int(row["round"])] = (row["status"], _plain(row["reason"]))
        attempts[place[0]] = max(attempts.get(place[0], 0), int(row["attempt"]))
        if row["status"] == "ok":
            num_nodes[place] = int(row["num_nodes"])
        if row["gate"] == "passed":
            gates[place] = {
                key: _plain(row[key]) for key in ("gate", "gate_scope", "gate_worst_parameter", "gate_worst_error")
            }
        if row["micro_batch"] == "largest" and row["status"] == "ok":
            batches[place] = {column: _plain(row[column]) for column in BATCH_COLUMNS}
    return Recorded(suite_id, rounds, gates, batches, attempts, num_nodes)


def _changes(runs: pd.DataFrame, cluster: Cluster) -> list[str]:
    """What differs between the suite and this run, each in a few words."""
    changes = []
    environments = [json.loads(text) for text in runs["environment"].dropna()]
    sources = {e["source_hash"] for e in environments if "source_hash" in e}
    if sources - {this_code().source_hash}:
        changes.append(f"other code of raybench ({', '.join(sorted(sources))}, now {this_code().source_hash})")
    for package in VERSIONED:
        then = {str(v) for v in runs[f"{package}_version"].dropna()}
        if then - {cluster.versions[package]}:
            changes.append(f"{package} {', '.join(sorted(then))} (now {cluster.versions[package]})")
    here = {_hardware(n.cpu_model, [g.name for g in n.gpus]) for n in cluster.nodes}
    there = {_hardware(n["cpu_model"], n["gpus"]) for e in environments for n in e.get("nodes", [])}
    if there - here:
        changes.append(f"other hardware ({', '.join(sorted(there - here))}, now {', '.join(sorted(here))})")
    return changes


def _hardware(cpu_model: str, gpus: list[str]) -> str:
    return ", ".join([cpu_model, *(f"{gpus.count(name)} × {name}" for name in sorted(set(gpus)))])


def _plain(value: Any) -> Any:
    """A cell as plain Python; missing is None."""
    import pandas as pd

    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def _some(names: list[str]) -> str:
    return ", ".join(names[-5:]) or "none"
