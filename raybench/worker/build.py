"""From a workload and a case to a strategy that can take steps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from raybench.models.build import make_loss_sum, materialize, outline
from raybench.parallel.execution import Accumulation, Execution
from raybench.parallel.parts import ALONE, Cut, Parts, Sharing
from raybench.parallel.pipeline.plan import make_plan
from raybench.parallel.pipeline.stage import Cut as Stages
from raybench.parallel.pipeline.stage import cut
from raybench.parallel.registry import AxisName, entry
from raybench.parallel.single import Single
from raybench.parallel.strategy import Context, OptimizerFactory, Strategy
from raybench.suite.track import Case, Layout, OptimizerConfig, Workload
from raybench.worker.mesh import Groups, Mesh
from raybench.worker.recorder import Recorder
from raybench.worker.spans import recorded

OTHER_RANKS_SEED = 1_000_003
"""Added, times the data index, to the seed of a rank's own model: whoever forgets to broadcast is found out."""


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """The workload's optimizer, with the fused kernel."""

    def make(parameters: Iterable[Tensor]) -> Optimizer:
        if config.name == "sgd":
            return SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)

    return make


def learning_rate_factor(config: OptimizerConfig, step: int) -> float:
    """What the learning rate is multiplied by in `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.schedule_steps - config.warmup_steps))
    match config.schedule:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            return 1.0


def make_context(
    workload: Workload, case: Case | None, mesh: Mesh, device: torch.device, make_optimizer: OptimizerFactory
) -> Context:
    seed = workload.seed + OTHER_RANKS_SEED * mesh.data.index
    model = outline(workload, seed, untouched=case is None)
    tensor = Cut()
    if case is not None and case.strategy.tensor is not None:
        tensor = implementation("tensor", case.strategy.tensor)(model, mesh)
    plan = None if case is None or case.layout.pipeline == 1 else make_plan(case, workload)
    stages = None if plan is None else cut(model, workload, mesh, plan.schedule.placement, plan.layers)
    parts = Parts(
        mesh,
        sharing=tensor.sharing if stages is None else _shared(tensor, stages),
        shards=tensor.shards,
        aliases={} if stages is None else stages.aliases,
    )
    model = materialize(model, workload, device, seed, parts).train()
    loss_sum = make_loss_sum(model, workload.precision)

    def make_execution() -> Execution:
        if plan is None or stages is None:
            return Accumulation(model, recorded(loss_sum, mesh.recorder.spans))
        run_pipeline: Execution = implementation("pipeline", plan.strategy)(
            plan, stages.build(model), mesh, loss_sum, workload.precision
        )
        return run_pipeline

    return Context(
        model=model,
        parts=parts,
        make_execution=make_execution,
        loss_sum=recorded(loss_sum, mesh.recorder.spans),
        recorded=tensor.recorded,
        make_optimizer=make_optimizer,
        make_scheduler=lambda optimizer: LambdaLR(
            optimizer, lambda step: learning_rate_factor(workload.optimizer, step)
        ),
        clip_gradient_norm=workload.clip_gradient_norm,
        mesh=mesh,
        options={} if case is None else case.options,
    )


def seed_randomness(workload: Workload, mesh: Mesh) -> None:
    """Let dropout draw alike on the ranks of a tensor group, where activations are the same, and differently elsewhere.

    Where a tensor group holds different activations its layers draw apart themselves.
    """
    torch.manual_seed(workload.seed + mesh.all.index // mesh.tensor.size)


def _shared(tensor: Cut, stages: Stages) -> dict[str, Sharing]:
    """How this rank's parameters are shared over both axes: of a tied copy each rank of a tensor group may be whole."""
    sharing = dict(tensor.sharing)
    for name, ends in stages.sharing.items():
        beside = tensor.sharing.get(stages.aliases.get(name, name), ALONE)
        assert beside.axis is None, f"{name} would have to be summed over two axes"
        sharing[name] = Sharing(ends.axis, ends.share * beside.share)
    return sharing


def build_strategy(
    workload: Workload,
    case: Case,
    mesh: Mesh,
    device: torch.device,
    make_optimizer: OptimizerFactory | None = None,
) -> Strategy:
    """The case's strategy over `mesh`, with the workload's optimizer unless another one is given."""
    context = make_context(workload, case, mesh, device, make_optimizer or optimizer_factory(workload.optimizer))
    if case.strategy.data is None:
        return Single(context)
    strategy: Strategy = implementation("data", case.strategy.data)(context)
    return strategy


def implementation(axis: AxisName, name: str) -> Any:
    """What the registry names as strategy `name` of an axis."""
    module, _, attribute = entry(axis, name).target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build_control(
    workload: Workload,
    rank: int,
    device: torch.device,
    recorder: Recorder,
    make_optimizer: OptimizerFactory | None = None,
) -> Single:
    """The same workload on this process alone."""
    mesh = Mesh(Layout(), [rank], rank, Groups(timeout_s=1.0), recorder)
    return Single(make_context(workload, None, mesh, device, make_optimizer or optimizer_factory(workload.optimizer)))
