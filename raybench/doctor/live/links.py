"""How fast the network between two nodes has to be before it counts as slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Final

from raybench.doctor.live.facts import Node, Stream, bits_per_s

OF_CLAIM: Final = 0.25
"""The part of what the interface claims that has to arrive."""
LARGEST_CLAIM_GBPS: Final = 40.0
"""A claim beyond this counts as this: a few streams of one process fill no faster link."""
OF_OTHERS: Final = 1 / 3
"""The part of what the other links carry (their upper median)."""
LEAST_GBPS: Final = 0.5
"""Half of the slowest network that anybody trains over."""


def claimed_gbps(stream: Stream, nodes: Mapping[str, Node]) -> float | None:
    """What both ends claim, the lesser of the two; None if neither does."""
    claims = [
        interface["claimed_mbps"] / 1000
        for address in (stream["source"], stream["target"])
        for interface in nodes[address]["interfaces"]
        if interface["name"] == nodes[address]["ray_interface"] and interface["claimed_mbps"]
    ]
    return min(claims, default=None)


def expected_gbps(stream: Stream, streams: Sequence[Stream], nodes: Mapping[str, Node]) -> tuple[float, str]:
    """(Gbit/s that a link has to carry, the reason): the highest of three bounds."""
    usual = median_high(bits_per_s(each) / 1e9 for each in streams)
    bounds = [
        (LEAST_GBPS, f"training needs {LEAST_GBPS:g} Gbit/s at the very least"),
        (usual * OF_OTHERS, f"the links of this cluster carry {usual:.3g} Gbit/s"),
    ]
    claim = claimed_gbps(stream, nodes)
    if claim is not None:
        bounds.append((min(claim, LARGEST_CLAIM_GBPS) * OF_CLAIM, f"its interfaces claim {claim:g} Gbit/s"))
    return max(bounds)


def slow_links(streams: Sequence[Stream], nodes: Sequence[Node]) -> list[Stream]:
    """Those that carry less than expected."""
    known = {node["address"]: node for node in nodes}
    return [each for each in streams if bits_per_s(each) / 1e9 < expected_gbps(each, streams, known)[0]]
