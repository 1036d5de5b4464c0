"""What ranks run in these tests in place of the worker loop: one function a behaviour. Rank 1 misbehaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from time import monotonic_ns

import torch
from torch import distributed

from raybench.suite.job import Job
from raybench.worker.identity import Identity
from raybench.worker.messages import RoundBegun, RoundRows
from raybench.worker.presence import Presence

CULPRIT = 1


def _begin(job: Job, identity: Identity, presence: Presence, case: str = "one") -> None:
    timeout_s = job.track.measure.timeout_s
    presence.marker.begin_round(case, 0, monotonic_ns() + int(timeout_s * 1e9))
    presence.send(RoundBegun(identity.rank, case, 0, job.world_size))
    presence.marker.mark("all-reduce of the warm-up")
    distributed.all_reduce(torch.ones(8))


def _wait_for_others() -> None:
    distributed.all_reduce(torch.ones(8))


def finish(job: Job, identity: Identity, presence: Presence) -> None:
    _begin(job, identity, presence)
    row = {
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "variable": os.environ.get("RAYBENCH_TEST_VARIABLE"),
        "in main heap": _is_in_main_heap(torch.ones(1 << 18)),
    }
    presence.send(RoundRows(identity.rank, "one", 0, job.world_size, ranks=row))
    presence.marker.end_round()


def _is_in_main_heap(tensor: torch.Tensor) -> bool:
    heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
    begin, end = (int(address, 16) for address in heap.split()[0].split("-"))
    return begin <= tensor.data_ptr() < end


def killed(job: Job, identity: Identity, presence: Presence) -> None:
    _begin(job, identity, presence)
    presence.marker.mark("step 3: backward")
    if identity.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_others()


def segfault(job: Job, identity: Identity, presence: Presence) -> None:
    import ctypes

    _begin(job, identity, presence)
    presence.marker.mark("step 3: native code")
    if identity.rank == CULPRIT:
        ctypes.string_at(0)
    _wait_for_others()


def stopped(job: Job, identity: Identity, presence: Presence) -> None:
    _begin(job, identity, presence)
    presence.marker.mark("step 3: forward")
    if identity.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait_for_others()


def sleeps(job: Job, identity: Identity, presence: Presence) -> None:
    """Rank 1 sleeps for ever outside a collective, the others inside one."""
    _begin(job, identity, presence)
    if identity.rank == CULPRIT:
        presence.marker.mark("step 3: optimizer")
        time.sleep(3600)
    presence.marker.mark("step 3: all-reduce bucket 2")
    _wait_for_others()


def holds_the_interpreter(job: Job, identity: Identity, presence: Presence) -> None:
    """Rank 1 is in a C call that never lets another Python thread run."""
    import ctypes

    _begin(job, identity, presence)
    presence.marker.mark("step 3: a C call")
    if identity.rank == CULPRIT:
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    _wait_for_others()


def raises(job: Job, identity: Identity, presence: Presence) -> None:
    _begin(job, identity, presence)
    presence.marker.mark("step 3: forward")
    if identity.rank == CULPRIT:
        raise ValueError("the model is wrong\nin two lines")
    _wait_for_others()


def out_of_memory(job: Job, identity: Identity, presence: Presence) -> None:
    _begin(job, identity, presence)
    presence.marker.mark("step 3: forward")
    if identity.rank == CULPRIT:
        torch.empty(1 << 60)
    _wait_for_others()


def waits(job: Job, identity: Identity, presence: Presence) -> None:
    """All ranks are busy for ever, in Python."""
    _begin(job, identity, presence)
    presence.marker.mark("step 3: waiting")
    while True:
        time.sleep(0.01)
