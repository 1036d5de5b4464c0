"""One operation at one size: a window of repeats, the bytes that it sent, and whether its result is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from threading import Thread

import torch
import torch.distributed as dist

from raybench.comm.interface import Counters
from raybench.comm.operations import Buffers, Operation
from raybench.worker.clock import StepClock, synchronize
from raybench.worker.communication import Axis
from raybench.worker.messages import Row

NUM_WARMUP = 5
MIN_REPEATS, MAX_REPEATS = 5, 500
NUM_OVERLAPS = 7
"""Trials of an operation alone, of compute alone, and of both."""


@dataclass(frozen=True)
class Place:
    """Where a rank measures: in its group, among all ranks that measure at the same time."""

    axis: Axis
    """The group of the operation."""
    members: Axis
    """All ranks of all groups of its name."""
    device: torch.device
    counters: Counters | None
    """Of the first of the members on this rank's node; None for its others."""

    def agree(self, number: float) -> float:
        """The first member's number, on all members."""
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.broadcast(told, src=self.members.ranks[0], group=self.members.group)
        return float(told)


class Timed:
    """An operation at one size, warmed up."""

    def __init__(self, operation: Operation, place: Place, payload_bytes: int, dtype: torch.dtype) -> None:
        self.operation, self.place = operation, place
        self.length = operation.length(payload_bytes, dtype, place.axis.size)
        self.payload_bytes = self.length * dtype.itemsize
        self.buffers: Buffers = operation.buffers(place.axis, self.length, dtype, place.device)
        self._launch(0)
        place.members.barrier("warm-up")
        self.launch_s = place.agree(median(self._launch(repeat) for repeat in range(NUM_WARMUP)))
        """Roughly what one launch takes."""

    def _launch(self, repeat: int) -> float:
        """One launch, until it is complete; the seconds that it took."""
        begin = time.perf_counter()
        self.operation.launch(self.place.axis, self.buffers, repeat, False)
        synchronize(self.place.device)
        return time.perf_counter() - begin

    def num_repeats(self, seconds: float) -> int:
        """How many fit into so many seconds, within bounds."""
        return max(MIN_REPEATS, min(MAX_REPEATS, int(seconds / max(self.launch_s, 1e-9))))

    def measure(self, num_repeats: int) -> Row:
        """One window: repeats without any synchronisation between them, as nccl-tests times them; then one checked."""
        place, operation = self.place, self.operation
        clock = StepClock(place.device, num_repeats)
        launch, axis, buffers = operation.launch, place.axis, self.buffers
        place.members.barrier("window")
        sent = place.counters.read() if place.counters is not None else None
        place.members.barrier("counters")
        clock.start()
        for repeat in range(num_repeats):
            launch(axis, buffers, repeat, False)
            clock.step_ended()
        window_ns = clock.stop()
        place.members.barrier("window's end")
        counted = {} if place.counters is None or sent is None else place.counters.sent_since(sent)
        place.members.barrier("counters' end")
        return {
            "payload_bytes": self.payload_bytes,
            "num_repeats": num_repeats,
            "window_ns": window_ns,
            "durations_ns": [duration for _, duration in clock.steps()],
            "num_wrong": self.num_wrong(),
            "num_checked": len(self.buffers.received),
            **counted,
        }

    def num_wrong(self) -> int:
        """Elements that one repeat gets wrong on this rank."""
        self.operation.fill(self.place.axis, self.buffers)
        self.operation.launch(self.place.axis, self.buffers, 0, False)
        synchronize(self.place.device)
        return self.operation.num_wrong(self.place.axis, self.buffers, self.length)

    def overlap(self) -> Row:
        """How much longer the operation and matrix products take while the other runs, each ÷ its time alone."""
        place = self.place
        compute = Compute(place.device, place.agree(self.launch_s))
        alone, computing, both = (list[tuple[float, float]]() for _ in range(3))
        for _ in range(NUM_OVERLAPS):
            for times, with_operation, with_compute in (
                (alone, True, False),
                (computing, False, True),
                (both, True, True),
            ):
                place.members.barrier("overlap")
                times.append(self._beside(compute.run if with_compute else None, with_operation))
        operation_s = median(o for o, _ in alone)
        compute_s = median(c for _, c in computing)
        beside_operation_s, beside_compute_s = median(o for o, _ in both), median(c for _, c in both)
        return {
            "overlap_slowdown": slowdown(operation_s, beside_operation_s, beside_compute_s),
            "overlap_compute_slowdown": slowdown(compute_s, beside_compute_s, beside_operation_s),
        }

    def _beside(self, compute: Callable[[], None] | None, with_operation: bool) -> tuple[float, float]:
        """Seconds from the begin to the end of the operation and of the compute, begun together; 0 without one."""
        trial = _CudaTrial if self.place.device.type == "cuda" else _HostTrial
        launch = self.operation.launch if with_operation else None
        return trial(self.place.device).run(
            None if launch is None else lambda: launch(self.place.axis, self.buffers, 0, True), compute
        )


