"""What Ray and torchrun start on every rank: the process group around the worker loop.

Under torchrun this is the program itself (`python -m raybench.worker.main JOBFILE`), with the job as JSON in a file.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Event

from raybench.suite.job import RankJob, read_job
from raybench.worker.heap import keep_freed_memory
from raybench.worker.identity import Identity
from raybench.worker.network import choose_interface
from raybench.worker.presence import Presence

LOOP = "raybench.worker.loop:run_job"
"""What runs on every rank: a function of job, identity and presence."""
GROUP_TIMEOUT_S = 1800
"""How long a collective may wait for its peers; a round's deadline ends it sooner."""

_done = Event()


def run(job: RankJob, identity: Identity, *, loop: str = LOOP) -> None:
    """Do this rank's part of `job`, in a process group that is made here unless it is there already.

    The driver hears from the rank itself, from its first word to its last.

    Raises:
        BaseException: whatever ended the loop, after the driver was told.
    """
    os.environ.update(job.environment)
    if job.backend == "gloo":
        keep_freed_memory()
        _share_cores(job)
    try:
        with Presence.start(job, identity, leave=_leave_group) as presence:
            presence.marker.mark("making the process group")
            _join_group(job, identity)
            presence.hello()
            presence.marker.mark("starting")
            module, _, function = loop.partition(":")
            getattr(import_module(module), function)(job, identity, presence)
    finally:
        _done.set()


def wait_until_done(timeout_s: float) -> None:
    """Wait, in another thread of a rank, until `run` has returned."""
    _done.wait(timeout_s)


def _share_cores(job: RankJob) -> None:
    """Give this process its share of the node's cores, unless the job says how many threads to use."""
    import torch

    threads = job.environment.get("OMP_NUM_THREADS") or str(threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(int(threads))


def threads_per_rank(num_local_ranks: int) -> int:
    """Cores of this node for each of the ranks that share it, at least one."""
    return max(1, num_cores() // num_local_ranks)


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _join_group(job: RankJob, identity: Identity) -> None:
    import torch
    from torch import distributed

    if job.backend == "nccl":
        torch.cuda.set_device(local_device(identity))
    if not distributed.is_initialized():
        distributed.init_process_group(job.backend, timeout=timedelta(seconds=GROUP_TIMEOUT_S))


def local_device(identity: Identity) -> int:
    """Index of this rank's GPU among those that the process can see.

    A worker of Ray may see its own GPU alone, or all of its node's.
    """
    import torch

    return identity.local_rank % max(1, torch.cuda.device_count())


def _leave_group(error: BaseException | None) -> None:
    """Close the process group. After an error NCCL's stays, as its closing can wait for the lost peer for ever."""
    from torch import distributed

    if distributed.is_initialized() and (error is None or distributed.get_backend() != "nccl"):
        distributed.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Run one rank under torchrun."""
    # At one rank's end torchrun asks the others to end at once; they are to tell the driver first. Their witnesses
    # see to it that they end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    environment = os.environ
    job = read_job(Path(arguments[0]).read_bytes())
    identity = Identity(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        node=environment.get("MASTER_ADDR", "127.0.0.1"),
    )
    os.environ.update(job.environment)
    choose_interface(identity.node)
    run(job, identity, loop=arguments[1] if len(arguments) > 1 else LOOP)


if __name__ == "__main__":
    main(sys.argv[1:])
