"""What every rank of a job runs: round by round, case by case; it does not know which strategy it drives."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from raybench.errors import RequestError
from raybench.results.schema import Status
from raybench.suite.job import Job, RoundKey
from raybench.suite.ranks import placement
from raybench.suite.track import Case, ResolvedTrack
from raybench.worker import cores
from raybench.worker.clock import measure_offset
from raybench.worker.fitting import Fitter
from raybench.worker.gating import GateKeeper, control_fits
from raybench.worker.identity import Identity
from raybench.worker.main import local_device
from raybench.worker.measure import ControlTime, Measurement, measure, release, time_control
from raybench.worker.memory import reset_peaks, set_aside
from raybench.worker.mesh import Groups, Mesh, shards_of_a_copy
from raybench.worker.messages import CaseRefused, RoundBegun, RoundRows
from raybench.worker.presence import Presence, classify
from raybench.worker.recorder import Recorder
from raybench.worker.rendezvous import Rendezvous
from raybench.worker.trace import TracePlan

WAIT_S = 7 * 24 * 3600.0
"""How long a rank may wait for others on the store; the driver's deadlines end it sooner."""


def run_job(job: Job, identity: Identity, presence: Presence) -> None:
    """Take this rank's part in every round of `job`."""
    _Worker(job, identity, presence).run()


