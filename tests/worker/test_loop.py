"""The worker loop on real ranks: what it sends, and in which order it does things."""

from __future__ import annotations

import gc
import json
import os
import time

import torch
import torch.distributed as dist

from raybench.results.schema import OPERATIONS, RANKS, RUNS, STEPS
from raybench.suite.job import Job, RoundKey
from raybench.suite.track import Case, Measure, ResolvedTrack, Workload
from raybench.worker import loop, measure
from raybench.worker.identity import Identity
from raybench.worker.marker import Marker
from raybench.worker.messages import CaseRefused, RoundBegun, RoundRows
from raybench.worker.presence import Presence
from tests.gating import data_case, workload
from tests.pool import Rank

NUM_STEPS = 4


def make_job(cases: list[Case], work: Workload | None = None, rounds: int = 2, **changes: object) -> Job:
    track = ResolvedTrack(
        track="t",
        title="t",
        question="?",
        scale="smoke",
        workload=work or workload(num_micro_batches=2),
        measure=Measure(num_steps=NUM_STEPS, num_warmup_steps=1, num_rounds=rounds, timeout_s=60),
        cases=tuple(cases),
    )
    return Job(
        suite_id=f"suite-{time.monotonic_ns()}",
        attempt=1,
        track=track,
        rounds=tuple(RoundKey(case=c.name, round=r) for r in range(1, rounds + 1) for c in cases),
        world_size=max(c.layout.num_ranks for c in cases),
        sink_address=("", 0),
        sink_key="",
        **changes,
    )


def run(rank: Rank, job: Job, nodes: tuple[str, ...] = ("a", "a"), patch: str = "") -> list[object]:
    """The messages of one rank. `patch` names a function of this module that changes the loop first."""
    identity = Identity(rank.rank, rank.world_size, rank.rank, nodes[rank.rank])
    messages: list[object] = []
    presence = Presence(identity, Marker.null(), messages.append)
    cores = os.sched_getaffinity(0)
    undo = globals()[patch](rank) if patch else lambda: None
    try:
        loop.run_job(job, identity, presence)
    finally:
        undo()
        dist.barrier()
    assert os.sched_getaffinity(0) == cores
    return messages


def rows(messages: list[object]) -> list[RoundRows]:
    return [m for m in messages if isinstance(m, RoundRows)]


def test_every_rank_sends_its_rows_as_each_round_ends(pools):
    cases = [data_case("naive", 2), data_case("bucketed", 2, bucket_mib=0.002), data_case("torch-ddp", 2)]
    results = pools(2).run(run, make_job(cases))
    expected = [(c.name, r) for r in (1, 2) for c in cases]
    for rank, messages in enumerate(results):
        begun = [(m.case, m.round) for m in messages if isinstance(m, RoundBegun)]
        assert begun == [(m.case, m.round) for m in rows(messages)] == expected
        for message in rows(messages):
            assert message.rank == rank
            assert set(message.ranks) <= set(RANKS)
            assert len(message.steps) == NUM_STEPS
            assert all(set(step) <= set(STEPS) for step in message.steps)
            assert all(set(operation) <= set(OPERATIONS) for operation in message.operations)
            assert [step["step"] for step in message.steps] == [1, 2, 3, 4]
    for message in rows(results[0]):
        assert set(message.run) <= set(RUNS)
        assert message.run["gate"] == "passed"
        assert message.run["tokens"] == NUM_STEPS * 2 * 2 * 2 * 9  # both ranks' tokens, once
        assert message.run["control_tokens"] == NUM_STEPS * 2 * 2 * 9
        assert message.run["window_ns"] > 0 < message.run["control_window_ns"]
        assert json.loads(message.run["environment"])["null_parameters"]
    assert all(message.run is None for message in rows(results[1]))
    losses = {tuple(round(s["loss"], 4) for s in m.steps) for messages in results for m in rows(messages)}
    assert len(losses) == 1  # every strategy, round and rank trains alike
    gated = {(m.case, m.round): m.run["gate_ns"] for m in rows(results[0])}
    assert all((took is None) == (number > 1) for (_, number), took in gated.items())


