"""A launcher and a sink that play a job by a script, without any process, and a store in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raybench.results.folder import StoreError
from raybench.suite.cluster import Cluster, Gpu, Node
from raybench.suite.job import Job
from raybench.suite.job_run import Patience
from raybench.suite.placement import Placement
from raybench.suite.track import ResolvedTrack
from raybench.worker.messages import (
    CaseRefused,
    Farewell,
    Hello,
    Message,
    RankFailed,
    RankLost,
    RoundBegun,
    RoundRows,
)

QUICK = Patience(
    start_s=0.3, between_s=0.3, margin_s=-0.7, culprit_s=0.3, others_s=0.05, stop_s=0.2, drain_s=0.05, end_s=0.3
)
"""With a round's time-out of one second, the least that a track allows."""
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.58.0", "raybench": "0.1.0"}


def node(
    name: str = "10.0.0.1",
    *,
    cpus: int = 2,
    free_cpus: float | None = None,
    gpus: int = 0,
    free_gpus: int | None = None,
) -> Node:
    return Node(
        address=name,
        node_id=f"id-{name}",
        host=f"host-{name}",
        cpu_model="EPYC",
        num_cpus=cpus,
        memory_bytes=2**34,
        gpus=tuple(Gpu("A10", 24 * 2**30) for _ in range(gpus)),
        interface="eth0",
        versions=VERSIONS,
        free_cpus=cpus if free_cpus is None else free_cpus,
        total_cpus=cpus,
        free_gpus=gpus if free_gpus is None else free_gpus,
        total_gpus=gpus,
    )


def cluster(*nodes: Node) -> Cluster:
    return Cluster(nodes or (node(),))


def make_track(
    cases: Mapping[str, Mapping[str, Any]], *, name: str = "t", scale: str = "smoke", **measure: Any
) -> ResolvedTrack:
    """A small track with cases by name, each given by its layout; all are bucketed."""
    return ResolvedTrack.model_validate(
        {
            "track": name,
            "title": "Title",
            "question": "Question?",
            "scale": scale,
            "workload": {"model": {"num_layers": 1, "width": 8, "num_heads": 2, "ffn_width": 8, "vocabulary_size": 16}},
            "measure": {"num_rounds": 3, "num_steps": 2, "timeout_s": 1, **measure},
            "cases": [
                {"name": case, "layout": layout, "strategy": {"data": "bucketed"}} for case, layout in cases.items()
            ],
        }
    )


THREE = {"one": {"data": 2}, "two": {"data": 2}, "three": {"data": 2}}


