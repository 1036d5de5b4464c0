"""Runs the gate on one rank of a pool."""

from __future__ import annotations

from collections.abc import Callable

from raybench.data.batches import Batches
from raybench.parallel.strategy import Context, OptimizerFactory, Strategy
from raybench.suite.track import Case, DataConfig, Layout, ModelConfig, Workload
from raybench.worker.build import build_control, build_strategy, make_context, optimizer_factory
from raybench.worker.gate import NUM_STEPS, GateResult, bf16_errors, check, check_bf16, compute_reference
from tests.models import VOCABULARY
from tests.pool import Rank

TINY = ModelConfig(num_layers=2, width=16, num_heads=2, ffn_width=24, vocabulary_size=61)


def workload(model: str | ModelConfig = TINY, **changes: object) -> Workload:
    """A workload of a few hundred tokens; `model` may name a class of tests.models."""
    if isinstance(model, str):
        model = ModelConfig(name=f"tests.models:{model}", vocabulary_size=VOCABULARY)
    values = {"sequence_length": 9, "micro_batch_size": 2, "seed": 7, **changes}
    return Workload(model=model, **values)


def ragged(shortest: int = 1) -> DataConfig:
    return DataConfig(min_length=shortest)


def gate(
    rank: Rank,
    work: Workload,
    case: Case,
    make: Callable[[Context], Strategy] | None = None,
    batches: type[Batches] = Batches,
) -> GateResult | None:
    """The gate's verdict on `case`, or on the strategy that `make` builds in its place; None on ranks beside it."""
    mesh = rank.mesh(case.layout, case.options.get("num_shards"))
    if mesh is None:
        return None
    precise, work = work, work.model_copy(update={"precision": "fp32"})
    source = Batches(work, case.layout.data)
    reference, allowed = None, None
    if rank.rank == 0:
        global_batches = [source.global_batch(step) for step in range(NUM_STEPS)]
        reference = compute_reference(
            lambda factory: build_control(work, 0, rank.device, rank.recorder, factory),
            global_batches,
            work.clip_gradient_norm,
        )
        if precise.precision == "bf16":
            allowed = bf16_errors(
                lambda factory: build_control(precise, 0, rank.device, rank.recorder, factory),
                global_batches[0],
                reference,
            )

    def build(factory: OptimizerFactory | None) -> Strategy:
        if make is None:
            return build_strategy(work, case, mesh, rank.device, factory)
        return make(make_context(work, case, mesh, rank.device, factory or optimizer_factory(work.optimizer)))

    own = [batches(work, case.layout.data).batch(step, mesh.data.index) for step in range(NUM_STEPS)]
    result = check(build, own, reference, mesh.all)
    if precise.precision == "fp32" or not result.passed:
        return result
    return check_bf16(
        result,
        lambda factory: build_strategy(precise, case, mesh, rank.device, factory),
        own[0],
        reference,
        allowed,
        mesh.all,
    )


def data_case(strategy: str, size: int, **options: object) -> Case:
    return Case(name=strategy, layout=Layout(data=size), strategy={"data": strategy}, options=options)
