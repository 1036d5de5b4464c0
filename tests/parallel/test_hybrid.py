"""Every layout of data × pipeline × tensor computes what one process computes, whatever strategies meet on it."""

from __future__ import annotations

from itertools import combinations, cycle, product

import pytest
from pydantic import ValidationError

from raybench.parallel.pipeline.plan import TWINS
from raybench.parallel.pipeline.schedules import SCHEDULES
from raybench.parallel.registry import AXES, REGISTRY
from raybench.suite.track import Case, Layout, ModelConfig, Workload
from raybench.worker.gate import GateResult
from tests.gating import gate, workload
from tests.pool import Rank

NUM_RANKS = 8
NAMES = {
    axis: [
        name for name, entry in REGISTRY[axis].items() if not entry.library and {"pipeline", "tensor"} <= {*entry.over}
    ]
    for axis in AXES
}
FACTORINGS = [
    Layout(data=d, pipeline=p, tensor=t)
    for d, p, t in product(range(1, NUM_RANKS + 1), repeat=3)
    if 1 < d * p * t <= NUM_RANKS
]


def hybrid(layout: Layout, **strategy: str) -> Case:
    """A case with the strategies of the axes that the layout has."""
    chosen = {axis: name for axis, name in strategy.items() if getattr(layout, axis) > 1}
    options = {"bucket_mib": 0.002} if chosen.get("data") in ("bucketed", "zero1") else {}
    return Case(name="hybrid", layout=layout, strategy=chosen, options=options)


def work(case: Case) -> Workload:
    """As many layers as the pipeline has stages, heads that the tensor axis divides, and an odd vocabulary."""
    layout = case.layout
    chunks = (
        SCHEDULES[TWINS.get(case.strategy.pipeline, case.strategy.pipeline)].chunks[0] if case.strategy.pipeline else 1
    )
    num_heads = next(n for n in (4, 6, 5, 7, 8) if n % layout.tensor == 0)
    model = ModelConfig(
        num_layers=layout.pipeline * chunks,
        width=4 * num_heads,
        num_heads=num_heads,
        ffn_width=6 * num_heads,
        vocabulary_size=61,
        tied_head=True,
    )
    return workload(
        model, sequence_length=2 * num_heads, micro_batch_size=1, num_micro_batches=3, clip_gradient_norm=0.1
    )


def every_layout() -> list[Case]:
    """Each factoring once, strategies in turn."""
    names = {axis: cycle(NAMES[axis]) for axis in AXES}
    return [
        hybrid(layout, **{axis: next(names[axis]) for axis in AXES if getattr(layout, axis) > 1})
        for layout in FACTORINGS
    ]


def every_pair() -> list[Case]:
    """On 2 × 2 × 2, every data strategy over every schedule, tensor strategies in turn."""
    cube = Layout(data=2, pipeline=2, tensor=2)
    tensor = NAMES["tensor"]
    return [
        hybrid(cube, data=data, pipeline=pipeline, tensor=tensor[(row + column) % len(tensor)])
        for row, data in enumerate(NAMES["data"])
        for column, pipeline in enumerate(NAMES["pipeline"])
    ]


def run_gate(rank: Rank, work: Workload, case: Case) -> GateResult | None:
    return gate(rank, work, case)


def check(pools, case: Case) -> None:
    num_ranks = case.layout.num_ranks
    results = pools(next(n for n in (2, 4, NUM_RANKS) if n >= num_ranks)).run(run_gate, work(case), case)
    for result in results[:num_ranks]:
        assert result.passed, result.reason
        assert result == results[0]


def test_every_pair_of_strategies_and_every_layout_is_among_the_cases():
    pairs = {
        frozenset({(a, getattr(case.strategy, a)), (b, getattr(case.strategy, b))})
        for case in every_pair()
        for a, b in combinations(AXES, 2)
    }
    wanted = {frozenset({(a, x), (b, y)}) for a, b in combinations(AXES, 2) for x in NAMES[a] for y in NAMES[b]}
    assert pairs == wanted
    assert len({case.layout for case in every_layout()}) == 37


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ((1, 2, 2), {"pipeline": "one-f-one-b", "tensor": "megatron"}),
        ((1, 2, 2), {"pipeline": "interleaved", "tensor": "sequence"}),
        ((2, 1, 2), {"data": "bucketed", "tensor": "sequence"}),
        ((2, 2, 2), {"data": "bucketed", "pipeline": "one-f-one-b", "tensor": "sequence"}),
        ((2, 2, 2), {"data": "overlapped", "pipeline": "zero-bubble-v", "tensor": "megatron"}),
    ],
)
def test_passes(pools, layout, strategy):
    check(pools, hybrid(Layout(**dict(zip(AXES, layout, strict=True))), **strategy))


@pytest.mark.parametrize("tensor", ["torch-dtensor", "torch-dtensor-sequence"])
def test_torchs_pipeline_over_its_dtensors_passes(pools, tensor):
    check(pools, hybrid(Layout(pipeline=2, tensor=2), pipeline="torch-1f1b", tensor=tensor))


@pytest.mark.parametrize("data", ["torch-ddp", "torch-fsdp2-keep"])
def test_torchs_data_strategies_over_its_pipeline_over_its_dtensors_pass(pools, data):
    cube = Layout(data=2, pipeline=2, tensor=2)
    check(pools, hybrid(cube, data=data, pipeline="torch-1f1b", tensor="torch-dtensor"))


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        (Layout(data=2, tensor=2), {"tensor": "torch-dtensor-sequence"}),
        (Layout(data=2, pipeline=2), {"pipeline": "torch-gpipe"}),
    ],
    ids=str,
)
def test_fsdp2_over_either_axis_passes(pools, layout, others):
    check(pools, hybrid(layout, data="torch-fsdp2", **others))


def test_fsdp2_over_several_stages_a_rank_is_refused():
    with pytest.raises(ValidationError, match=r"'torch-interleaved' \(allowed: torch-gpipe, torch-1f1b\)"):
        hybrid(Layout(data=2, pipeline=2), data="torch-fsdp2", pipeline="torch-interleaved")


def test_torchs_ddp_over_a_pipeline_of_another_kind_is_refused():
    with pytest.raises(ValidationError, match=r"'one-f-one-b' \(allowed: torch-gpipe"):
        hybrid(Layout(data=2, pipeline=2), data="torch-ddp", pipeline="one-f-one-b")


@pytest.mark.slow
@pytest.mark.parametrize("case", every_layout(), ids=lambda case: str(case.layout))
def test_passes_on_every_layout(pools, case):
    check(pools, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_pair(), ids=lambda case: "-".join(case.strategy.model_dump().values()))
def test_passes_with_every_pair_of_strategies(pools, case):
    check(pools, case)
