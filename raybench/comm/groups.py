"""Among which ranks the sweep's operations run: as plain data, from the node of every rank and a layout."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.errors import RequestError
from raybench.suite.ranks import placement
from raybench.suite.track import Layout

AXES = ("data", "pipeline", "tensor")
GROUPS = ("node", "across", "all", *AXES)
"""`node`: the ranks of each node; `across`: one rank of every node; `all`: every rank; the axes of a layout."""

Ranks = tuple[int, ...]


def groups_of(name: str, nodes: Sequence[str], layout: Layout | None) -> tuple[Ranks, ...]:
    """The groups of that name: of one size, without a rank in common; they run at the same time.

    Smaller ones, such as of a node with fewer ranks, are left out.

    Args:
        nodes: the node of every rank.
        layout: whose axes may be named; None where none was given.

    Raises:
        RequestError: there are too few ranks or nodes for any group of two ranks.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    if name == "node":
        found = [tuple(ranks) for ranks in by_node.values()]
        lack = f"needs 2 ranks on a node, every node has {max(map(len, by_node.values()))} (see --ranks-per-node)"
    elif name == "across":
        found = [tuple(ranks[0] for ranks in by_node.values())]
        lack = f"needs 2 nodes, the cluster has {len(by_node)}"
    elif name == "all":
        found, lack = [tuple(range(len(nodes)))], f"needs 2 ranks, there is {len(nodes)}"
    elif layout is None:
        raise RequestError(
            f"--groups: {name} is an axis of a layout, and no --layout is given (such as data=2,tensor=2)"
        )
    else:
        found, lack = _along(name, nodes, layout), f"has size {getattr(layout, name)} in --layout"
    largest = max(map(len, found))
    if largest < 2:
        raise RequestError(f"--groups: {name} {lack}")
    return tuple(ranks for ranks in found if len(ranks) == largest)


def _along(axis: str, nodes: Sequence[str], layout: Layout) -> list[Ranks]:
    from raybench.worker.mesh import axis_ranks

    if layout.num_ranks > len(nodes):
        raise RequestError(f"--layout: {layout} needs {layout.num_ranks} ranks, there are {len(nodes)}")
    ranks = placement(nodes, layout.num_ranks, tensor=layout.tensor)
    return sorted({axis_ranks(layout, ranks, place)[axis] for place in range(layout.num_ranks)})


def usual_groups(nodes: Sequence[str], layout: Layout | None) -> tuple[str, ...]:
    """Those that a cluster and a layout have and that differ from each other, in the order of `GROUPS`."""
    found: dict[tuple[Ranks, ...], str] = {}
    for name in GROUPS:
        if name in AXES and layout is None:
            continue
        try:
            found = {groups_of(name, nodes, layout): name} | found
        except RequestError:
            continue
    return tuple(sorted(found.values(), key=GROUPS.index))


def members(groups: Sequence[Ranks]) -> Ranks:
    """All ranks of the groups of one name."""
    return tuple(sorted(rank for group in groups for rank in group))


def num_nodes(group: Ranks, nodes: Sequence[str]) -> int:
    return len({nodes[rank] for rank in group})
