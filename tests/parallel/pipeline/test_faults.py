"""Faults that pipelines have had in public, each with the right value."""

from __future__ import annotations

import pytest
import torch

from raybench.data.batches import Batch, Batches, MicroBatch
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Case, ModelConfig, Workload
from raybench.worker.build import build_control, build_strategy
from tests.gating import TINY, workload
from tests.parallel.pipeline.test_gate import DEEP, TIED, pipeline_case
from tests.pool import Rank

WIDE = ModelConfig(name="timed", num_layers=8, width=512, ffn_width=4, vocabulary_size=61)  # computes next to nothing


def build(rank: Rank, work: Workload, case: Case) -> Strategy | None:
    mesh = rank.mesh(case.layout)
    return None if mesh is None else build_strategy(work, case, mesh, rank.device)


def errors_against_control(rank: Rank, work: Workload, strategy: Strategy, batch: Batch) -> dict[str, float]:
    """Relative errors of the strategy's gradients of its last step, which it took on `batch`."""
    control = build_control(work, rank.rank, rank.device, rank.recorder)
    control.step(batch)
    expected = dict(control.full_gradients())
    whole = max(float(g.norm()) for g in expected.values())
    own = {name: float((g - expected[name]).norm()) / whole for name, g in strategy.full_gradients()}
    assert own.keys() == expected.keys()
    return own


def steps_of_different_shapes(rank: Rank, schedule: str) -> list[tuple[float, float, float]]:
    """For each step: the largest gradient error, the loss, and the control's loss."""
    work = workload(DEEP, optimizer={"name": "sgd", "learning_rate": 1e-12})
    strategy = build(rank, work, pipeline_case(schedule, 4, num_micro_batches=2))
    results = []
    for step, lengths in enumerate([(9, 5), (3, 9), (9, 9)]):
        source = Batches(work, 1).batch(2 * step, 0).micro_batches[0], Batches(work, 1).batch(2 * step + 1, 0)
        micro_batches = [
            MicroBatch({"input_ids": m.inputs["input_ids"][:, :length]}, m.labels[:, :length].contiguous())
            for m, length in zip((source[0], source[1].micro_batches[0]), lengths, strict=True)
        ]
        batch = Batch(micro_batches, sum(m.labels.numel() for m in micro_batches))
        loss = float(strategy.step(batch))
        errors = errors_against_control(rank, work, strategy, batch)
        control = build_control(work, rank.rank, rank.device, rank.recorder)
        results.append((max(errors.values()), loss, float(control.step(batch))))
    strategy.close()
    return results


@pytest.mark.parametrize("schedule", ["one-f-one-b", "zero-bubble"])
def test_shapes_travel_and_nothing_of_one_step_reaches_the_next(pools, schedule):
    """Micro-batches of different lengths, not contiguous, in three steps of one pipeline (faults 9, 21, 22)."""
    for rank in pools(4).run(steps_of_different_shapes, schedule):
        for error, loss, expected in rank:
            assert error < 1e-6
            assert loss == pytest.approx(expected, rel=1e-6)  # on every rank (fault 14)


def whatever_the_cut(rank: Rank, schedule: str) -> list[tuple[float, float]]:
    """The largest gradient error and the gradient norm's, for one batch in 1, 2, 4 and 8 micro-batches."""
    work = workload(TIED, micro_batch_size=4, num_micro_batches=2, clip_gradient_norm=0.05)
    batch = Batches(work, 1).batch(0, 0)
    control = build_control(work, rank.rank, rank.device, rank.recorder)
    control.step(batch)
    results = []
    for number in (1, 2, 4, 8):
        strategy = build(rank, work, pipeline_case(schedule, 4, num_micro_batches=number))
        strategy.step(batch)
        errors = errors_against_control(rank, work, strategy, batch)
        norm = float(strategy.gradient_norm)
        results.append((max(errors.values()), abs(norm / float(control.gradient_norm) - 1)))
        strategy.close()
    return results


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble-v"])
def test_gradient_and_norm_do_not_depend_on_the_number_of_micro_batches(pools, schedule):
    """At a fixed batch, tied copies counted once, on every rank (faults 12 and 13)."""
    for rank in pools(4).run(whatever_the_cut, schedule):
        for error, norm_error in rank:
            assert error < 1e-6
            assert norm_error < 1e-5