def test_bytes_are_counted_and_operations_carry_their_payload(pools):
    parameters = 4 * sum(p.numel() for p in _tiny().parameters())
    cases = [data_case("naive", 2), data_case("bucketed", 2), data_case("torch-ddp", 2)]
    for messages in pools(2).run(run, make_job(cases, workload(), rounds=1)):
        for message in rows(messages):
            held = message.ranks
            assert held["parameter_bytes"] == held["gradient_bytes"] == parameters
            assert held["optimizer_bytes"] == 2 * parameters
            assert held["activation_bytes"] > 0
            assert held["peak_rss_bytes"] > 50e6
            for step in {o["step"] for o in message.operations}:
                sent = [o for o in message.operations if o["step"] == step and o.get("axis") and o["label"] != "loss"]
                assert sum(o["payload_bytes"] for o in sent) == parameters, message.case
                assert sum(o["wire_bytes"] for o in sent) == parameters  # 2 (N - 1) / N at two ranks
                assert all(o["end_ns"] >= o["begin_ns"] for o in sent)
                assert all(0 <= o["wait_ns"] <= o["end_ns"] - o["begin_ns"] for o in sent)
                assert all(o["launch_ns"] > 0 for o in sent)


def _tiny() -> torch.nn.Module:
    from raybench.models.build import build_model

    return build_model(workload(), torch.device("cpu"), 0)


def break_bucketed(rank: Rank):
    from raybench.parallel.data import bucketed

    original = bucketed.Bucketed._send

    def send(self, bucket) -> None:
        original(self, bucket)
        if rank.rank == 1:
            bucket.pending.wait()
            bucket.gradient.mul_(1.01)

    bucketed.Bucketed._send = send

    def undo() -> None:
        bucketed.Bucketed._send = original

    return undo


def test_a_case_whose_gate_fails_has_no_steps_and_the_others_go_on(pools):
    job = make_job([data_case("bucketed", 2), data_case("naive", 2)])
    results = pools(2).run(run, job, ("a", "a"), "break_bucketed")
    refusals = [m for m in results[0] if isinstance(m, CaseRefused)]
    assert [(m.case, m.status) for m in refusals] == [("bucketed", "failed")]
    assert refusals[0].reason.startswith("gate failed: ")
    assert refusals[0].run["gate"] == "failed"
    assert refusals[0].run["gate_worst_parameter"] is not None
    assert "window_ns" not in refusals[0].run
    assert not [m for m in results[1] if isinstance(m, CaseRefused)]
    for messages in results:
        assert [(m.case, m.round) for m in rows(messages)] == [("naive", 1), ("naive", 2)]


def slow_second_rank(rank: Rank):
    """The second rank takes 50 ms longer over every step."""
    original = measure.build_strategy

    def build(*arguments: object) -> object:
        strategy = original(*arguments)
        if rank.rank == 1:
            step = strategy.step

            def slow(batch: object) -> object:
                loss = step(batch)
                time.sleep(0.05)
                return loss

            strategy.step = slow
        return strategy

    measure.build_strategy = build

    def undo() -> None:
        measure.build_strategy = original

    return undo


def test_the_window_ends_when_the_last_rank_has_ended(pools):
    """The first rank's own time, or a time without waiting for the work, would be shorter."""
    job = make_job([data_case("accumulated", 2)], rounds=1)
    results = pools(2).run(run, job, ("a", "a"), "slow_second_rank")
    window_ns = rows(results[0])[0].run["window_ns"]
    assert window_ns >= NUM_STEPS * 50e6
    assert all(step["duration_ns"] >= 50e6 for step in rows(results[1])[0].steps)


def test_a_smaller_case_uses_the_first_ranks_of_one_node(pools):
    job = make_job([data_case("naive", 2), data_case("bucketed", 3)], rounds=1)
    results = pools(3).run(run, job, ("a", "b", "b"))
    used = {rank: {m.case for m in rows(messages)} for rank, messages in enumerate(results)}
    assert used == {0: {"bucketed"}, 1: {"naive", "bucketed"}, 2: {"naive", "bucketed"}}
    placed = {m.rank: m.ranks for messages in results for m in rows(messages) if m.case == "bucketed"}
    assert [placed[rank]["node"] for rank in range(3)] == ["a", "b", "b"]
    assert [placed[rank]["node_rank"] for rank in range(3)] == [1, 0, 0]
    offsets = [placed[rank]["clock_offset_ns"] for rank in range(3)]
    assert offsets[0] == 0
    assert offsets[1] == offsets[2]
    assert abs(offsets[1]) <= placed[1]["clock_error_ns"] + 1_000_000  # the same clock, in truth


