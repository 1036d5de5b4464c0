"""What every rank of a sweep runs: round by round, case by case, size by size."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from raybench.comm import groups
from raybench.comm.interface import Counters, link_bytes_per_s, used_interface
from raybench.comm.measure import MIN_REPEATS, NUM_OVERLAPS, NUM_WARMUP, Place, Timed, different_payloads
from raybench.comm.operations import DTYPES, OPERATIONS, Operation
from raybench.comm.sweep import CommJob, SweepCase
from raybench.worker import cores
from raybench.worker.communication import Axis
from raybench.worker.identity import Identity
from raybench.worker.main import local_device
from raybench.worker.mesh import Groups
from raybench.worker.messages import CaseRefused, RoundBegun, RoundRows, Row
from raybench.worker.presence import Presence, classify, one_line
from raybench.worker.recorder import Recorder
from raybench.worker.rendezvous import Rendezvous

WAIT_S = 7 * 24 * 3600.0
"""How long a rank may wait for others on the store; the driver's deadlines end it sooner."""
TRIAL_S = 60.0
"""How long ranks may take to agree whether the backend has an operation."""
LAUNCHES_BESIDE_REPEATS = NUM_WARMUP + 2
"""Of a size: the first one, those that warm up, and the checked one."""


def run_job(job: CommJob, identity: Identity, presence: Presence) -> None:
    """Take this rank's part in every round of `job`."""
    _Worker(job, identity, presence).run()


