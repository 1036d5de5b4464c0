"""Which nodes and ranks are tried together: every neighbour with its neighbour, nobody twice at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raybench.doctor.live.facts import Stage

Pair = tuple[int, int]


def neighbours(number: int) -> list[list[Pair]]:
    """All pairs (i, i + 1) of `number` nodes in at most two rounds; in a round each node is in one pair."""
    pairs = [(at, at + 1) for at in range(number - 1)]
    return [group for group in (pairs[::2], pairs[1::2]) if group]


@dataclass(frozen=True)
class Trial:
    """Groups of ranks that do an all-reduce at the same time, each by itself."""

    stage: Stage
    groups: tuple[tuple[int, ...], ...]


def trials(node_of_rank: Sequence[int]) -> list[Trial]:
    """Two ranks of a node, then two of neighbouring nodes, then all; ranks are numbered node by node.

    With two ranks in all, the last would be the same again and is left out.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of_rank):
        ranks.setdefault(node, []).append(rank)
    within = tuple((own[0], own[1]) for own in ranks.values() if len(own) > 1)
    firsts = [own[0] for own in ranks.values()]
    found = [Trial("within", within)] if within else []
    for pairs in neighbours(len(firsts)):
        found.append(Trial("between", tuple((firsts[one], firsts[other]) for one, other in pairs)))
    if len(node_of_rank) > 2:
        found.append(Trial("all", (tuple(range(len(node_of_rank))),)))
    return found