def test_no_round_is_begun_after_the_deadline_but_every_case_has_one(pools):
    job = make_job([data_case("naive", 2), data_case("bucketed", 2)], rounds=3, deadline_unix_s=time.time() - 1)
    for messages in pools(2).run(run, job):
        assert [(m.case, m.round) for m in rows(messages)] == [("naive", 1), ("bucketed", 1)]


def gate_slowly(rank: Rank):
    original = loop.GateKeeper.run

    def run_slowly(*arguments):
        time.sleep(GATE_S)
        return original(*arguments)

    loop.GateKeeper.run = run_slowly
    return lambda: setattr(loop.GateKeeper, "run", original)


GATE_S = 10.0


def test_a_later_round_is_not_expected_to_take_the_gates_time_too(pools):
    job = make_job([data_case("bucketed", 2)], rounds=2, deadline_unix_s=time.time() + 1.9 * GATE_S)
    for messages in pools(2).run(run, job, ("a", "a"), "gate_slowly"):
        assert [m.round for m in rows(messages)] == [1, 2]


def test_verify_only_gates_and_times_nothing(pools):
    job = make_job([data_case("bucketed", 2)], rounds=1, verify_only=True)
    for rank, messages in enumerate(pools(2).run(run, job)):
        (only,) = rows(messages)
        assert only.steps == only.operations == []
        if rank == 0:
            assert only.run["gate"] == "passed"
            assert "window_ns" not in only.run
            assert "control_window_ns" not in only.run


def test_a_gate_that_was_passed_in_an_earlier_attempt_is_not_run_again(pools):
    passed = {"bucketed": {"gate": "passed", "gate_scope": "full", "gate_worst_error": 1e-7}}
    job = make_job([data_case("bucketed", 2)], rounds=1, gate_passed=passed)
    (only,) = rows(pools(2).run(run, job)[0])
    assert only.run["gate"] == "passed"
    assert only.run["gate_worst_error"] == 1e-7
    assert only.run["gate_ns"] is None


def test_bf16_is_held_to_the_error_of_one_process(pools):
    job = make_job([data_case("bucketed", 2), data_case("torch-ddp", 2)], workload(precision="bf16"), rounds=1)
    for message in rows(pools(2).run(run, job)[0]):
        assert message.run["gate"] == "passed"
        assert message.run["gate_worst_error"] < 1e-5


def diverge(rank: Rank):
    original = measure._time_window

    def nan(*arguments: object) -> object:
        from dataclasses import replace

        window = original(*arguments)
        return replace(window, losses=[1.0, float("nan"), 1.0, 1.0])

    measure._time_window = nan

    def undo() -> None:
        measure._time_window = original

    return undo


def test_a_loss_that_is_not_finite_is_no_throughput(pools):
    job = make_job([data_case("bucketed", 2)], rounds=1)
    results = pools(2).run(run, job, ("a", "a"), "diverge")
    (refused,) = [m for m in results[0] if isinstance(m, CaseRefused)]
    assert refused.reason == "loss is nan in step 2"
    assert refused.status == "failed"
    assert not rows(results[0])


def count_frozen(rank: Rank, job: Job) -> tuple[int, int]:
    """Objects that searches for cycles pass over, and those that they look at, after a job."""
    gc.unfreeze()
    run(rank, job)
    counts = gc.get_freeze_count(), len(gc.get_objects())
    gc.unfreeze()
    return counts


def test_searches_for_cycles_pass_over_what_was_imported(pools):
    for frozen, searched in pools(2).run(count_frozen, make_job([data_case("naive", 2)], rounds=1)):
        assert frozen > 10 * searched


def test_memory_is_back_to_its_start_after_the_round(pools):
    cases = [data_case("bucketed", 2), data_case("torch-ddp", 2)]
    assert all(pools(2).run(leftovers, make_job(cases, rounds=1)))


def leftovers(rank: Rank, job: Job) -> bool:
    """No parameter outlives its round."""

    def parameters() -> int:
        gc.collect()
        return sum(isinstance(o, torch.nn.Parameter) for o in gc.get_objects())

    before = parameters()
    run(rank, job)
    return parameters() <= before
