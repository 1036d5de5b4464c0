"""What a plan will take, before it runs: memory from sizes; time from FLOPs, this machine's speed, and waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from raybench.models.flops import flops_per_token, num_parameters
from raybench.suite.plan import TrackPlan
from raybench.suite.track import TIMES_MS, Case, ResolvedTrack, Workload

JOB_START_S = 20.0
"""Seconds that starting a job's workers and leaving takes, roughly."""
ROUND_OVERHEAD_S = 1.0
GATE_STEPS = 5
"""Steps that the gate takes with each case, and with the control on one process for each of the case's ranks."""
GPU_FLOPS_PER_S = 20e12
"""fp32 of a data-centre GPU, as an order of magnitude: GPUs are not measured before a run."""
CORE_FLOPS_PER_S = 50e9
"""fp32 of a CPU's core, as an order of magnitude, where it is not measured."""
USED_SHARE = 0.5
"""Of the speed of a large product that a whole step reaches on a CPU, roughly."""
FLOPS_PER_TOKEN_OF_OWN_MODEL = 6e7
"""A guess: as of ten million parameters."""


@dataclass(frozen=True)
class Estimate:
    """An order of magnitude, not a promise."""

    seconds: float
    case_bytes: dict[str, int | None]
    """Peak bytes a rank of every case; None where the model is one's own."""


def estimate_track(plan: TrackPlan, core_flops_per_s: float = CORE_FLOPS_PER_S) -> Estimate:
    """Time of the whole track and memory of its cases."""
    track = plan.track
    seconds = 0.0
    if plan.runnable:
        flops = sum(_case_flops(plan, case) for case in plan.runnable) + _control_flops(plan)
        rounds = track.measure.num_rounds * len(plan.runnable)
        work_s = flops / _work_per_s(plan, core_flops_per_s) + _waiting_s(plan)
        seconds = JOB_START_S + ROUND_OVERHEAD_S * rounds + work_s
    return Estimate(seconds, {case.name: rank_bytes(track, case) for case in track.cases})


def _waiting_s(plan: TrackPlan) -> float:
    """Seconds of all rounds in which a timed model waits, which ranks do side by side whatever cores they share."""
    measure = plan.track.measure
    timed = measure.num_steps + measure.num_warmup_steps
    alone = {
        work.hash: step_waiting_s(work, Case(name="control")) for work in map(plan.track.workload_of, plan.runnable)
    }
    seconds = measure.num_rounds * timed * sum(alone.values())
    for case in plan.runnable:
        work = plan.track.workload_of(case)
        steps = measure.num_rounds * (timed + measure.num_instrumented_steps) + GATE_STEPS
        seconds += steps * step_waiting_s(work, case) + GATE_STEPS * case.layout.data * alone[work.hash]
    return seconds


def _case_flops(plan: TrackPlan, case: Case) -> float:
    """FLOPs of all rounds of one case, over all its ranks where those share cores, else of one."""
    measure = plan.track.measure
    steps = measure.num_rounds * (measure.num_steps + measure.num_warmup_steps + measure.num_instrumented_steps)
    one = rank_flops(plan.track.workload_of(case), case)
    at_once = 1 if _has_own_device(plan) else case.layout.num_ranks
    gate = GATE_STEPS * (at_once + case.layout.num_ranks)
    return one * (steps * at_once + gate)


def _control_flops(plan: TrackPlan) -> float:
    """FLOPs of the control's windows, one a round for each batch that a data rank takes."""
    measure = plan.track.measure
    steps = measure.num_rounds * (measure.num_steps + measure.num_warmup_steps)
    workloads = {work.hash: work for work in map(plan.track.workload_of, plan.runnable)}
    return steps * sum(rank_flops(work, Case(name="control")) for work in workloads.values())


def _has_own_device(plan: TrackPlan) -> bool:
    return plan.placement is None or plan.placement.use_gpu or plan.placement.cpus_per_rank >= 1


def _work_per_s(plan: TrackPlan, core_flops_per_s: float) -> float:
    """FLOPs a second: of one rank where each has its own device or cores, else of all cores that are shared."""
    placement = plan.placement
    if placement is None or placement.use_gpu:
        return GPU_FLOPS_PER_S
    ranks = 1 if _has_own_device(plan) else placement.num_ranks
    return USED_SHARE * core_flops_per_s * placement.cpus_per_rank * ranks


def rank_flops(work: Workload, case: Case) -> float:
    """FLOPs of one step on one rank."""
    tokens = work.samples_per_rank * work.sequence_length
    per_token = _flops_per_token(work)
    recompute = 4 / 3 if work.recompute == "full" else 1.0
    return tokens * per_token * recompute / (case.layout.pipeline * case.layout.tensor)


def _flops_per_token(work: Workload) -> float:
    model, known = work.model, flops_per_token(work)
    if model.name == "timed":
        return 6.0 * model.vocabulary_size * model.width  # its head's; its blocks wait
    return FLOPS_PER_TOKEN_OF_OWN_MODEL if known is None else known["non_causal"]


def step_waiting_s(work: Workload, case: Case) -> float:
    """Seconds of one step in which a timed model waits, with the bubble of 1F1B; 0 for other models."""
    if work.model.name != "timed":
        return 0.0
    block_s = sum(float(work.model.options.get(name, 0.0)) for name in TIMES_MS) / 1e3 / case.layout.tensor
    blocks = work.model.num_layers / case.layout.pipeline
    return (work.num_micro_batches + case.layout.pipeline - 1) * blocks * block_s


def rank_bytes(track: ResolvedTrack, case: Case) -> int | None:
    """Parameters, gradients and optimizer state in fp32, and activations, of one rank (at the given micro-batch)."""
    work = track.workload_of(case)
    parameters = num_parameters(work)
    if parameters is None:
        return None
    layout = case.layout
    mine = parameters / (layout.pipeline * layout.tensor)
    sharded = _sharded(case.strategy.data)
    ranks = layout.data
    states = [4 * mine, 4 * mine, (8 if work.optimizer.name == "adamw" else 0) * mine]
    for index in sharded:
        states[index] /= ranks
    tokens = work.micro_batch_size * work.sequence_length
    width = 2 if work.precision == "bf16" else 4
    model = work.model
    kept = model.width if work.recompute == "full" else 8 * model.width + 2 * model.ffn_width
    scores = 0 if work.recompute == "full" else model.num_heads * work.sequence_length
    layers = model.num_layers / layout.pipeline
    in_flight = layout.pipeline
    activations = tokens * layers * (kept + scores) * width * in_flight / layout.tensor
    logits = 3 * tokens * model.vocabulary_size * 4 / layout.tensor
    return int(sum(states) + activations + logits)


def _sharded(data_strategy: str | None) -> tuple[int, ...]:
    """Which of parameters, gradients and optimizer state a data strategy shards."""
    kinds = {"zero1": (2,), "zero2": (1, 2), "zero3": (0, 1, 2), "hybrid-sharded": (0, 1, 2)}
    return kinds.get(data_strategy or "", ())


def measure_core_flops_per_s() -> float:
    """fp32 products of one core of this machine: the quickest of 50, as others may use it too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left = torch.ones(384, 384)
        return 2 * 384**3 / min(_seconds_of(left.matmul, left) for _ in range(50))
    finally:
        torch.set_num_threads(threads)


def _seconds_of(function: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin
