"""One measured round of a case: build, warm-up, the timed window, the instrumented steps, tear-down."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raybench.data.batches import Batch, Batches
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Case, ResolvedTrack
from raybench.worker.build import build_control, build_strategy
from raybench.worker.clock import ClockOffset, StepClock, synchronize, to_host
from raybench.worker.communication import Axis, Operation, Recorder
from raybench.worker.memory import ActivationMeter, peak_device_bytes, peak_rss_bytes, reset_peaks
from raybench.worker.mesh import Mesh


@dataclass(frozen=True)
class ControlTime:
    """The control's window: one process on one data rank's batch."""

    window_ns: int
    tokens: int


@dataclass
class Measurement:
    """What one rank measured in one round, as columns of the store."""

    run: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    """Why the round does not count."""


@dataclass(frozen=True)
class Window:
    """N steps without synchronising between them."""

    own_ns: int
    """From the start to this rank's end."""
    times: list[tuple[int, int]]
    losses: list[float]
    gradient_norms: list[float]


def time_control(track: ResolvedTrack, rank: int, device: torch.device, recorder: Recorder) -> ControlTime:
    """Time the workload of one data rank on this process alone."""
    recorder.marks.mark("timing the control")
    workload, plan = track.workload, track.measure
    _set_tf32(workload.tf32)
    control = build_control(workload, rank, device, recorder)
    source = Batches(workload, 1)
    batches = [source.batch(step, 0).to(device) for step in range(plan.num_warmup_steps + plan.num_steps)]
    for batch in batches[: plan.num_warmup_steps]:
        control.step(batch)
    timed = batches[plan.num_warmup_steps :]
    window = _time_window(control, timed, device)
    control.close()
    del control
    _release(device)
    return ControlTime(window.own_ns, sum(batch.num_tokens for batch in timed))


def measure(
    track: ResolvedTrack,
    case: Case,
    mesh: Mesh,
    device: torch.device,
    recorder: Recorder,
    offset: ClockOffset,
) -> Measurement:
    """Measure one round; every rank of the case calls it together."""
    workload, plan = track.workload, track.measure
    marks = recorder.marks
    marks.mark("building the strategy")
    _set_tf32(workload.tf32)
    reset_peaks(device)
    began = time.perf_counter_ns()
    torch.manual_seed(workload.seed + mesh.all.index)
    strategy = build_strategy(workload, case, mesh, device)
    source = Batches(workload, case.layout.data)
    num_timed = plan.num_warmup_steps + plan.num_steps
    num_extra = plan.num_instrumented_steps + 1 if plan.num_instrumented_steps else 0
    batches = [source.batch(step, mesh.data.index).to(device) for step in range(num_timed + num_extra)]
    built = time.perf_counter_ns()

    marks.mark("warm-up")
    for batch in batches[: plan.num_warmup_steps]:
        strategy.step(batch)
    synchronize(device)
    warm = time.perf_counter_ns()

    timed = batches[plan.num_warmup_steps : num_timed]
    mesh.all.barrier("before the window")
    window = _time_window(strategy, timed, device)
    peak_device = peak_device_bytes(device)
    peak_rss = peak_rss_bytes()
    bytes_held = strategy.state_bytes()
    num_parameters = sum(p.numel() for _, p in strategy.full_parameters())
    window_ns = max(mesh.all.gather_objects(window.own_ns))

    instrumented = time.perf_counter_ns()
    recorder.operations.clear()
    recorder.spans.found.clear()
    all_recorded = strategy.instrument()
    for index, batch in enumerate(batches[num_timed : num_timed + plan.num_instrumented_steps]):
        with recorder.recording(step=num_timed + index):
            strategy.step(batch)
    operations = list(recorder.operations) if all_recorded else []
    spans = list(recorder.spans.found) if all_recorded else []
    activation_bytes = _activation_bytes(strategy, batches[-1]) if num_extra else None
    waits = _waits(operations, [mesh.data, mesh.pipeline, mesh.tensor, mesh.all], offset)
    finished = time.perf_counter_ns()

    strategy.close()
    del strategy
    _release(device)
    result = Measurement()
    if not all(map(math.isfinite, window.losses)):
        bad = next(i for i, loss in enumerate(window.losses) if not math.isfinite(loss))
        result.reason = f"loss is {window.losses[bad]} in step {plan.num_warmup_steps + bad}"
        return result
    result.run = {
        "num_parameters": num_parameters,
        "window_ns": window_ns,
        "tokens": sum(batch.num_tokens for batch in timed),
        "loss": window.losses[-1],
        "build_ns": built - began,
        "warmup_ns": warm - built,
        "instrumented_ns": finished - instrumented,
    }
    result.ranks = {
        "parameter_bytes": bytes_held.parameters,
        "gradient_bytes": bytes_held.gradients,
        "optimizer_bytes": bytes_held.optimizer,
        "activation_bytes": activation_bytes,
        "peak_device_bytes": peak_device,
        "peak_rss_bytes": peak_rss,
    }
    result.steps = [
        {
            "step": plan.num_warmup_steps + index,
            "begin_ns": begin,
            "duration_ns": duration,
            "loss": window.losses[index],
            "gradient_norm": window.gradient_norms[index],
            "tokens": timed[index].num_tokens,
        }
        for index, (begin, duration) in enumerate(window.times)
    ]
    result.operations = [
        {
            "sequence": o.sequence,
            "step": o.step,
            "kind": o.kind,
            "label": o.label,
            "axis": o.axis,
            "group_size": o.group_size,
            "payload_bytes": o.payload_bytes,
            "wire_bytes": o.wire_bytes,
            "begin_ns": o.begin_ns,
            "end_ns": o.end_ns,
            "wait_ns": waits[o.sequence],
            "exposed_ns": o.exposed_ns,
        }
        for o in operations
    ]
    result.operations += [
        {
            "sequence": len(operations) + index,
            "step": span.step,
            "kind": span.kind,
            "label": span.label or None,
            "begin_ns": span.begin_ns,
            "end_ns": span.end_ns,
        }
        for index, span in enumerate(spans)
    ]
    return result


def _time_window(strategy: Strategy, batches: Sequence[Batch], device: torch.device) -> Window:
    clock = StepClock(device, len(batches))
    losses, gradient_norms = [], []
    gc.collect()
    gc.disable()
    try:
        clock.start()
        for batch in batches:
            losses.append(strategy.step(batch))
            gradient_norms.append(strategy.gradient_norm)
            clock.step_ended()
        own_ns = clock.stop()
    finally:
        gc.enable()
    return Window(own_ns, clock.steps(), to_host(losses), to_host(gradient_norms))


def _activation_bytes(strategy: Strategy, batch: Batch) -> int:
    """Most bytes that autograd kept at one time for the backward of a step."""
    excluded = [p for _, p in strategy.full_parameters()]
    with ActivationMeter(excluded) as meter:
        strategy.step(batch)
    return meter.peak_bytes


def _waits(operations: Sequence[Operation], axes: Sequence[Axis], offset: ClockOffset) -> dict[int, int]:
    """Of each collective, how long this rank waited for the last one of its group to begin; by sequence number."""
    waits: dict[int, int] = {}
    for axis in axes:
        own = [o for o in operations if o.axis == axis.name]
        begins = axis.gather_objects([o.begin_ns + offset.offset_ns for o in own])
        if len({len(theirs) for theirs in begins}) > 1:
            continue
        for operation, times in zip(own, zip(*begins, strict=True), strict=True):
            last = max(times) - offset.offset_ns
            waits[operation.sequence] = max(0, min(last, operation.end_ns) - operation.begin_ns)
    return {o.sequence: waits.get(o.sequence, 0) for o in operations}


def _set_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
