"""In which order a layout uses the ranks of a job: on the fewest nodes, and tensor groups inside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raybench.suite.track import Layout


def placement(nodes: Sequence[str], num_ranks: int, *, tensor: int = 1) -> tuple[int, ...]:
    """The ranks a layout of `num_ranks` uses: on the fewest nodes, contiguous within each.

    Args:
        nodes: the node of every rank of the job.
        tensor: size of the layout's tensor groups. Every node first makes up as many whole groups as it can; only what
            is then left over on the nodes forms groups that cross them.

    Returns:
        Global ranks in mesh order, in which each `tensor` consecutive ones are a group.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    fullest_first = sorted(by_node.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    reached = accumulate(len(ranks) for ranks in fullest_first)
    used = fullest_first[: next((i + 1 for i, total in enumerate(reached) if total >= num_ranks), None)]
    whole = [rank for ranks in used for rank in ranks[: len(ranks) // tensor * tensor]]
    rest = [rank for ranks in used for rank in ranks[len(ranks) // tensor * tensor :]]
    return tuple((whole + rest)[:num_ranks])


def num_crossing(nodes: Sequence[str], layout: Layout) -> int:
    """How many of a layout's tensor groups have ranks on more than one node, `nodes` being that of every rank."""
    ranks = placement(nodes, layout.num_ranks, tensor=layout.tensor)
    groups = [ranks[at : at + layout.tensor] for at in range(0, layout.num_ranks, layout.tensor)]
    return sum(len({nodes[rank] for rank in group}) > 1 for group in groups)
