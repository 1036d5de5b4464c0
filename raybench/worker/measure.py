"""One measured round of a case: build, warm-up, the timed window, the instrumented steps, tear-down."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raybench.data.batches import Batch, Batches
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Case, ResolvedTrack
from raybench.worker.build import build_control, build_strategy, seed_randomness
from raybench.worker.channel import RECEIVE, SEND, waits_for_peer
from raybench.worker.clock import ClockOffset, StepClock, synchronize, to_host
from raybench.worker.communication import Axis
from raybench.worker.evaluate import evaluate
from raybench.worker.heap import give_back_freed_memory
from raybench.worker.memory import ActivationMeter, peak_device_bytes, peak_rss_bytes, reset_peaks
from raybench.worker.mesh import Mesh
from raybench.worker.recorder import Operation, Recorder
from raybench.worker.trace import TracePlan, record_trace


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
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """The same on every rank."""
    operations: list[dict[str, Any]] = field(default_factory=list)
    trace: bytes | None = None
    """A traced round's, packed by gzip."""
    reason: str | None = None
    """Why the round does not count."""


@dataclass(frozen=True)
class Window:
    """N steps without synchronising between them; where the track evaluates, several such spans together."""

    own_ns: int
    """From the start to this rank's end."""
    times: list[tuple[int, int]]
    losses: list[float]
    gradient_norms: list[float]
    all_ns: int = 0
    """From the start to the last rank's end."""
    peak_device: int | None = None
    peak_rss: int = 0


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
    release(device)
    return ControlTime(window.own_ns, sum(batch.num_read for batch in timed))


def measure(
    track: ResolvedTrack,
    case: Case,
    mesh: Mesh,
    device: torch.device,
    recorder: Recorder,
    offset: ClockOffset,
    tracing: TracePlan | None = None,
) -> Measurement:
    """Measure one round; every rank of the case calls it together."""
    workload, plan = track.workload, track.measure
    marks = recorder.marks
    marks.mark("building the strategy")
    _set_tf32(workload.tf32)
    reset_peaks(device)
    began = time.perf_counter_ns()
    seed_randomness(workload, mesh)
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
    window, evaluations = _window(track, strategy, timed, mesh, device)
    bytes_held = strategy.state_bytes()
    num_parameters = sum(p.numel() for _, p in strategy.full_parameters())

    instrumented = time.perf_counter_ns()
    recorder.operations.clear()
    recorder.spans.found.clear()
    all_recorded = strategy.instrument()
    for index, batch in enumerate(batches[num_timed : num_timed + plan.num_instrumented_steps]):
        with recorder.recording(step=num_timed + index):
            strategy.step(batch)
    operations = list(recorder.operations) if all_recorded else []
    spans = list(recorder.spans.found) if all_recorded else []
    activations = activation_bytes(strategy, batches[-1]) if num_extra else None
    waits = _waits(operations, list(dict.fromkeys(mesh.axes.values())), offset)
    waits.update(waits_for_peer(operations, mesh.pipeline, offset))
    finished = time.perf_counter_ns()
    trace = None
    if tracing is not None:
        marks.mark("tracing")
        more = [source.batch(len(batches) + i, mesh.data.index).to(device) for i in range(tracing.num_batches)]
        trace = record_trace(tracing, strategy, more, recorder, len(batches))

    strategy.close()
    del strategy
    release(device)
    result = Measurement(evaluations=evaluations, trace=trace)
    if not all(map(math.isfinite, window.losses)):
        bad = next(i for i, loss in enumerate(window.losses) if not math.isfinite(loss))
        result.reason = f"loss is {window.losses[bad]} in step {plan.num_warmup_steps + bad}"
        return result
    result.run = {
        "num_parameters": num_parameters,
        "window_ns": window.all_ns,
        "tokens": sum(batch.num_read for batch in timed),
        "loss": window.losses[-1],
        "build_ns": built - began,
        "warmup_ns": warm - built,
        "instrumented_ns": finished - instrumented,
    }
    result.ranks = {
        "parameter_bytes": bytes_held.parameters,
        "gradient_bytes": bytes_held.gradients,
        "optimizer_bytes": bytes_held.optimizer,
        "activation_bytes": activations,
        "peak_device_bytes": window.peak_device,
        "peak_rss_bytes": window.peak_rss,
    }
    result.steps = [
        {
            "step": plan.num_warmup_steps + index,
            "begin_ns": begin,
            "duration_ns": duration,
            "loss": window.losses[index],
            "gradient_norm": window.gradient_norms[index],
            "tokens": timed[index].num_read,
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
            "launch_ns": o.launch_ns,
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


def _window(
    track: ResolvedTrack, strategy: Strategy, batches: Sequence[Batch], mesh: Mesh, device: torch.device
) -> tuple[Window, list[dict[str, Any]]]:
    """The timed window and its evaluations, for which clock and memory peaks stand still."""
    every = track.evaluate.every_steps if track.evaluate else len(batches)
    spans: list[Window] = []
    evaluations: list[dict[str, Any]] = []
    for first in range(0, len(batches), every):
        span = batches[first : first + every]
        mesh.all.barrier("before the window")
        timed = _time_window(strategy, span, device)
        peak_device, peak_rss = peak_device_bytes(device), peak_rss_bytes()
        all_ns = max(mesh.all.gather_objects(timed.own_ns))
        spans.append(replace(timed, all_ns=all_ns, peak_device=peak_device, peak_rss=peak_rss))
        if track.evaluate is not None:
            mesh.recorder.marks.mark("evaluating")
            step = track.measure.num_warmup_steps + first + len(span) - 1
            row = evaluate(track.workload, strategy, mesh, device, num_samples=track.evaluate.num_samples)
            evaluations.append({"step": step, **row})
            gc.collect()
            reset_peaks(device)
    return _joined(spans), evaluations


def _joined(spans: Sequence[Window]) -> Window:
    devices = [span.peak_device for span in spans if span.peak_device is not None]
    return Window(
        own_ns=sum(span.own_ns for span in spans),
        times=[time for span in spans for time in span.times],
        losses=[loss for span in spans for loss in span.losses],
        gradient_norms=[norm for span in spans for norm in span.gradient_norms],
        all_ns=sum(span.all_ns for span in spans),
        peak_device=max(devices, default=None),
        peak_rss=max(span.peak_rss for span in spans),
    )


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
        strategy.settle()
        own_ns = clock.stop()
    finally:
        gc.enable()
    return Window(own_ns, clock.steps(), to_host(losses), to_host(gradient_norms))


def activation_bytes(strategy: Strategy, batch: Batch) -> int:
    """Most bytes that autograd kept at one time for the backward of a step."""
    with ActivationMeter(list(strategy.held_parameters())) as meter:
        strategy.step(batch)
    return meter.peak_bytes


def _waits(operations: Sequence[Operation], axes: Sequence[Axis], offset: ClockOffset) -> dict[int, int]:
    """Of each collective, how long this rank waited for the last one of its group to begin; by sequence number."""
    waits: dict[int, int] = {}
    for axis in axes:
        own = [o for o in operations if o.axis == axis.name and o.kind not in (SEND, RECEIVE)]
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


def release(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()
