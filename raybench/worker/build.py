"""From a workload and a case to a strategy that can take steps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from raybench.models.build import build_model, make_loss_sum
from raybench.parallel.registry import AXES, entry
from raybench.parallel.single import Single
from raybench.parallel.strategy import Context, OptimizerFactory, Strategy
from raybench.suite.track import Case, Layout, OptimizerConfig, Workload
from raybench.worker.communication import Recorder
from raybench.worker.mesh import Groups, Mesh
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
    model = build_model(workload, device, workload.seed + OTHER_RANKS_SEED * mesh.data.index)
    model.train()
    return Context(
        model=model,
        loss_sum=recorded(make_loss_sum(model, workload.precision), mesh.recorder.spans),
        make_optimizer=make_optimizer,
        make_scheduler=lambda optimizer: LambdaLR(
            optimizer, lambda step: learning_rate_factor(workload.optimizer, step)
        ),
        clip_gradient_norm=workload.clip_gradient_norm,
        mesh=mesh,
        options={} if case is None else case.options,
    )


def build_strategy(
    workload: Workload,
    case: Case,
    mesh: Mesh,
    device: torch.device,
    make_optimizer: OptimizerFactory | None = None,
) -> Strategy:
    """The case's strategy over `mesh`, with the workload's optimizer unless another one is given."""
    context = make_context(workload, case, mesh, device, make_optimizer or optimizer_factory(workload.optimizer))
    for axis in AXES:
        name = getattr(case.strategy, axis)
        if name is not None:
            module, _, class_name = entry(axis, name).target.partition(":")
            strategy: Strategy = getattr(importlib.import_module(module), class_name)(context)
            return strategy
    return Single(context)


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
