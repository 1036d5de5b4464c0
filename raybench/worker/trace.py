"""Traced steps behind a round's window: one rank's trace, with what raybench knows written into it."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from raybench.data.batches import Batch
from raybench.parallel.strategy import Strategy
from raybench.traces.label import ACTION, PHASE, Label
from raybench.worker.clock import synchronize
from raybench.worker.recorder import Recorder
from raybench.worker.spans import Span

TAIL_BYTES = 1 << 16
"""Of a trace, behind its events: its time base may be there."""


@dataclass(frozen=True, kw_only=True)
class TracePlan:
    """What to trace of a round."""

    num_steps: int
    with_nsys: bool
    """nsys watches the process, so ranges are NVTX's and no file is made here."""
    about: dict[str, Any]
    """Suite, track, case, round, ranks and clock offset, as they shall stand in the trace."""

    @property
    def num_batches(self) -> int:
        """One more than is traced: in the first step profilers start."""
        return self.num_steps + 1


class Annotations:
    """Ranges by the names of the operations that are launched in them."""

    def __init__(self, with_nsys: bool) -> None:
        self._with_nsys = with_nsys
        self._open: AbstractContextManager[object] | None = None

    def launch(self, label: Label) -> None:
        """An operation is about to be launched."""
        self.launched()  # what nobody has closed
        name = str(label)
        self._open = torch.cuda.nvtx.range(name) if self._with_nsys else record_function(name)
        self._open.__enter__()

    def launched(self) -> None:
        """It is launched."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def record_trace(
    plan: TracePlan, strategy: Strategy, batches: Sequence[Batch], recorder: Recorder, first_step: int
) -> bytes | None:
    """Run some steps under a profiler; every rank of a case calls it together.

    Args:
        batches: `plan.num_batches` of them.
        first_step: Number of the first one's step.

    Returns:
        The trace, packed by gzip; None under nsys, which keeps its own.
    """
    recorder.operations.clear()
    recorder.spans.found.clear()
    recorder.annotations = Annotations(plan.with_nsys)
    try:
        if plan.with_nsys:
            _under_nsys(strategy, batches, recorder, first_step)
            return None
        return _under_torch(plan, strategy, batches, recorder, first_step)
    finally:
        recorder.annotations.launched()
        recorder.annotations = None


def _under_torch(
    plan: TracePlan, strategy: Strategy, batches: Sequence[Batch], recorder: Recorder, first_step: int
) -> bytes:
    last_step = first_step + len(batches) - 1

    def action(step: int) -> ProfilerAction:
        if step <= first_step:
            return ProfilerAction.WARMUP
        if step < last_step:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if step == last_step else ProfilerAction.NONE

    activities = [ProfilerActivity.CPU]
    if recorder.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with TemporaryDirectory(prefix="raybench-trace-") as folder:
        path = Path(folder) / "trace.json.gz"
        profiler = profile(
            activities=activities,
            schedule=action,
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
            profile_memory=True,
        )
        profiler.step_num = first_step
        with profiler:
            for index, batch in enumerate(batches):
                with recorder.recording(step=first_step + index):
                    strategy.step(batch)
                    if index == len(batches) - 1:
                        strategy.settle()  # what the next step would wait for
                synchronize(recorder.device)
                profiler.step()
                if index == 0:
                    profiler.add_metadata_json("raybench", json.dumps(plan.about))
        spans = [span for span in recorder.spans.found if first_step < span.step <= last_step]
        return with_spans(path.read_bytes(), spans, recorder.device)


def with_spans(trace: bytes, spans: Sequence[Span], device: torch.device) -> bytes:
    """A trace with a rank's forwards, backwards, optimizer steps and pipeline actions as annotations of their own.

    The recorder's times on a GPU are the compute stream's, so there they are annotations of the GPU.
    """
    document = gzip.decompress(trace)
    begin = re.search(rb'"traceEvents":\s*\[', document)
    if begin is None:
        raise RuntimeError("torch.profiler's trace has no events")
    around = document[: begin.end()] + document[-TAIL_BYTES:]
    base = re.search(rb'"baseTimeNanoseconds":\s*(\d+)', around)  # before or behind the events, by version
    base_ns = int(base[1]) if base is not None else 0
    on_gpu = device.type == "cuda"
    place = {
        "ph": "X",
        "cat": "gpu_user_annotation" if on_gpu else "user_annotation",
        "pid": torch.cuda.current_device() if on_gpu else os.getpid(),
        "tid": "raybench",
    }
    events = [
        {
            **place,
            "name": f"{ACTION}{span.label}" if span.label else f"{PHASE}{span.kind}",
            "ts": (span.begin_ns - base_ns) / 1000,
            "dur": (span.end_ns - span.begin_ns) / 1000,
        }
        for span in spans
        if span.kind != "step"  # the profiler marks steps itself
    ]
    more = "".join(json.dumps(event) + ",\n" for event in events).encode()
    return gzip.compress(document[: begin.end()] + more + document[begin.end() :], compresslevel=6)


def _under_nsys(strategy: Strategy, batches: Sequence[Batch], recorder: Recorder, first_step: int) -> None:
    strategy.step(batches[0])
    synchronize(recorder.device)
    torch.cuda.profiler.start()
    for step, batch in enumerate(batches[1:], first_step + 1):
        with torch.cuda.nvtx.range(f"ProfilerStep#{step}"), recorder.recording(step):
            strategy.step(batch)
    strategy.settle()
    synchronize(recorder.device)
    torch.cuda.profiler.stop()
