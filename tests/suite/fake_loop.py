"""A worker loop that measures nothing: it plays each case's part by its options, and sends made-up rows."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from raybench.suite.job import Job
from raybench.suite.track import Case
from raybench.worker.identity import Identity
from raybench.worker.mesh import Groups, Mesh
from raybench.worker.messages import RoundBegun, RoundRows
from raybench.worker.presence import Presence
from raybench.worker.recorder import Recorder


def _mesh(case: Case, identity: Identity, presence: Presence) -> Mesh:
    layout, ranks = case.layout, range(identity.world_size)
    groups = Groups(timeout_s=600)
    groups.create(layout, ranks)
    return Mesh(layout, ranks, identity.rank, groups, Recorder(presence.marker, torch.device("cpu")))


def _skip(mesh: Mesh) -> None:
    """Rank 1 leaves out the second bucket, and goes on to wait for something else."""
    for bucket in range(3):
        if (mesh.data.index, bucket) != (1, 1):
            mesh.data.all_reduce(torch.ones(8), label=f"bucket {bucket}").wait()
    mesh.recorder.marks.mark("optimizer")
    time.sleep(3600)


def _send(mesh: Mesh) -> None:
    """Two neighbours both send more than any buffer holds, and only then would receive."""
    own, big = mesh.pipeline.index, torch.ones(16 * 2**20)
    mesh.channel(own, 1 - own).send(big, label="activations").wait()
    mesh.channel(1 - own, own).receive(big, label="activations").wait()


HANGS = {"skip": _skip, "send": _send}


def run_job(job: Job, identity: Identity, presence: Presence) -> None:
    for key in job.rounds:
        case = job.track.case(key.case)
        if identity.rank >= case.layout.num_ranks:
            continue
        deadline = time.monotonic_ns() + job.track.measure.timeout_s * 10**9
        presence.marker.begin_round(key.case, key.round, deadline)
        presence.marker.mark("playing")
        if case.layout.num_ranks == identity.world_size:
            dist.barrier()
        presence.send(RoundBegun(identity.rank, key.case, key.round, case.layout.num_ranks))
        part = os.environ.get(f"PLAY_{key.case}".replace("-", "_").upper(), "")
        if part == f"die {key.round}" and identity.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if part == f"raise {key.round}" and identity.rank == 1:
            raise MemoryError("cannot allocate 9 GiB")
        if part == f"sleep {key.round}" and identity.rank == 1:
            time.sleep(3600)
        if part in (f"skip {key.round}", f"send {key.round}"):
            HANGS[part.split()[0]](_mesh(case, identity, presence))
        if case.layout.num_ranks == identity.world_size:
            dist.barrier()
        time.sleep(float(os.environ.get("PLAY_ROUND_S", "0.05")))
        presence.marker.end_round()
        presence.send(
            RoundRows(
                identity.rank,
                key.case,
                key.round,
                case.layout.num_ranks,
                ranks={"parameter_bytes": 4},
                run={"gate": "passed", "gate_scope": "full", "window_ns": 10**9, "tokens": 1000, "loss": 2.0}
                if identity.rank == 0
                else None,
                steps=[{"step": 0, "begin_ns": 0, "duration_ns": 5, "loss": 2.0, "tokens": 1000}],
            )
        )