class _Worker:
    def __init__(self, job: Job, identity: Identity, presence: Presence) -> None:
        self.job = job
        self.rank = identity.rank
        self.presence = presence
        cuda = job.backend == "nccl"
        self.device = torch.device("cuda", local_device(identity)) if cuda else torch.device("cpu")
        self.cores = cores.available()
        self.recorder = Recorder(presence.marker, self.device)
        self.groups = Groups(timeout_s=2 * job.track.measure.timeout_s)
        prefix = f"{job.suite_id}/{job.track.track}/{job.attempt}"
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self.rendezvous = Rendezvous(store, presence.marker, WAIT_S)
        self.gate_keeper = GateKeeper(self.device, self.recorder, self.rendezvous)
        self.fitter = Fitter(self.device, self.recorder, self.rendezvous)
        self.micro_batch_sizes = dict(job.micro_batch_sizes)
        """With `micro_batch: largest`, what was found by case."""
        self.nodes: list[str] = [""] * identity.world_size
        dist.all_gather_object(self.nodes, identity.node)
        self.order = placement(self.nodes, identity.world_size)
        for case in job.track.cases:
            self.groups.create(case.layout, self._ranks(case), self._num_shards(case))
        self.local_rank = identity.local_rank
        self.offset = measure_offset(self.rank, self.nodes, self.device)
        self.refused: set[str] = set()
        self.controls: dict[tuple[int, str], ControlTime | None] = {}
        """The control's time by round and workload; kept by the leader."""
        self.durations: dict[str, float] = {}
        """Seconds that the last round of each case took, without the gate: only the first has one."""
        self.gate_columns = {name: dict(columns) for name, columns in job.gate_passed.items()}

    @property
    def _weights(self) -> str:
        """Where the model's initial values come from."""
        model = self.job.track.workload.model
        return "random" if model.family is None else model.weights

    @property
    def leader(self) -> bool:
        """Whether this is the first rank of every case."""
        return self.rank == self.order[0]

    def _ranks(self, case: Case) -> tuple[int, ...]:
        """The ranks that take part in a case, in mesh order."""
        return placement(self.nodes, case.layout.num_ranks, tensor=case.layout.tensor)

    def _prepare_text(self) -> None:
        """Have the workload's text on every node: its first rank makes it, however long that takes, its others wait.

        Raises:
            RequestError: two nodes have made something different of it.
        """
        work = self.job.track.workload
        if work.data.name == "synthetic":
            return
        from raybench.data.corpus import digest

        node = self.nodes[self.rank]
        if self.nodes.index(node) == self.rank:
            self.presence.marker.mark("preparing the text")
            self.rendezvous.announce(f"text on {node}", digest(work))
        made = {node: self.rendezvous.listen(f"text on {node}") for node in dict.fromkeys(self.nodes)}
        if other := next((node for node, text in made.items() if text != made[self.nodes[0]]), None):
            raise RequestError(f"workload.data.name: {work.data.name} is not the same on {other} and {self.nodes[0]}")

    def run(self) -> None:
        self._prepare_text()
        set_aside()
        first_round = min(key.round for key in self.job.rounds)
        for key in self.job.rounds:
            if key.case in self.refused:
                continue
            case = self.job.track.case(key.case)
            name = f"{key.case} {key.round}"
            if self.leader:
                late = key.round > first_round and self._would_end_too_late(key.case)
                self.rendezvous.announce(f"begin {name}", "no" if late else "yes")
            if self.rendezvous.listen(f"begin {name}") == "no":
                continue
            if self.rank in self._ranks(case):
                outcome = self._round(case, key)
                if self.leader:
                    self.rendezvous.announce(f"end {name}", outcome)
            if self.rendezvous.listen(f"end {name}") == "refused":
                self.refused.add(key.case)
        cores.pin(self.cores)

    def _num_shards(self, case: Case) -> int | None:
        return shards_of_a_copy(case, [self.nodes[rank] for rank in self._ranks(case)])

    def _would_end_too_late(self, case: str) -> bool:
        deadline = self.job.deadline_unix_s
        return deadline is not None and time.time() + self.durations.get(case, 0.0) > deadline

    def _round(self, case: Case, key: RoundKey) -> str:
        """One round of one case: build, check, warm up, time, tear down. Returns `done` or `refused`."""
        deadline_ns = time.monotonic_ns() + self.job.track.measure.timeout_s * 10**9
        self.presence.marker.begin_round(case.name, key.round, deadline_ns)
        ranks = self._ranks(case)
        self.presence.send(RoundBegun(self.rank, case.name, key.round, len(ranks)))
        pinned = self._pin(ranks)
        mesh = Mesh(case.layout, ranks, self.rank, self.groups, self.recorder, self._num_shards(case))
        columns = dict(self._gate(case, mesh))
        if columns["gate"] == "failed":
            reason = columns.pop("reason")
            return self._refuse(case, key, mesh, "failed", "gate failed: " + reason, columns)
        environment = columns["environment"] = {**columns.get("environment", {}), **pinned}
        began = time.monotonic()
        rows: Measurement | None = None
        if not self.job.verify_only:
            if self.job.track.micro_batch == "largest" and case.name not in self.micro_batch_sizes:
                fitting = self.fitter.run(self.job.track, case, mesh)
                environment["micro_batch_search"] = {"limit_bytes": fitting.limit_bytes, "tried": fitting.tried}
                if fitting.micro_batch_size is None:
                    return self._refuse(case, key, mesh, "out_of_memory", fitting.reason, columns)
                self.micro_batch_sizes[case.name] = fitting.micro_batch_size
            track, batch = self._timed_track(case)
            columns |= {**batch, **self._control_columns(track, mesh, key.round)}
            tracing = self._tracing(key, mesh)
            rows = measure(track, case, mesh, self.device, self.recorder, self.offset, tracing)
            if rows.reason is not None:
                return self._refuse(case, key, mesh, "failed", rows.reason, columns)
        self._send(case, key, mesh, columns, rows)
        self.presence.marker.mark("round sent")
        self.rendezvous.meet(mesh.all, "end of round")
        self.presence.marker.end_round()
        self.durations[case.name] = time.monotonic() - began
        return "done"

    def _pin(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """With CPU ranks, keep each of the case's ranks on this node to its own cores; says to which, and threads."""
        if self.device.type != "cpu":
            return {}
        neighbours = [r for r in ranks if self.nodes[r] == self.nodes[self.rank]]
        own = cores.share_of(self.cores, neighbours.index(self.rank), len(neighbours))
        cores.pin(own)
        return {"num_threads": torch.get_num_threads(), "first_rank_cores": own}

    def _timed_track(self, case: Case) -> tuple[ResolvedTrack, dict[str, Any]]:
        """The track with the workload as the case's ranks take it; columns that tell a micro-batch that was found."""
        found = self.micro_batch_sizes.get(case.name)
        work = self.job.track.workload_of(case, found)
        track = self.job.track.model_copy(update={"workload": work})
        if found is None:
            return track, {}
        tokens = work.tokens_per_step(case.layout.data)
        return track, {"micro_batch_size": found, "tokens_per_step": tokens, "workload_hash": work.hash}

    def _control_columns(self, track: ResolvedTrack, mesh: Mesh, round_index: int) -> dict[str, Any]:
        """The control's window of this round, timed by the leader while the others wait."""
        key = (round_index, track.workload.hash)
        if self.leader and key not in self.controls:
            self.controls[key] = self._time_control(track)
        self.rendezvous.meet(mesh.all, "control")
        timed = self.controls.get(key)
        return {} if timed is None else {"control_window_ns": timed.window_ns, "control_tokens": timed.tokens}

    def _time_control(self, track: ResolvedTrack) -> ControlTime | None:
        """The control's time, or None where it does not fit the device."""
        if not control_fits(track.workload, self.device):
            return None
        try:
            return time_control(track, self.rank, self.device, self.recorder)
        except Exception as error:
            if classify(error)[0] != "out_of_memory":
                raise
        release(self.device)
        return None

    def _tracing(self, key: RoundKey, mesh: Mesh) -> TracePlan | None:
        """A case is traced once, in its last round: profilers may leave a process slower than it was.

        Under a deadline, which later rounds may not meet, in its first.
        """
        rounds = [other.round for other in self.job.rounds if other.case == key.case]
        traced = max(rounds) if self.job.deadline_unix_s is None else min(rounds)
        if not self.job.trace_steps or key.round != traced:
            return None
        about = {
            "suite_id": self.job.suite_id,
            "track": self.job.track.track,
            "case": key.case,
            "round": key.round,
            "rank": self.rank,
            "ranks": list(mesh.ranks),
            "clock_offset_ns": self.offset.offset_ns,
        }
        return TracePlan(num_steps=self.job.trace_steps, with_nsys=self.job.with_nsys, about=about)

    def _gate(self, case: Case, mesh: Mesh) -> dict[str, Any]:
        """The gate's columns; the gate runs in the case's first round and not again."""
        if case.name not in self.gate_columns:
            began = time.perf_counter_ns()
            result, columns = self.gate_keeper.run(self.job.track.workload_of(case), case, mesh)
            set_aside()  # with what the case has imported
            release(self.device)
            columns["gate_ns"] = time.perf_counter_ns() - began
            if not result.passed:
                return {**columns, "reason": result.reason}
            self.gate_columns[case.name] = columns
            return columns
        return {**self.gate_columns[case.name], "gate_ns": None}

    def _refuse(
        self, case: Case, key: RoundKey, mesh: Mesh, status: Status, reason: str, columns: dict[str, Any]
    ) -> str:
        if self.leader:
            self.presence.send(CaseRefused(case.name, key.round, status, reason, _encoded(columns)))
        self.rendezvous.meet(mesh.all, "end of round")
        self.presence.marker.end_round()
        self.refused.add(case.name)
        return "refused"

    def _send(self, case: Case, key: RoundKey, mesh: Mesh, columns: dict[str, Any], rows: Measurement | None) -> None:
        nodes = list(dict.fromkeys(self.nodes[r] for r in mesh.ranks))
        own_row = {
            "node": self.nodes[self.rank],
            "node_rank": nodes.index(self.nodes[self.rank]),
            "local_rank": self.local_rank,
            "device_index": self.device.index,
            "clock_offset_ns": self.offset.offset_ns,
            "clock_error_ns": self.offset.error_ns,
        }
        run = None
        if self.leader:
            nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.device.type == "cuda" else None
            run = _encoded({**columns, **(rows.run if rows else {}), "weights": self._weights, "nccl_version": nccl})
        self.presence.send(
            RoundRows(
                rank=self.rank,
                case=case.name,
                round=key.round,
                num_ranks=len(mesh.ranks),
                ranks={**own_row, **(rows.ranks if rows else {})},
                run=run,
                steps=rows.steps if rows else [],
                evaluations=rows.evaluations if rows and self.leader else [],
                operations=rows.operations if rows else [],
                trace=rows.trace if rows else None,
            )
        )
        reset_peaks(self.device)


def _encoded(columns: dict[str, Any]) -> dict[str, Any]:
    environment = columns.get("environment")
    return columns if environment is None else {**columns, "environment": json.dumps(environment)}
