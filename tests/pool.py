"""A set of gloo ranks that many tests share: each test sends them a function of its module to run."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from raybench.parallel.data import bucketed
from raybench.suite.track import Layout
from raybench.worker.marker import Marker
from raybench.worker.mesh import Groups, Mesh
from raybench.worker.recorder import Recorder


class Rank:
    """What a function sent to the pool is called with first."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.recorder = Recorder(Marker.null(), self.device)
        self.groups = Groups(timeout_s=60)

    def mesh(self, layout: Layout, num_shards: int | None = None) -> Mesh | None:
        """This rank's view of a layout over the first ranks; None if it is not among them. All ranks have to call."""
        self.groups.create(layout, range(layout.num_ranks), num_shards)
        if self.rank >= layout.num_ranks:
            return None
        return Mesh(layout, range(layout.num_ranks), self.rank, self.groups, self.recorder, num_shards)


class Pool:
    """`world_size` processes in one gloo group. A function that hangs or kills a rank ends the whole pool, loudly."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """`function(rank, *args)` on every rank; the results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(timeout_s):
                    raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {timeout_s:g} s")
                error, result = pipe.recv()
            except (EOFError, ConnectionError, TimeoutError):
                self.close()
                raise
            if error is not None:
                self.close()
                raise AssertionError(f"rank {rank} failed in {function.__name__}:\n{error}")
            results.append(result)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    bucketed.IN_PLACE_BYTES = 1500  # some weights of the small models that tests train are larger, some smaller
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    own = Rank(rank, world_size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, function(own, *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
