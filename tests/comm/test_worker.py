"""The sweep's loop on real ranks: what it sends, what it refuses, and what the budget leaves."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch.distributed as dist

from raybench.comm import worker
from raybench.comm.operations import OPERATIONS
from raybench.comm.sweep import CommJob, SweepCase
from raybench.suite.job import RoundKey, read_job
from raybench.suite.track import Layout
from raybench.worker.identity import Identity
from raybench.worker.marker import Marker
from raybench.worker.messages import CaseRefused, RoundBegun, RoundRows
from raybench.worker.presence import Presence
from tests.pool import Rank


def make_job(cases: list[SweepCase], world_size: int, num_rounds: int = 1, **changes: object) -> CommJob:
    options = {"sizes": (8, 4096), "budget_s": 60.0, "timeout_s": 60, "overlap": False, **changes}
    return CommJob(
        suite_id=f"sweep-{time.monotonic_ns()}",
        attempt=1,
        cases=tuple(cases),
        rounds=tuple(RoundKey(case=case.name, round=n) for n in range(1, num_rounds + 1) for case in cases),
        world_size=world_size,
        sink_address=("", 0),
        sink_key="",
        **options,
    )


def case(group: str, kind: str = "all_reduce", dtype: str = "fp32") -> SweepCase:
    return SweepCase(group=group, kind=kind, dtype=dtype)


def run(rank: Rank, job: CommJob, nodes: str, patch: str = "") -> list[object]:
    """The messages of one rank; `nodes` has a letter a rank."""
    messages: list[object] = []
    identity = Identity(rank.rank, rank.world_size, rank.rank, nodes[rank.rank])
    cores, before = os.sched_getaffinity(0), dict(OPERATIONS)
    if patch:
        globals()[patch]()
    try:
        worker.run_job(job, identity, Presence(identity, Marker.null(), messages.append))
    finally:
        OPERATIONS.update(before)
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), cores)
        dist.barrier()
    return messages


def rows(messages: list[object]) -> dict[str, RoundRows]:
    return {m.case: m for m in messages if isinstance(m, RoundRows)}


def test_rounds_of_every_case(pools) -> None:
    cases = [case("node"), case("node", "send", "bf16")]
    job = make_job(cases, 2, num_rounds=2, overlap=True)
    assert read_job(job.model_dump_json()) == job
    for messages in pools(2).run(run, job, "aa"):
        assert [type(m) for m in messages] == [RoundBegun, RoundRows] * 4
        places = [(m.case, m.round) for m in messages if isinstance(m, RoundRows)]
        assert places == [(c.name, n) for n in (1, 2) for c in cases]
        reduced, sent = rows(messages)[cases[0].name], rows(messages)[cases[1].name]
        assert [row["payload_bytes"] for row in reduced.collectives] == [8, 4096]
        assert all(row["num_wrong"] == 0 for row in [*reduced.collectives, *sent.collectives])
        assert "overlap_slowdown" in reduced.collectives[1]
        assert "overlap_slowdown" not in sent.collectives[1]
        assert (reduced.ranks["group_size"], reduced.ranks["num_nodes"], sent.ranks["hops"]) == (2, 1, 2)


def test_groups_of_nodes_and_axes(pools) -> None:
    cases = [case("node"), case("across"), case("data"), case("tensor", "all_gather")]
    job = make_job(cases, 4, layout=Layout(data=2, tensor=2))
    ranks = [rows(messages) for messages in pools(4).run(run, job, "abab")]
    assert [sorted(found) for found in ranks[:2]] == [sorted(c.name for c in cases)] * 2
    assert all(cases[1].name not in found for found in ranks[2:])  # one rank of every node
    assert [ranks[0][c.name].ranks["num_nodes"] for c in cases] == [1, 2, 2, 1]
    assert [ranks[0][c.name].ranks["num_groups"] for c in cases] == [2, 1, 2, 2]
    assert [ranks[0][c.name].num_ranks for c in cases] == [4, 2, 4, 4]
    assert ranks[0][cases[0].name].collectives[0]["loopback_bytes"] is not None
    assert "loopback_bytes" not in ranks[2][cases[0].name].collectives[0]  # its node's first rank tells


def lacks_bf16() -> None:
    launch = OPERATIONS["all_gather"].launch

    def refusing(axis, buffers, repeat, is_async):
        if buffers.sent.dtype.itemsize == 2:
            raise RuntimeError("Invalid scalar type")
        return launch(axis, buffers, repeat, is_async)

    OPERATIONS["all_gather"] = replace(OPERATIONS["all_gather"], launch=refusing)


def test_what_the_backend_lacks_is_said(pools) -> None:
    cases = [case("node", "all_gather", "bf16"), case("node", "all_gather"), case("node")]
    first, second = pools(2).run(run, make_job(cases, 2, num_rounds=2), "aa", "lacks_bf16")
    (refusal,) = [m for m in first if isinstance(m, CaseRefused)]
    assert (refusal.case, refusal.round, refusal.status) == (cases[0].name, 1, "skipped")
    assert refusal.reason == "gloo has no all_gather of bf16: RuntimeError: Invalid scalar type"
    assert not [m for m in second if isinstance(m, CaseRefused)]
    assert sorted(rows(first)) == sorted(rows(second)) == sorted(c.name for c in cases[1:])


def wrong_sum() -> None:
    launch = OPERATIONS["all_reduce"].launch

    def corrupting(axis, buffers, repeat, is_async):
        work = launch(axis, buffers, repeat, is_async)
        if axis.index == 1:
            buffers.received[0] += 1
        return work

    OPERATIONS["all_reduce"] = replace(OPERATIONS["all_reduce"], launch=corrupting)


def test_wrong_values_are_counted_where_they_are(pools) -> None:
    first, second = pools(2).run(run, make_job([case("node")], 2), "aa", "wrong_sum")
    name = case("node").name
    assert [row["num_wrong"] for row in rows(first)[name].collectives] == [0, 0]
    assert [row["num_wrong"] for row in rows(second)[name].collectives] == [1, 1]


def test_the_budget_costs_the_largest_sizes(pools) -> None:
    job = make_job([case("node")], 2, sizes=(8, 1 << 20, 1 << 28), budget_s=0.1)
    begin = time.monotonic()
    first, second = pools(2).run(run, job, "aa")
    assert time.monotonic() - begin < 10
    counts = [[row["num_repeats"] for row in rows(m)[job.cases[0].name].collectives] for m in (first, second)]
    assert counts[0] == counts[1]
    assert counts[0][0] > 0
    assert counts[0][-1] == 0