def in_bf16(rank: Rank, schedule: str) -> float:
    work = workload(DEEP, num_micro_batches=2, precision="bf16")
    strategy = build(rank, work, pipeline_case(schedule, 4))
    batch = Batches(work, 1).batch(0, 0)
    strategy.step(batch)
    errors = errors_against_control(rank, work, strategy, batch)
    strategy.close()
    return max(errors.values())


@pytest.mark.parametrize("schedule", ["one-f-one-b", "zero-bubble"])
def test_bf16_is_that_of_one_process(pools, schedule):
    assert all(error < 1e-3 for error in pools(4).run(in_bf16, schedule))


def large_tensors(rank: Rank, schedule: str, options: dict[str, object]) -> float | None:
    """One step whose activations are 8 MiB each, as they are sent."""
    work = workload(WIDE, sequence_length=1024, micro_batch_size=4, num_micro_batches=4)
    strategy = build(rank, work, pipeline_case(schedule, 2, **options))
    if strategy is None:
        return None
    loss = float(strategy.step(Batches(work, 1).batch(0, 0)))
    strategy.close()
    return loss


@pytest.mark.parametrize(("schedule", "options"), [("one-f-one-b", {}), ("interleaved", {"num_chunks": 4})])
def test_large_tensors_in_both_directions_at_once_do_not_deadlock(pools, schedule, options):
    """Two neighbours that both send first, and two ranks with four virtual stages each (fault 20)."""
    losses = pools(2).run(large_tensors, schedule, options, timeout_s=100)
    assert losses[0] == losses[1] > 0


def tied_copies(rank: Rank, schedule: str) -> tuple[torch.Tensor | None, list[str], int]:
    """This rank's copy of the shared weight after three steps; what it holds; the size of its group of ends."""
    work = workload(TIED, num_micro_batches=3)
    strategy = build(rank, work, pipeline_case(schedule, 4))
    held = dict(strategy.model.named_parameters())
    names = list(held)
    copies = [held[name] for name in ("embedding.token.weight", "head.projection.weight") if name in held]
    start = [p.detach().clone() for p in copies]
    for step in range(3):
        strategy.step(Batches(work, 1).batch(step, 0))
    assert all(not torch.equal(a, b) for a, b in zip(start, copies, strict=True))
    strategy.close()
    return (copies[0].detach().clone() if copies else None), names, strategy.context.mesh.ends.size


def test_tied_embeddings_on_two_stages_stay_equal_to_the_last_bit(pools):
    """And the middle stages are not in their group (fault 23)."""
    first, second, third, last = pools(4).run(tied_copies, "one-f-one-b")
    assert torch.equal(first[0], last[0])
    assert second[0] is None
    assert third[0] is None
    assert [r[2] for r in (first, second, third, last)] == [2, 1, 1, 2]
    assert "embedding.token.weight" in first[1]
    assert "head.projection.weight" in last[1]
    assert all(name.startswith("blocks.") for r in (second, third) for name in r[1])


def test_both_ends_of_a_v_share_one_weight(pools):
    first, *others = pools(4).run(tied_copies, "zero-bubble-v")
    assert first[0] is not None
    assert first[1].count("embedding.token.weight") == 1
    assert "head.projection.weight" not in first[1]
    assert all(copy is None for copy, _, _ in others)


