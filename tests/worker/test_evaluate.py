"""Evaluation on held-out data: right, alike for every strategy and layout, and unseen by training and clock."""

from __future__ import annotations

import math
import time

import pytest
import torch

from raybench.data.batches import IGNORED_LABEL, Batches
from raybench.suite.job import Job
from raybench.suite.track import Evaluate, Workload
from raybench.worker import measure
from raybench.worker.build import build_control, build_strategy
from raybench.worker.evaluate import evaluate
from tests.gating import TINY, data_case, workload
from tests.pool import Rank
from tests.worker.test_loop import NUM_STEPS, make_job, rows, run

NUM_SAMPLES = 7


def evaluated(job: Job, **settings: int) -> Job:
    return job.model_copy(update={"track": job.track.model_copy(update={"evaluate": Evaluate(**settings)})})


def test_every_so_many_steps_and_at_the_end_of_the_window_and_training_does_not_notice(pools):
    dropout = TINY.model_copy(update={"dropout": 0.3})
    job = make_job([data_case("bucketed", 2), data_case("torch-ddp", 2)], workload(dropout), rounds=1)
    plain = pools(2).run(run, job)
    results = pools(2).run(run, evaluated(job, every_steps=3, num_samples=NUM_SAMPLES))
    for message, other in zip(rows(results[0]), rows(plain[0]), strict=True):
        assert [row["step"] for row in message.evaluations] == [3, 4]  # of steps 1 to 4, the first being warm-up
        assert {row["num_samples"] for row in message.evaluations} == {NUM_SAMPLES}
        assert all(0 < row["loss"] < 2 * math.log(61) and 0 <= row["accuracy"] <= 1 for row in message.evaluations)
        assert [s["loss"] for s in message.steps] == [s["loss"] for s in other.steps]
        assert [s["gradient_norm"] for s in message.steps] == [s["gradient_norm"] for s in other.steps]
        assert [s["step"] for s in message.steps] == [1, 2, 3, 4]
        assert message.run["tokens"] == other.run["tokens"]
        assert not other.evaluations
    assert all(not message.evaluations for message in rows(results[1]))  # they are the first rank's to tell


def compare(rank: Rank, strategy: str, work: Workload) -> tuple[dict, dict]:
    """After three steps: what the ranks of a case find together, and what one process finds alone."""
    case = data_case(strategy, rank.world_size)
    mesh = rank.mesh(case.layout)
    built = build_strategy(work, case, mesh, rank.device)
    control = build_control(work, rank.rank, rank.device, rank.recorder)
    source = Batches(work, rank.world_size)
    for (_, own), (_, theirs) in zip(control.full_parameters(), built.full_parameters(), strict=True):
        own.copy_(theirs)
    for step in range(3):
        built.step(source.batch(step, rank.rank))
        control.step(source.global_batch(step))
    found = evaluate(work, built, mesh, rank.device, num_samples=NUM_SAMPLES)
    built.close()
    control.model.eval()
    batch = source.held_out(range(NUM_SAMPLES))
    with torch.no_grad():
        outputs = control.model(**batch.inputs)
    valid = batch.labels != IGNORED_LABEL
    logs = outputs.log_softmax(-1).gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    alone = {
        "loss": float(-logs[valid].mean()),
        "accuracy": float((outputs.argmax(-1) == batch.labels)[valid].float().mean()),
    }
    return found, alone


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["naive", "bucketed", "torch-ddp"])
def test_it_is_what_one_process_finds(pools, strategy, size):
    work = workload(data={"min_length": 2}, optimizer={"learning_rate": 0.05})
    for found, alone in pools(size).run(compare, strategy, work):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-6)


def test_what_is_frozen_is_the_first_ranks(pools):
    for found, alone in pools(2).run(compare, "bucketed", workload("Frozen")):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_held_out_samples_are_never_trained_on():
    source = Batches(workload(), 2)
    held_out = {tuple(row) for row in source.held_out(range(50)).inputs["input_ids"].tolist()}
    trained = {
        tuple(row)
        for s in range(50)
        for m in source.global_batch(s).micro_batches
        for row in m.inputs["input_ids"].tolist()
    }
    assert len(held_out) == 50
    assert not held_out & trained


def slow_evaluation(rank: Rank):
    original = measure.evaluate

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(1.0)
        return original(*arguments, **options)

    measure.evaluate = slow

    def undo() -> None:
        measure.evaluate = original

    return undo


def test_the_clock_stands_still_meanwhile(pools):
    """Two evaluations of a second each are in no step and not in the window."""
    job = evaluated(make_job([data_case("naive", 2)], rounds=1), every_steps=2, num_samples=2)
    results = pools(2).run(slow_run, job)
    (message,) = rows(results[0])
    spans = [(s["begin_ns"], s["duration_ns"]) for s in message.steps]
    assert len(spans) == NUM_STEPS
    assert spans[2][0] - spans[1][0] >= 1e9  # between the two spans of the window
    assert message.run["window_ns"] < spans[-1][0] + spans[-1][1] - spans[0][0] - 0.9e9
    assert sum(duration for _, duration in spans) <= message.run["window_ns"] + 1e6


def slow_run(rank: Rank, job: Job) -> list[object]:
    undo = slow_evaluation(rank)
    try:
        return run(rank, job)
    finally:
        undo()
