"""Which rank stands where: data × pipeline × tensor on one mesh, tensor innermost, placed by node."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist

from raybench.errors import RequestError
from raybench.suite.track import Case, Layout
from raybench.worker.channel import Channel
from raybench.worker.communication import Axis
from raybench.worker.recorder import Recorder

AXIS_NAMES = ("data", "pipeline", "tensor", "model", "ends", "all", "shards", "replicas")
"""`model`: pipeline × tensor, the ranks that hold one replica; `ends`: the first and the last of a pipeline. The data
axis once more, in two: `shards`, neighbours with the parts of one copy of the states; `replicas`, with the same."""


class Groups:
    """Process groups by their ranks, made once and shared by all cases of a job."""

    def __init__(self, timeout_s: float) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._timeout = timedelta(seconds=timeout_s)

    def create(self, layout: Layout, ranks: Sequence[int], num_shards: int | None = None) -> None:
        """Make what a layout over `ranks` needs. Every rank of the job has to call, with the same layouts in order.

        (`new_group` of members alone pairs groups by how many each process has made before, which differs.)
        """
        places = range(layout.num_ranks)
        keys = [axis_ranks(layout, ranks, place, num_shards)[axis] for axis in AXIS_NAMES for place in places]
        keys += [pair for place in places for pair in channel_ranks(layout, ranks, place)]
        parts = [size for size in range(2, layout.tensor) if layout.tensor % size == 0]
        keys += [tuple(ranks[at : at + size]) for size in parts for at in range(0, layout.num_ranks, size)]
        self.create_each(keys)

    def create_each(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make what is not there yet of these groups, by their ranks. Every rank of the job has to call, likewise."""
        for key in groups:
            if len(key) > 1 and key not in self._groups:
                self._groups[key] = dist.new_group(list(key), timeout=self._timeout, sort_ranks=False)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of exactly these ranks, of which the caller is one; None for the caller alone."""
        return self._groups[ranks] if len(ranks) > 1 else None


def axis_ranks(
    layout: Layout, ranks: Sequence[int], place: int, num_shards: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The ranks along each axis through `place`, the position in `ranks` of one of them; tensor is innermost.

    Args:
        num_shards: how many neighbours along the data axis shard one copy of the states; all of them by default.
    """
    tensor = place % layout.tensor
    pipeline = place // layout.tensor % layout.pipeline
    data = place // (layout.tensor * layout.pipeline)

    shards = num_shards or layout.data
    ends = (0, layout.pipeline - 1) if pipeline in (0, layout.pipeline - 1) and layout.pipeline > 1 else (pipeline,)

    def rank_at(d: int, p: int, t: int) -> int:
        return ranks[(d * layout.pipeline + p) * layout.tensor + t]

    return {
        "data": tuple(rank_at(d, pipeline, tensor) for d in range(layout.data)),
        "pipeline": tuple(rank_at(data, p, tensor) for p in range(layout.pipeline)),
        "tensor": tuple(rank_at(data, pipeline, t) for t in range(layout.tensor)),
        "model": tuple(rank_at(data, p, t) for p in range(layout.pipeline) for t in range(layout.tensor)),
        "ends": tuple(rank_at(data, p, tensor) for p in ends),
        "all": tuple(ranks[: layout.num_ranks]),
        "shards": tuple(rank_at(data // shards * shards + d, pipeline, tensor) for d in range(shards)),
        "replicas": tuple(rank_at(d, pipeline, tensor) for d in range(data % shards, layout.data, shards)),
    }


def channel_ranks(layout: Layout, ranks: Sequence[int], place: int) -> list[tuple[int, int]]:
    """Sender and receiver of the channels along the pipeline that begin at `place`: to the next stage, and to the one
    before. The last is next to the first, where ranks hold several stages."""
    pipeline = axis_ranks(layout, ranks, place)["pipeline"]
    if len(pipeline) == 1:
        return []
    own = place // layout.tensor % layout.pipeline
    return [(pipeline[own], pipeline[(own + step) % len(pipeline)]) for step in (1, -1)]


def shards_of_a_copy(case: Case, nodes: Sequence[str]) -> int | None:
    """How many ranks of the data axis shard one copy of a hybrid-sharded case's states: those of one node.

    Args:
        nodes: the node of each of the case's ranks, in mesh order.

    Raises:
        RequestError: the nodes hold unequal numbers of data ranks, or one each, so that nothing would be sharded.
    """
    if case.strategy.data != "hybrid-sharded":
        return None
    if "num_shards" in case.options:
        return int(case.options["num_shards"])
    along = nodes[: case.layout.num_ranks : case.layout.num_ranks // case.layout.data]
    sizes = [len(list(group)) for _, group in groupby(along)]
    if len(set(sizes)) > 1 or sizes[0] == 1:
        raise RequestError(
            f"case {case.name}: hybrid-sharded shards nothing where the nodes hold "
            f"{', '.join(map(str, sizes))} data ranks (allowed: equally many, at least 2, on every node, or "
            "options.num_shards)"
        )
    return sizes[0]


class Mesh:
    """A layout laid over ranks, seen from one of them."""

    def __init__(
        self,
        layout: Layout,
        ranks: Sequence[int],
        rank: int,
        groups: Groups,
        recorder: Recorder,
        num_shards: int | None = None,
    ) -> None:
        self.layout = layout
        self.ranks = tuple(ranks)
        self.recorder = recorder
        self._rank, self._groups = rank, groups
        members = axis_ranks(layout, self.ranks, self.ranks.index(rank), num_shards)
        self.axes = {name: Axis(name, members[name], rank, groups.get(members[name]), recorder) for name in AXIS_NAMES}
        if members["shards"] == members["data"]:
            self.axes["shards"] = self.axes["data"]
        self.data, self.pipeline, self.tensor = (self.axes[name] for name in ("data", "pipeline", "tensor"))
        self.model, self.ends, self.all = (self.axes[name] for name in ("model", "ends", "all"))
        self.shards, self.replicas = self.axes["shards"], self.axes["replicas"]

    def channel(self, source: int, destination: int) -> Channel:
        """From one place along this rank's pipeline to a neighbouring one; this rank is at one of them."""
        ranks = (self.pipeline.ranks[source], self.pipeline.ranks[destination])
        return Channel(self.pipeline.name, ranks, self._rank, self._groups.get(ranks), self.recorder)

    def tensor_part(self, size: int) -> Axis:
        """The `size` consecutive ranks of the tensor axis that this one is among, where `size` divides the axis."""
        if size == self.tensor.size:
            return self.tensor
        first = self.tensor.index // size * size
        ranks = self.tensor.ranks[first : first + size]
        return Axis("tensor part", ranks, self._rank, self._groups.get(ranks), self.recorder)

    def open_channels(self) -> None:
        """Let every channel between neighbours of this rank's pipeline carry something, in one order on all ranks.

        NCCL makes the communicator of a channel when it is first used, and waits there for the other end: a receive
        that is posted early would wait for a send that can only follow it.
        """
        size = self.pipeline.size
        pairs = {(place, (place + step) % size) for place in range(size) for step in (1, -1)}
        for source, destination in sorted(pairs):
            if self.pipeline.index in (source, destination):
                channel, token = self.channel(source, destination), torch.zeros(1, device=self.recorder.device)
                is_sender = self.pipeline.index == source
                (channel.send if is_sender else channel.receive)(token, label="opening").wait()