class _Worker:
    def __init__(self, job: CommJob, identity: Identity, presence: Presence) -> None:
        self.job, self.rank, self.presence = job, identity.rank, presence
        cuda = job.backend == "nccl"
        self.device = torch.device("cuda", local_device(identity)) if cuda else torch.device("cpu")
        self.recorder = Recorder(presence.marker, self.device)
        store = PrefixStore(f"{job.suite_id}/comm/{job.attempt}", dist.distributed_c10d._get_default_store())
        self.rendezvous = Rendezvous(store, presence.marker, WAIT_S)
        self.nodes: list[str] = [""] * identity.world_size
        dist.all_gather_object(self.nodes, identity.node)
        self.interface = used_interface(job.backend, identity.node)
        self.link = link_bytes_per_s(job.backend, self.interface)
        self.groups = {
            name: groups.groups_of(name, self.nodes, job.layout) for name in dict.fromkeys(c.group for c in job.cases)
        }
        made = Groups(timeout_s=2 * job.timeout_s)
        for found in self.groups.values():
            made.create_each([*found, groups.members(found)])
        self.made = made
        self.refused: set[str] = set()
        self.spent_s = 0.0
        if not cuda:
            self._pin()

    def _pin(self) -> None:
        """Keep each of this node's ranks to its own cores."""
        neighbours = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]
        cores.pin(cores.share_of(cores.available(), neighbours.index(self.rank), len(neighbours)))

    def run(self) -> None:
        cases = {case.name: case for case in self.job.cases}
        for number, key in enumerate(self.job.rounds):
            case = cases[key.case]
            ranks = groups.members(self.groups[case.group])
            if self.rank not in ranks or case.name in self.refused:
                continue
            members = Axis(case.group, ranks, self.rank, self.made.get(ranks), self.recorder)
            self.rendezvous.meet(members, f"begin of {case.name}")
            begin = time.perf_counter()
            share_s = (self.job.budget_s - self.spent_s) / (len(self.job.rounds) - number)
            self._round(case, key.round, members, max(0.0, share_s))
            self.spent_s += time.perf_counter() - begin
        everyone = Axis("all", range(len(self.nodes)), self.rank, None, self.recorder)
        self.rendezvous.meet(everyone, "end of the sweep")  # the first rank keeps the store

    def _round(self, case: SweepCase, number: int, members: Axis, share_s: float) -> None:
        marker = self.presence.marker
        marker.begin_round(case.name, number, time.monotonic_ns() + self.job.timeout_s * 10**9)
        self.presence.send(RoundBegun(self.rank, case.name, number, members.size))
        place = self._place(case, members)
        operation, dtype = OPERATIONS[case.kind], DTYPES[case.dtype]
        if lack := self._lacks(operation, place, dtype, f"{case.name} {number}"):
            self.refused.add(case.name)
            if self.rank == members.ranks[0]:
                reason = f"{self.job.backend} has no {case.kind} of {case.dtype}: {lack}"
                self.presence.send(CaseRefused(case.name, number, "skipped", reason, {}))
        else:
            rows = self._sizes(case, operation, place, dtype, share_s)
            self.presence.send(
                RoundRows(self.rank, case.name, number, members.size, self._about(case.kind, place), collectives=rows)
            )
        marker.mark("round sent")
        self.rendezvous.meet(members, "end of round")
        marker.end_round()

    def _place(self, case: SweepCase, members: Axis) -> Place:
        ranks = next(group for group in self.groups[case.group] if self.rank in group)
        axis = Axis(case.group, ranks, self.rank, self.made.get(ranks), self.recorder)
        first_here = next(rank for rank in members.ranks if self.nodes[rank] == self.nodes[self.rank])
        counters = Counters(self.interface) if first_here == self.rank else None
        return Place(axis, members, self.device, counters)

    def _about(self, kind: str, place: Place) -> Row:
        """What the driver must know of this rank's group to make rows."""
        found = self.groups[place.axis.name]
        return {
            "group_size": place.axis.size,
            "num_groups": len(found),
            "hops": OPERATIONS[kind].hops(place.axis.size),
            "num_nodes": groups.num_nodes(place.axis.ranks, self.nodes),
            "interface": self.interface,
            "link_bytes_per_s": self.link,
            "nccl_version": _nccl_version(self.device),
        }

    def _lacks(self, operation: Operation, place: Place, dtype: torch.dtype, name: str) -> str | None:
        """Why the backend cannot do the operation, in its own words; None where it can.

        Raises:
            RuntimeError: some ranks can and others cannot.
        """
        self.presence.marker.mark(f"trying {name}")
        lack = ""
        try:
            operation.launch(place.axis, operation.buffers(place.axis, place.axis.size, dtype, self.device), 0, False)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if not classify(error)[1]:
                raise  # another rank went away
            lack = one_line(error)
        told = self.rendezvous.exchange(place.members, f"trial of {name}", lack, TRIAL_S)
        if any(told) and not all(told):
            raise RuntimeError(f"only some ranks can do {name}: {next(filter(None, told))}")
        return lack or None

    def _sizes(
        self, case: SweepCase, operation: Operation, place: Place, dtype: torch.dtype, share_s: float
    ) -> list[Row]:
        """Every size that the share of the budget allows, ascending; a row that says so for what it does not."""
        payloads = different_payloads(operation, self.job.sizes, dtype, place.axis.size)
        begin, rows, launch_s, least_s = time.perf_counter(), list[Row](), 0.0, math.inf
        for index, payload in enumerate(payloads):
            left_s = place.agree(share_s - (time.perf_counter() - begin))
            if index:
                # What is more than the shortest launch grows in proportion.
                expected_s = least_s + (launch_s - least_s) * payload / payloads[index - 1]
                if expected_s * (MIN_REPEATS + LAUNCHES_BESIDE_REPEATS) > left_s:
                    rows += [{"payload_bytes": other, "num_repeats": 0} for other in payloads[index:]]
                    break
            self.presence.marker.mark(f"{case.name} of {payload} bytes")
            timed = Timed(operation, place, payload, dtype)
            launch_s, least_s = timed.launch_s, min(least_s, timed.launch_s)
            rows.append(timed.measure(timed.num_repeats(left_s / (len(payloads) - index) / 2)))
        if self.job.overlap and operation.can_overlap:
            left_s = place.agree(share_s - (time.perf_counter() - begin))
            if 4 * NUM_OVERLAPS * timed.launch_s <= left_s:
                self.presence.marker.mark(f"{case.name} of {timed.payload_bytes} bytes beside compute")
                next(row for row in rows if row["payload_bytes"] == timed.payload_bytes).update(timed.overlap())
        return rows


def _nccl_version(device: torch.device) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
