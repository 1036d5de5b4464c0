"""Times: one clock a rank, in nanoseconds, and how far it is from the first rank's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

NUM_EXCHANGES = 20


@dataclass(frozen=True)
class ClockOffset:
    """Add `offset_ns` to a time of this rank to have the first rank's; it is right to ± `error_ns`."""

    offset_ns: int
    error_ns: int


def measure_offset(rank: int, nodes: Sequence[str], device: torch.device) -> ClockOffset:
    """This rank's clock against rank 0's, by Cristian's method (1989): the exchange with the shortest round trip.

    The first rank of each node asks rank 0; ranks of one node share a clock. Every rank of the job has to call.
    """
    offsets: dict[str, ClockOffset] = {nodes[0]: ClockOffset(0, 0)}
    for other, node in enumerate(nodes):
        if node in offsets:
            continue
        pair = torch.zeros(2, dtype=torch.int64, device=device)
        if rank == other:
            offset = _ask(device)
            pair = torch.tensor([offset.offset_ns, offset.error_ns], dtype=torch.int64, device=device)
        elif rank == 0:
            _answer(other, device)
        dist.broadcast(pair, src=other)
        offsets[node] = ClockOffset(int(pair[0]), int(pair[1]))
    return offsets[nodes[rank]]


def _ask(device: torch.device) -> ClockOffset:
    best: ClockOffset | None = None
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(NUM_EXCHANGES):
        sent = time.time_ns()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = int(message)
        received = time.time_ns()
        round_trip = received - sent
        if best is None or round_trip // 2 < best.error_ns:
            best = ClockOffset(theirs - (sent + received) // 2, round_trip // 2)
    assert best is not None
    return best


def _answer(other: int, device: torch.device) -> None:
    for _ in range(NUM_EXCHANGES):
        message = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(message, other)
        dist.send(torch.tensor([time.time_ns()], dtype=torch.int64, device=device), other)


class StepClock:
    """Begin and duration of every step of a window, without synchronising between them.

    On a GPU the times come from events of the compute stream, on a CPU from the host clock.
    """

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self.device = device
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)] if device.type == "cuda" else None
        )
        self._times: list[int] = []
        self._origin_ns = 0

    def start(self) -> None:
        synchronize(self.device)
        self._origin_ns = time.time_ns()
        self._times = [time.perf_counter_ns()]
        if self._events is not None:
            self._events[0].record()

    def step_ended(self) -> None:
        if self._events is not None:
            self._events[len(self._times)].record()
        self._times.append(time.perf_counter_ns())

    def stop(self) -> int:
        """One synchronisation; the nanoseconds since `start`."""
        synchronize(self.device)
        return time.perf_counter_ns() - self._times[0]

    def steps(self) -> list[tuple[int, int]]:
        """(begin, duration) of each step in nanoseconds, begin as UNIX time of this rank's clock."""
        if self._events is None:
            ends = [t - self._times[0] for t in self._times]
        else:
            first = self._events[0]
            ends = [int(first.elapsed_time(event) * 1e6) for event in self._events[: len(self._times)]]
        return [(self._origin_ns + a, b - a) for a, b in pairwise(ends)]


def synchronize(device: torch.device) -> None:
    """Return once all work given to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_host(values: Sequence[Tensor]) -> list[float]:
    """Scalar tensors as numbers, fetched in one go."""
    return torch.stack([v.detach().float() for v in values]).tolist() if values else []
