"""From a case and its workload to the schedule it runs; refuses in words what cannot be, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raybench.errors import RequestError
from raybench.parallel.pipeline.actions import Schedule
from raybench.parallel.pipeline.balance import check_num_layers, placed
from raybench.parallel.pipeline.check import check
from raybench.parallel.pipeline.schedules import SCHEDULES, build

if TYPE_CHECKING:
    from raybench.suite.track import Case, ModelConfig, Workload

TWINS: Mapping[str, str] = {
    "torch-gpipe": "gpipe",
    "torch-1f1b": "one-f-one-b",
    "torch-interleaved": "interleaved",
    "torch-interleaved-zero-bubble": "interleaved",
    "torch-zero-bubble": "zero-bubble",
    "torch-zbv": "zero-bubble-v",
}
"""The hand-written schedule whose placement of stages a peer shares."""
TORCH_BY_ROUNDS = ("torch-interleaved", "torch-interleaved-zero-bubble", "torch-zero-bubble")
"""Peers that take micro-batches in equal rounds of about one a rank."""


@dataclass(frozen=True)
class Plan:
    """How a case runs its pipeline."""

    strategy: str
    schedule: Schedule
    """A peer's is its twin's; only its placement and sizes count."""
    layers: tuple[int, ...] | None
    """Layers on each stage where the case says so; None to balance them."""


def make_plan(case: Case, workload: Workload) -> Plan:
    """The plan of a case whose sizes have been checked."""
    assert case.strategy.pipeline is not None
    schedule = build(
        TWINS.get(case.strategy.pipeline, case.strategy.pipeline),
        stages=case.layout.pipeline,
        micro_batches=num_micro_batches(case.options, workload.num_micro_batches),
        chunks=case.options.get("num_chunks"),
    )
    check(schedule)
    layers = case.options.get("layers")
    if layers is not None and _tells_layers(workload.model) and sum(layers) != workload.model.num_layers:
        layers = None  # the gate's smaller model
    return Plan(case.strategy.pipeline, schedule, None if layers is None else tuple(layers))


def num_micro_batches(options: Mapping[str, Any], of_workload: int) -> int:
    """Into how many micro-batches a case cuts its step."""
    return int(options.get("num_micro_batches", of_workload))


def check_sizes(case: Case, workload: Workload) -> None:
    """Refuse what the pipeline of a case cannot do with its workload.

    Raises:
        RequestError: with the nearest sizes that would work.
    """
    from raybench.suite.track import nearest_divisors

    name = case.strategy.pipeline
    if name is None:
        return
    twin = TWINS.get(name, name)
    samples = workload.micro_batch_size * workload.num_micro_batches
    micro_batches = num_micro_batches(case.options, workload.num_micro_batches)
    if samples % micro_batches:
        near = nearest_divisors(samples, micro_batches)
        raise RequestError(
            f"options.num_micro_batches: {micro_batches} does not divide the {samples} samples of a step "
            f"(nearest: {near})"
        )
    if name != twin:
        _check_peer(name, case.layout.pipeline, micro_batches)
    model = workload.model
    if not _tells_layers(model):
        return
    chunks = int(case.options.get("num_chunks", SCHEDULES[twin].chunks[0]))
    num_stages = case.layout.pipeline * chunks
    layers = case.options.get("layers")
    check_num_layers(model.num_layers, num_stages)
    if layers is not None:
        placed(layers, num_layers=model.num_layers, num_stages=num_stages)
    elif model.num_layers % chunks:
        near = nearest_divisors(model.num_layers, chunks)
        raise RequestError(
            f"options.num_chunks: {chunks} does not divide the model's {model.num_layers} layers (nearest: {near}; "
            "or say with options.layers how many each stage holds)"
        )


def _tells_layers(model: ModelConfig) -> bool:
    """Whether a model's configuration says how many layers it has; those of one's own are known once it is made."""
    return model.name in ("gpt", "timed") or model.family is not None


def _check_peer(name: str, num_ranks: int, micro_batches: int) -> None:
    """What torch's own schedules ask of the number of micro-batches."""
    if name == "torch-1f1b" and micro_batches < num_ranks:
        raise RequestError(
            f"num_micro_batches: {micro_batches} is less than the {num_ranks} stages, which {name} does not run "
            f"(nearest: {num_ranks})"
        )
    num_rounds = max(1, micro_batches // num_ranks)
    if name in TORCH_BY_ROUNDS and micro_batches % num_rounds:
        above = range(micro_batches, micro_batches + num_ranks * num_rounds + 1)
        near = [next(m for m in way if m % max(1, m // num_ranks) == 0) for way in (range(micro_batches, 0, -1), above)]
        raise RequestError(
            f"num_micro_batches: {micro_batches} is not a multiple of its {num_rounds} rounds of {num_ranks} ranks, "
            f"which {name} does not run (nearest: {near[0]}, {near[1]})"
        )
