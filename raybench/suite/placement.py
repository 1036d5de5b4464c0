"""On which node each rank of a job goes, as plain data: made by the plan, kept by the launchers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a job go."""

    num_ranks: int
    use_gpu: bool = False
    """One GPU for each rank."""
    cpus_per_rank: float = 0.0
    """CPUs to reserve for each rank: a fraction where ranks share cores, none where each has a GPU."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement: on as few nodes as possible, or on as many."""

    @property
    def node_ids(self) -> list[str | None]:
        """Ray's name of the node on which each rank must be; None, or an empty list, where Ray may choose."""
        return []


@dataclass(frozen=True)
class NodeShare:
    """One node's part of a job."""

    address: str
    """The node's IP address as Ray knows it; `127.0.0.1` without Ray."""
    num_ranks: int
    node_id: str | None = None
    """Ray's own name of the node; None without Ray."""


@dataclass(frozen=True, kw_only=True)
class NodePlacement(Placement):
    """Ranks are contiguous within a node and nodes are used in this order: rank 0 is on the first."""

    nodes: tuple[NodeShare, ...]

    @staticmethod
    def of(nodes: tuple[NodeShare, ...], *, cpus_per_rank: float, use_gpu: bool) -> NodePlacement:
        return NodePlacement(
            num_ranks=sum(node.num_ranks for node in nodes),
            use_gpu=use_gpu,
            cpus_per_rank=cpus_per_rank,
            strategy="PACK" if len(nodes) == 1 else "SPREAD",
            nodes=nodes,
        )

    @property
    def node_ids(self) -> list[str | None]:
        """The node of every rank, by Ray's name for it."""
        return [node.node_id for node in self.nodes for _ in range(node.num_ranks)]

    @property
    def addresses(self) -> list[str]:
        """The node of every rank, by its address."""
        return [node.address for node in self.nodes for _ in range(node.num_ranks)]

    def num_nodes(self, num_ranks: int) -> int:
        """On how many nodes the first `num_ranks` ranks are."""
        used, left = 0, num_ranks
        for node in self.nodes:
            if left > 0:
                used, left = used + 1, left - node.num_ranks
        return used