def when_buckets_go(rank: Rank) -> list[tuple[str, int, int]] | None:
    """Of each all-reduce of a bucket: label, when it began, and when this rank's last weight gradient ended."""
    work = workload(DEEP, num_micro_batches=4)
    strategy = build(rank, work, pipeline_case("zero-bubble", 2, data="bucketed"))
    strategy.step(Batches(work, 2).batch(0, strategy.context.mesh.data.index))
    rank.recorder.operations.clear()
    rank.recorder.spans.found.clear()
    with rank.recorder.recording(step=1):
        strategy.step(Batches(work, 2).batch(1, strategy.context.mesh.data.index))
    last = [span for span in rank.recorder.spans.found if span.kind == "weight_gradient"][-1]
    sent = [o for o in rank.recorder.operations if o.label.startswith("bucket")]
    strategy.close()
    return [(o.label, o.begin_ns - last.begin_ns, o.begin_ns - last.end_ns) for o in sent]


def test_buckets_go_within_the_last_weight_gradients_and_not_before(pools):
    """Of a split backward; their values are the gate's business (fault 10)."""
    for sent in pools(4).run(when_buckets_go):
        assert len(sent) > 3
        assert all(after_begin > 0 for _, after_begin, _ in sent)
        assert sum(after_end < 0 for _, _, after_end in sent) > len(sent) / 2  # hooks sent them, not the flush


def activation_bytes(rank: Rank, schedule: str, micro_batches: int) -> int:
    from raybench.worker.memory import ActivationMeter

    work = workload(DEEP, num_micro_batches=micro_batches)
    strategy = build(rank, work, pipeline_case(schedule, 4, layers=[2, 2, 2, 2]))
    batch = Batches(work, 1).batch(0, 0)
    strategy.step(batch)
    with ActivationMeter(list(strategy.held_parameters())) as meter:
        strategy.step(batch)
    strategy.close()
    assert meter.live_bytes == 0
    return meter.peak_bytes


def test_activations_in_flight_are_what_the_schedules_promise(pools):
    """GPipe m, 1F1B min(m, p - stage), ZB-H1 at most p; seen in what autograd keeps on the middle stages."""
    one = pools(4).run(activation_bytes, "gpipe", 1)
    for schedule, micro_batches, expected in [
        ("gpipe", 6, [6, 6]),
        ("one-f-one-b", 6, [3, 2]),
        ("one-f-one-b", 2, [2, 2]),
    ]:
        found = pools(4).run(activation_bytes, schedule, micro_batches)
        assert [f / o for f, o in zip(found[1:3], one[1:3], strict=True)] == expected
    split = pools(4).run(activation_bytes, "zero-bubble", 6)
    assert all(2 < f / o < 4.5 for f, o in zip(split[1:3], one[1:3], strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_transfers_are_recorded_with_what_they_waited_for(pools, size):
    """Every hop once as a send and once as a receive, and every action with its times."""
    found = pools(4).run(recorded, size)[:size]
    whole = [operation for rank in found for operation in rank]
    labels = {kind: sorted(label for k, label, _ in whole if k == kind) for kind in ("send", "receive")}
    hops = size - 1
    assert labels["send"] == labels["receive"]
    assert len(labels["send"]) == 2 * hops * 3
    for rank in found:
        assert all(end >= begin > 0 for _, _, (begin, end) in rank)
        assert sum(kind == "forward" for kind, _, _ in rank) == 3
        assert sum(kind == "backward" for kind, _, _ in rank) == 3


def recorded(rank: Rank, size: int) -> list[tuple[str, str, tuple[int, int]]]:
    work = workload(TINY.model_copy(update={"num_layers": 4}), num_micro_batches=3)
    strategy = build(rank, work, pipeline_case("one-f-one-b", size))
    if strategy is None:
        return []
    batch = Batches(work, 1).batch(0, 0)
    strategy.step(batch)
    rank.recorder.operations.clear()
    rank.recorder.spans.found.clear()
    with rank.recorder.recording(step=1):
        strategy.step(batch)
    strategy.close()
    operations = [(o.kind, o.label, (o.begin_ns, o.end_ns)) for o in rank.recorder.operations]
    return operations + [(s.kind, s.label, (s.begin_ns, s.end_ns)) for s in rank.recorder.spans.found]
