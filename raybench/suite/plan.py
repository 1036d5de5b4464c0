"""What can run where: the cases of a track against the cluster that is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from raybench.parallel.registry import AXES, entry
from raybench.suite.cluster import Backend, Cluster, Node
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.suite.ranks import num_crossing
from raybench.suite.track import Case, Layout, ResolvedTrack
from raybench.wording import count

MAX_CPUS_BESIDE_GPU = 8


@dataclass(frozen=True, kw_only=True)
class TrackPlan:
    """What of one track runs, and on what."""

    track: ResolvedTrack
    """With all cases asked for."""
    runnable: tuple[Case, ...]
    skipped: tuple[tuple[Case, str], ...]
    """Cases that cannot run, each with the reason in words."""
    named: frozenset[str] = frozenset()
    """Cases that were asked for one by one (TRACK:CASE)."""
    placement: NodePlacement | None
    """None where nothing can run."""
    backend: Backend
    shares_cores: bool = False
    """Whether some node has fewer cores than ranks: compute times then say little."""

    def num_crossing(self, case: Case) -> int:
        """How many of a case's tensor groups are not inside one node, in this placement."""
        return 0 if self.placement is None else num_crossing(self.placement.addresses, case.layout)

    def round_numbers(self, *, verify_only: bool = False) -> tuple[int, ...]:
        """Rounds are numbered from 1; 0 is the row of a case that was skipped."""
        return tuple(range(1, 2 if verify_only else self.track.measure.num_rounds + 1))


def plan_track(track: ResolvedTrack, cluster: Cluster, *, peers: bool = True, named: Iterable[str] = ()) -> TrackPlan:
    """Which of the track's cases this cluster can run, where their ranks go, and why the others cannot."""
    skipped: dict[str, str] = {}
    for case in track.cases:
        if reason := _unavailable(case, peers=peers):
            skipped[case.name] = reason
    left = [case for case in track.cases if case.name not in skipped]
    exact_nodes = track.scale == "full"
    on_gpu = cluster.num_gpus > 0 and (
        exact_nodes or all(_misfit(case, cluster, True, exact_nodes=False) is None for case in left)
    )
    for case in left:
        if reason := _misfit(case, cluster, on_gpu, exact_nodes=exact_nodes):
            skipped[case.name] = reason
    left = [case for case in left if case.name not in skipped]
    placement = _place(left, cluster, on_gpu) if left else None
    if placement is not None and exact_nodes:
        for case in left:
            if (used := placement.num_nodes(case.layout.num_ranks)) != case.layout.nodes:
                skipped[case.name] = (
                    f"its {case.layout.num_ranks} ranks would be on {count(used, 'node')}, not {case.layout.nodes}, "
                    f"beside the other cases of its track (run it alone: {track.track}:{case.name})"
                )
        left = [case for case in left if case.name not in skipped]
        placement = _place(left, cluster, on_gpu) if left else None
    return TrackPlan(
        track=track,
        runnable=tuple(left),
        skipped=tuple((case, skipped[case.name]) for case in track.cases if case.name in skipped),
        named=frozenset(named),
        placement=placement,
        backend="nccl" if on_gpu and left else "gloo",
        shares_cores=placement is not None and _shares_cores(placement, cluster),
    )


def skip_track(track: ResolvedTrack, reason: str, *, named: Iterable[str] = ()) -> TrackPlan:
    """The plan of a track of which nothing can run, for one reason."""
    return TrackPlan(
        track=track,
        runnable=(),
        skipped=tuple((case, reason) for case in track.cases),
        named=frozenset(named),
        placement=None,
        backend="gloo",
    )


def _unavailable(case: Case, *, peers: bool) -> str | None:
    if case.peer and not peers:
        return f"peer of {case.peer}: left out by --no-peers"
    for axis in AXES:
        name = getattr(case.strategy, axis)
        package = entry(axis, name).requires if name else None
        if package and find_spec(package) is None:
            return f"needs {package}, which is not installed (pip install 'raybench[peers]')"
    return None


