"""What a plan will take, before it runs: memory from sizes, time from FLOPs and this machine's measured speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from raybench.models.flops import flops_per_token, num_parameters
from raybench.suite.plan import TrackPlan
from raybench.suite.track import Case, ResolvedTrack, Workload

JOB_START_S = 20.0
"""Seconds that starting a job's workers and leaving takes, roughly."""
ROUND_OVERHEAD_S = 1.0
GATE_STEPS = 5
"""Steps that the gate takes with each case, and with the control on one process for each of the case's ranks."""
GPU_FLOPS_PER_S = 20e12
"""fp32 of a data-centre GPU, as an order of magnitude: GPUs are not measured before a run."""
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


def estimate_track(plan: TrackPlan) -> Estimate:
    """Time of the whole track and memory of its cases."""
    track = plan.track
    seconds = JOB_START_S if plan.runnable else 0.0
    for case in plan.runnable:
        seconds += case_seconds(plan, case)
    if plan.runnable:
        seconds += control_seconds(plan)
    return Estimate(seconds, {case.name: rank_bytes(track, case) for case in track.cases})


def case_seconds(plan: TrackPlan, case: Case) -> float:
    """All rounds of one case."""
    measure = plan.track.measure
    step_s = rank_flops(plan.track.workload, case) / _speed(plan, case)
    steps = measure.num_steps + measure.num_warmup_steps + measure.num_instrumented_steps
    gate = GATE_STEPS * (1 + case.layout.num_ranks)
    return measure.num_rounds * (steps * step_s + ROUND_OVERHEAD_S) + gate * step_s


def control_seconds(plan: TrackPlan) -> float:
    """The control's windows, one a round."""
    measure = plan.track.measure
    step_s = rank_flops(plan.track.workload, Case(name="control")) / _speed(plan, Case(name="control"))
    return measure.num_rounds * (measure.num_steps + measure.num_warmup_steps) * step_s


def rank_flops(work: Workload, case: Case) -> float:
    """FLOPs of one step on one rank."""
    tokens = work.micro_batch_size * work.num_micro_batches * work.sequence_length
    known = flops_per_token(work)
    per_token = FLOPS_PER_TOKEN_OF_OWN_MODEL if known is None else known["non_causal"]
    recompute = 4 / 3 if work.recompute == "full" else 1.0
    return tokens * per_token * recompute / (case.layout.pipeline * case.layout.tensor)


def rank_bytes(track: ResolvedTrack, case: Case) -> int | None:
    """Parameters, gradients and optimizer state in fp32, and activations, of one rank."""
    work = track.workload
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


def _speed(plan: TrackPlan, case: Case) -> float:
    """FLOPs a second of one rank."""
    if plan.backend == "nccl":
        return GPU_FLOPS_PER_S
    placement = plan.placement
    cores = 1.0 if placement is None else placement.cpus_per_rank
    idle = 1.0 if placement is None else placement.num_ranks / case.layout.num_ranks
    return USED_SHARE * core_flops_per_s() * max(min(cores * idle, 1.0), cores)


@cache
def core_flops_per_s() -> float:
    """fp32 products of one core of this machine, measured in a fraction of a second."""
    import time

    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left = torch.ones(384, 384)
        (left @ left).sum()
        begin, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < 0.1:
            (left @ left).sum()
            count += 1
        return 2 * 384**3 * count / passed
    finally:
        torch.set_num_threads(threads)