def slowdown(alone_s: float, beside_s: float, other_s: float) -> float | None:
    """How many times longer work takes while another runs, if it ended after `beside_s` and the other after `other_s`.

    What is left when the other has ended goes on as fast as alone: it is no part of the comparison. Work that stood
    still meanwhile counts as if a twentieth of it had been done. None where the other ended before it could be told.
    """
    together_s = min(beside_s, other_s)
    if together_s < 0.1 * alone_s:
        return None
    done_together = 1 - (beside_s - together_s) / alone_s
    return together_s / alone_s / max(done_together, 0.05)


class Compute:
    """Matrix products that take about as long as an operation."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
        self._left = torch.ones(size, size, dtype=dtype, device=device)
        self._product = torch.empty_like(self._left)
        self.num_products = 1
        self.run()
        synchronize(device)
        self.num_products = 8
        begin = time.perf_counter()
        self.run()
        synchronize(device)
        self.num_products = max(1, round(8 * seconds / (time.perf_counter() - begin)))

    def run(self) -> None:
        for _ in range(self.num_products):
            torch.mm(self._left, self._left, out=self._product)


class _HostTrial:
    """One trial on the host's clock: gloo works in threads of its own, and a thread here waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._ended_s = 0.0

    def run(
        self, launch: Callable[[], dist.Work | None] | None, compute: Callable[[], None] | None
    ) -> tuple[float, float]:
        begin = time.perf_counter()
        work = launch() if launch is not None else None
        waiting = Thread(target=self._wait, args=(work,), name="overlap")
        waiting.start()
        if compute is not None:
            compute()
        compute_s = time.perf_counter() - begin if compute is not None else 0.0
        waiting.join()
        return self._ended_s - begin if work is not None else 0.0, compute_s

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
        self._ended_s = time.perf_counter()


class _CudaTrial:
    """One trial by events of two streams: the operation's, and the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(
        self, launch: Callable[[], dist.Work | None] | None, compute: Callable[[], None] | None
    ) -> tuple[float, float]:
        begin, operation_end, compute_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize(self._device)
        begin.record()
        work = launch() if launch is not None else None
        if compute is not None:
            compute()
        compute_end.record()
        watching = torch.cuda.Stream(self._device)
        with torch.cuda.stream(watching):
            if work is not None:
                work.wait()
            operation_end.record(watching)
        torch.cuda.synchronize(self._device)
        ends = (operation_end if work is not None else None, compute_end if compute is not None else None)
        operation_s, compute_s = (0.0 if end is None else begin.elapsed_time(end) * 1e-3 for end in ends)
        return operation_s, compute_s


def different_payloads(operation: Operation, sizes: tuple[int, ...], dtype: torch.dtype, size: int) -> tuple[int, ...]:
    """The payloads that sizes come down to, cut to whole elements and parts, each once, ascending."""
    payloads = sorted({operation.length(bytes_, dtype, size) * dtype.itemsize for bytes_ in sizes})
    assert all(a < b for a, b in pairwise(payloads))
    return tuple(payloads)