def _misfit(case: Case, cluster: Cluster, on_gpu: bool, *, exact_nodes: bool) -> str | None:
    """Why the case's layout does not fit the cluster, or None."""
    ranks, nodes = case.layout.num_ranks, case.layout.nodes
    if exact_nodes and nodes > len(cluster.nodes):
        return f"needs {count(nodes, 'node')}, the cluster has {len(cluster.nodes)}"
    nodes = min(nodes, len(cluster.nodes))
    if not on_gpu:
        if any(node.free_cpus > 0 for node in cluster.nodes):
            return None
        total = sum(node.total_cpus for node in cluster.nodes)
        return f"needs a free CPU, the cluster has none (all {total:g} are taken by other jobs)"
    if ranks > cluster.num_gpus:
        near = ""
        if case.layout.data < ranks:
            near = f" (nearest layouts that fit: {nearest_layouts(case.layout, cluster.num_gpus)})"
        return f"needs {count(ranks, 'GPU')}, the cluster has {cluster.num_gpus}{near}"
    free = sum(node.free_gpus for node in cluster.nodes)
    if ranks > free:
        return f"needs {count(ranks, 'GPU')}, {free} of the cluster's {cluster.num_gpus} are free"
    if _shares(ranks, nodes, [n.free_gpus for n in _by_gpus(cluster)]) is None:
        largest = max(node.free_gpus for node in cluster.nodes)
        where = "one node" if nodes == 1 else f"each of {count(nodes, 'node')}"
        return f"needs {count(-(-ranks // nodes), 'GPU')} on {where}, the largest node has {largest} free"
    return None


def _place(cases: Sequence[Case], cluster: Cluster, on_gpu: bool) -> NodePlacement:
    """Ranks of the largest layout: spread evenly over the nodes it asks for, or those there are."""
    widest = max(cases, key=lambda case: (case.layout.num_ranks, case.layout.nodes)).layout
    if on_gpu:
        nodes = _by_gpus(cluster)
        capacity = [node.free_gpus for node in nodes]
    else:
        nodes = sorted((n for n in cluster.nodes if n.free_cpus > 0), key=lambda n: (-n.free_cpus, n.address))
        capacity = [widest.num_ranks] * len(nodes)
    num_nodes = min(widest.nodes, len(nodes))
    groups = _shares(widest.num_ranks // widest.tensor, num_nodes, [c // widest.tensor for c in capacity])
    if groups is not None and len(groups) == num_nodes:
        shares: list[int] | None = [widest.tensor * number for number in groups]
    else:  # not without a tensor group that crosses nodes
        shares = _shares(widest.num_ranks, num_nodes, capacity)
    if shares is None:
        raise AssertionError("a layout that does not fit was to be placed")
    used = list(zip(nodes, shares, strict=False))
    each = min(node.free_cpus / share for node, share in used)
    cpus = float(int(each)) if each >= 1 else int(each * 1000) / 1000
    return NodePlacement.of(
        tuple(NodeShare(node.address, share, node.node_id) for node, share in used),
        cpus_per_rank=min(cpus, MAX_CPUS_BESIDE_GPU) if on_gpu else cpus,
        use_gpu=on_gpu,
    )


def _shares(num_ranks: int, num_nodes: int, capacity: Sequence[int]) -> list[int] | None:
    """Ranks of each node, as even as can be, the first nodes taking the rest; None where they do not fit."""
    num_nodes = min(num_nodes, num_ranks)
    base, more = divmod(num_ranks, num_nodes)
    shares = [base + (index < more) for index in range(num_nodes)]
    fits = len(capacity) >= num_nodes and all(s <= c for s, c in zip(shares, capacity, strict=False))
    return shares if fits else None


def _by_gpus(cluster: Cluster) -> list[Node]:
    return sorted(cluster.nodes, key=lambda node: (-node.free_gpus, node.address))


def _shares_cores(placement: NodePlacement, cluster: Cluster) -> bool:
    cores = {node.address: node.num_cpus for node in cluster.nodes}
    return any(share.num_ranks > cores[share.address] for share in placement.nodes)


def nearest_layouts(layout: Layout, num_ranks: int) -> str:
    """The largest layouts of at most `num_ranks` ranks that are `layout` with one axis made smaller, in words."""
    smaller: dict[str, int] = {}
    for axis in AXES:
        size = getattr(layout, axis)
        others = layout.num_ranks // size
        fits = next((n for n in range(size - 1, 0, -1) if size % n == 0 and others * n <= num_ranks), None)
        if fits is not None:
            smaller[str(layout.model_copy(update={axis: fits}))] = others * fits
    largest = max(smaller.values(), default=1)
    return ", ".join(name for name, ranks in smaller.items() if ranks == largest) or "1x1x1"
