"""The largest micro-batch that a case's ranks have memory for: what `micro_batch: largest` asks for.

A size is tried by building the case anew and taking two steps, the second with the optimizer's state in place. What a
rank takes is then, on a GPU, the peak of the device's allocator; on a CPU, where a peak says more about the C library
than about the case, the counted parameters, gradients, optimizer state and activations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed import DistStoreError

from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.suite.track import Case, ResolvedTrack, Workload
from raybench.worker.build import build_strategy
from raybench.worker.clock import synchronize
from raybench.worker.measure import activation_bytes, release
from raybench.worker.memory import peak_device_bytes, reset_peaks
from raybench.worker.mesh import Mesh
from raybench.worker.presence import classify
from raybench.worker.recorder import Recorder
from raybench.worker.rendezvous import Rendezvous

MOST_SEQUENCES = 2**20
DEVICE_SHARE = 0.9
"""Of a GPU's free memory: the rest is for what the allocator does not count, such as fragments and NCCL's buffers."""
OTHERS_S = 60.0
"""How long a rank that ran out of memory waits for the others to say that they did too."""


@dataclass(frozen=True)
class Fitting:
    """What a search found."""

    micro_batch_size: int | None
    """None where not even one sequence fits."""
    limit_bytes: int
    tried: Mapping[int, int | None] = field(default_factory=dict)
    """Bytes that the fullest rank took with each size that was tried; None where it ran out of memory."""

    @property
    def reason(self) -> str:
        """Why nothing fits, in words."""
        used = self.tried.get(1)
        takes = "a rank runs out of memory" if used is None else f"it takes {_mib(used)} on the fullest rank"
        return f"not even a micro-batch of one sequence fits: {takes}, allowed is {_mib(self.limit_bytes)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def search(try_size: Callable[[int], int | None], *, limit_bytes: int, most: int = MOST_SEQUENCES) -> Fitting:
    """Double the size from one until it does not fit, then bisect.

    Args:
        try_size: bytes that the fullest rank takes with a size; None where a rank ran out of memory.
        most: largest size that is allowed for other reasons than memory.
    """
    tried: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        if _forecast(tried, size) > limit_bytes:
            return False
        tried[size] = used = try_size(size)
        return used is not None and used <= limit_bytes

    fitting, failing, size = 0, most + 1, 1
    while failing - fitting > 1:
        if fits(size):
            fitting = size
        else:
            failing = size
        size = min(2 * fitting, most) if failing > most else (fitting + failing) // 2
    return Fitting(fitting or None, limit_bytes, tried)


def _forecast(tried: Mapping[int, int | None], size: int) -> float:
    """Least bytes that a size larger than two that were tried can take; 0 where nothing is known.

    A rank's peak is the largest of sums that each grow linearly with the micro-batch: convex, so that it never lies
    under the line through two smaller sizes. What that line excludes need not be tried, and on a GPU must not be: a
    rank that runs out of memory leaves others in a collective.
    """
    known = sorted((s, used) for s, used in tried.items() if used is not None and s < size)[-2:]
    if len(known) < 2:
        return 0.0
    (first, low), (second, high) = known
    return high + (high - low) / (second - first) * (size - second)


@dataclass(frozen=True)
class Fitter:
    """Searches for the cases of one job, seen from one rank."""

    device: torch.device
    recorder: Recorder
    rendezvous: Rendezvous

    def run(self, track: ResolvedTrack, case: Case, mesh: Mesh) -> Fitting:
        """The largest micro-batch of a case; the same on each of its ranks, which all have to call.

        Raises:
            RequestError: no budget is given, and there is no GPU whose memory would be one.
            Exception: a rank ran out of memory where others did not, so that they may wait for it in a collective.
        """
        limit = min(mesh.all.gather_objects(self._limit_bytes(track.memory_budget_mib)))
        work = track.workload
        samples = work.data.num_samples
        most = MOST_SEQUENCES if samples is None else samples // (work.num_micro_batches * case.layout.data)

        def try_size(size: int) -> int | None:
            return self._try(track.workload_of(case, size), case, mesh)

        return search(try_size, limit_bytes=limit, most=most)

    def _limit_bytes(self, budget_mib: float | None) -> int:
        budget = None if budget_mib is None else int(budget_mib * 2**20)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            device = int(DEVICE_SHARE * (free + torch.cuda.memory_reserved(self.device)))
            return device if budget is None else min(budget, device)
        if budget is None:
            raise RequestError("memory_budget_mib: is missing; without GPUs `micro_batch: largest` needs it")
        return budget

    def _try(self, work: Workload, case: Case, mesh: Mesh) -> int | None:
        """Bytes of the fullest rank with this workload; None where every rank ran out of memory."""
        size = work.micro_batch_size
        self.recorder.marks.mark(f"trying a micro-batch of {size}")
        begun = self.recorder.num_begun
        meeting = f"micro-batch of {size} for {case.name}"

        def exchange(used: int | None, timeout_s: float | None) -> list[tuple[int | None, int]]:
            own = json.dumps((used, self.recorder.num_begun - begun))
            told = map(json.loads, self.rendezvous.exchange(mesh.all, meeting, own, timeout_s))
            return [(theirs, count) for theirs, count in told]

        try:
            told = exchange(self._used_bytes(work, case, mesh), None)
        except Exception as error:
            if classify(error)[0] != "out_of_memory":
                raise
            # Over the store: a collective may be unfinished. They go on if all are there after the same operations.
            try:
                told = exchange(None, OTHERS_S)
            except DistStoreError:
                raise error from None
            if len({count for _, count in told}) > 1:
                raise
        release(self.device)
        everyone = [used for used, _ in told if used is not None]
        return max(everyone) if len(everyone) == len(told) else None

    def _used_bytes(self, work: Workload, case: Case, mesh: Mesh) -> int:
        reset_peaks(self.device)
        torch.manual_seed(work.seed + mesh.all.index)
        strategy = build_strategy(work, case, mesh, self.device)
        source = Batches(work, case.layout.data)
        first, second = (source.batch(step, mesh.data.index).to(self.device) for step in range(2))
        strategy.step(first)
        if self.device.type == "cuda":
            strategy.step(second)
            synchronize(self.device)
            used = peak_device_bytes(self.device) or 0
        else:
            activations = activation_bytes(strategy, second)
            held = strategy.state_bytes()
            used = held.parameters + held.gradients + held.optimizer + activations
        strategy.close()
        return used