class MemoryStore:
    """Keeps rows as they are handed over; can be told to fail."""

    def __init__(self, *, fail_after: int | None = None) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.hangs: dict[str, Mapping[str, str]] = {}
        self.fail_after = fail_after

    def write_round(
        self, track: str, case: str, attempt: int, round: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        if self.fail_after is not None and len(self.rounds) >= self.fail_after:
            raise StoreError("results r: cannot be written (No space left on device)")
        self.rounds.append({"track": track, "case": case, "attempt": attempt, "round": round, **tables})

    def write_hang(self, track: str, case: str, round: int, attempt: int, files: Mapping[str, str]) -> str:
        place = f"hangs/{track}/{case}/{attempt}-{round}"
        self.hangs[place] = files
        return place

    def runs(self, case: str | None = None) -> list[dict[str, Any]]:
        return [row for r in self.rounds for row in r["runs"] if case in (None, r["case"])]

    def statuses(self, case: str) -> list[str]:
        return [row["status"] for row in self.runs(case)]


@dataclass
class World:
    """Plays jobs. `parts` says what happens in a round, by case and number; where it says nothing, all goes well."""

    parts: dict[tuple[str, int], str] = field(default_factory=dict)
    before: str = ""
    """What happens before the first round."""
    budget_rounds: int | None = None
    """How many rounds a job does before it ends as if the budget were used up."""
    jobs: list[Job] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    """For every job whether `stop` was called."""
    orders: list[str] = field(default_factory=list)
    """Reasons given to `stop_ranks`."""
    messages: deque[Message | BaseException] = field(default_factory=deque)
    end: str | None = ""

    def make_sink(self) -> World:
        self.messages.clear()
        return self

    address = ("127.0.0.1", 4711)
    key = "00"

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def get(self, timeout: float) -> Message | None:
        if not self.messages:
            time.sleep(min(timeout, 0.01))
            return None
        message = self.messages.popleft()
        if isinstance(message, BaseException):
            raise message
        return message

    def stop_ranks(self, reason: str) -> None:
        self.orders.append(reason)
        for rank in range(self.jobs[-1].world_size):
            self.messages.append(self._failed(rank, ("", 0), culprit=False, reason=reason))

    def last_operations(self) -> dict[int, str]:
        return dict.fromkeys(range(self.jobs[-1].world_size), "heard")

    def start(self, job: Job, placement: Placement) -> World:
        self.jobs.append(job)
        self.placements.append(placement)
        self.stopped.append(False)
        self.end = ""
        if self.before == "cannot start":
            raise RuntimeError("no such thing\nas a worker")
        self.messages.extend(self._play(job))
        return self

    def poll(self) -> str | None:
        return None if self.messages else self.end

    def wait(self, timeout: float) -> str | None:
        return self.poll()

    def stop(self) -> None:
        self.stopped[-1] = True
        self.end = ""

    def _play(self, job: Job) -> list[Message | BaseException]:
        if self.before == "nobody comes":
            self.end = None
            return []
        if self.before == "no resources":
            self.end = "the cluster is full"
            return []
        script: list[Message | BaseException] = [
            Hello(rank, f"10.0.0.{1 + rank // 2}", rank % 2, 100 + rank) for rank in range(job.world_size)
        ]
        if self.before == "dies at once":
            return [*script, RankLost(1, "starting")]
        refused: set[str] = set()
        for count, key in enumerate(job.rounds):
            if key.case in refused:
                continue
            if count == self.budget_rounds:
                break
            ranks = self.num_ranks(job, key.case)
            place = (key.case, key.round)
            begun = [RoundBegun(rank, key.case, key.round, ranks) for rank in range(ranks)]
            match self.parts.get(place, "ok"):
                case "ok":
                    script += [*begun, *(self._rows(rank, key.case, key.round, ranks) for rank in range(ranks))]
                    continue
                case "refuse":
                    script += [*begun, CaseRefused(*place, "failed", "gate failed: x", {"gate": "failed"})]
                    refused.add(key.case)
                    continue
                case "die":
                    script += [
                        *begun,
                        self._failed(0, place, culprit=False, reason="closed by peer"),
                        RankLost(1, "all-reduce"),
                    ]
                case "oom":
                    script += [*begun, self._failed(1, place, reason="no memory", status="out_of_memory")]
                case "late":
                    script += [*begun, *(self._failed(r, place, reason="late", status="timeout") for r in range(ranks))]
                case "hang":
                    script += begun
                    self.end = None
                case "lost after":
                    script += [*begun, *(self._rows(rank, key.case, key.round, ranks) for rank in range(ranks))]
                    script += [RankLost(0, "waiting")]
                case "lost beside":
                    self.parts.pop(place)
                    script += [*begun, RankLost(job.world_size - 1, "waiting to hear")]
                case "quit":
                    script += begun
                    self.end = "the controller died"
                case "interrupt":
                    script += [*begun, KeyboardInterrupt()]
                    self.end = None
            return script
        return [*script, *(Farewell(rank) for rank in range(job.world_size))]

    def num_ranks(self, job: Job, case: str) -> int:
        """Ranks that take part in a case."""
        return job.track.case(case).layout.num_ranks

    def _rows(self, rank: int, case: str, round: int, num_ranks: int) -> RoundRows:
        run = {"gate": "passed", "gate_scope": "full", "gate_worst_error": 1e-7, "window_ns": 10**9, "tokens": 500}
        if self.jobs[-1].track.micro_batch == "largest":
            run |= {"micro_batch_size": 24, "tokens_per_step": 6144, "workload_hash": "largest"}
        return RoundRows(
            rank,
            case,
            round,
            num_ranks,
            ranks={"parameter_bytes": 8},
            run={**run, "environment": '{"threads": 1}'} if rank == 0 else None,
            steps=[{"step": 0, "begin_ns": 1, "duration_ns": 2}],
            evaluations=[{"step": 1, "loss": 2.5, "accuracy": 0.25, "num_samples": 64}] if rank == 0 else [],
        )

    def _failed(
        self, rank: int, place: tuple[str, int], *, reason: str, status: Any = "crashed", culprit: bool = True
    ) -> RankFailed:
        return RankFailed(
            rank, place[0] or None, place[1] or None, status, reason, "all-reduce", f"stack {rank}", culprit
        )
