"""Every schedule computes what one process computes, alone and under every unsharded data strategy."""

from __future__ import annotations

import pytest

from raybench.parallel.pipeline.plan import TWINS
from raybench.parallel.pipeline.schedules import SCHEDULES
from raybench.suite.track import Case, ModelConfig, Workload
from raybench.worker.gate import GateResult
from tests.gating import TINY, gate, ragged, workload
from tests.pool import Rank

DEEP = TINY.model_copy(update={"num_layers": 8})
FOUR = TINY.model_copy(update={"num_layers": 4})
TIED = DEEP.model_copy(update={"tied_head": True})
TIMED = ModelConfig(name="timed", num_layers=8, width=16, ffn_width=8, vocabulary_size=61)
DATA = ("naive", "accumulated", "hooked", "overlapped", "bucketed")
SMALL_BUCKETS = {"bucket_mib": 0.002}
MICRO_BATCHES = (1, 2, 3, 4, 7, 8)


def pipeline_case(schedule: str, size: int, *, data: str | None = None, **options: object) -> Case:
    layout = {"pipeline": size, "data": 2 if data else 1}
    if data == "bucketed":
        options = {**SMALL_BUCKETS, **options}
    return Case(name="case", layout=layout, strategy={"pipeline": schedule, "data": data}, options=options)


def deep_enough(model: ModelConfig, schedule: str, size: int) -> ModelConfig:
    """As many layers as there are stages."""
    return model.model_copy(update={"num_layers": size * SCHEDULES[TWINS.get(schedule, schedule)].chunks[0]})


def run_gate(rank: Rank, work: Workload, case: Case) -> GateResult | None:
    return gate(rank, work, case)


def check_gate(pools, work: Workload, case: Case) -> None:
    results = pools(4).run(run_gate, work, case)
    for result in results[: case.layout.num_ranks]:
        assert result.passed, result.reason
        assert result == results[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("size", "micro_batches"), [(2, 4), (4, 3)])
def test_passes(pools, schedule, size, micro_batches):
    work = workload(deep_enough(DEEP, schedule, size), num_micro_batches=micro_batches)
    check_gate(pools, work, pipeline_case(schedule, size))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_passes_at_every_size_and_number_of_micro_batches(pools, schedule, size, micro_batches):
    work = workload(deep_enough(DEEP, schedule, size), num_micro_batches=micro_batches)
    check_gate(pools, work, pipeline_case(schedule, size))


@pytest.mark.parametrize(
    ("schedule", "data"),
    [("one-f-one-b", "naive"), ("interleaved", "hooked"), ("zero-bubble", "bucketed"), ("zero-bubble-v", "overlapped")],
)
def test_passes_under_data_parallelism(pools, schedule, data):
    work = workload(deep_enough(TIED, schedule, 2), num_micro_batches=3, clip_gradient_norm=0.1)
    check_gate(pools, work, pipeline_case(schedule, 2, data=data))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("data", DATA)
def test_every_data_strategy_runs_over_every_schedule(pools, schedule, data):
    work = workload(deep_enough(TIED, schedule, 2), num_micro_batches=3)
    check_gate(pools, work, pipeline_case(schedule, 2, data=data))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_data_parallelism_passes_at_every_number_of_micro_batches(pools, schedule, micro_batches):
    work = workload(deep_enough(DEEP, schedule, 2), num_micro_batches=micro_batches)
    check_gate(pools, work, pipeline_case(schedule, 2, data="bucketed"))


WORKLOADS = {
    "tied head": workload(FOUR.model_copy(update={"tied_head": True}), num_micro_batches=3, clip_gradient_norm=0.1),
    "recomputation": workload(FOUR, num_micro_batches=3, recompute="full"),
    "ragged": workload(FOUR, num_micro_batches=3, data=ragged()),
    "timed": workload(TIMED.model_copy(update={"num_layers": 4}), num_micro_batches=3),
    "model of one's own": workload("Staged", num_micro_batches=3),
}


@pytest.mark.parametrize("schedule", ["one-f-one-b", "zero-bubble"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_passes_every_workload(pools, schedule, name):
    check_gate(pools, WORKLOADS[name], pipeline_case(schedule, 4))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "model of one's own"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule_passes_every_workload(pools, schedule, name, size):
    work = WORKLOADS[name].model_copy(update={"model": deep_enough(WORKLOADS[name].model, schedule, size)})
    check_gate(pools, work, pipeline_case(schedule, size))


def test_stages_as_a_case_says(pools):
    check_gate(pools, workload(DEEP, num_micro_batches=2), pipeline_case("gpipe", 4, layers=[0, 5, 3, 0]))


@pytest.mark.parametrize("peer", TWINS)
def test_peers_pass(pools, peer):
    check_gate(
        pools, workload(deep_enough(TIED, peer, 2), num_micro_batches=4), pipeline_case(peer, 2, data="bucketed")
    )


@pytest.mark.slow
@pytest.mark.parametrize("peer", TWINS)
@pytest.mark.parametrize("model", [DEEP, TIED, TIMED], ids=["untied", "tied", "timed"])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_peers_pass_at_four_stages(pools, peer, model, micro_batches):
    work = workload(deep_enough(model, peer, 4), num_micro_batches=micro_batches)
    check_gate(pools, work, pipeline_case(peer, 4))
