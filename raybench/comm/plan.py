"""The sweep that a request becomes on a cluster: who takes part, with which sizes, and what is said beforehand."""

from __future__ import annotations

from raybench.comm.driver import Sweep
from raybench.comm.groups import groups_of, usual_groups
from raybench.comm.request import Asked, CommRequest
from raybench.comm.sweep import DEFAULT_BUDGET_S, DEFAULT_SIZES, Backend, SweepCase, sizes_between
from raybench.errors import RequestError
from raybench.suite.cluster import Cluster
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.suite.track import Layout
from raybench.wording import count

DEFAULT_RANKS_PER_NODE = 2
"""Where there are no GPUs."""
MAX_CPUS_BESIDE_GPU = 8
COPIES = 4
"""What a rank holds at most, in payloads: sent, received, what was expected, and whether they are the same."""
MAX_RANKS_PER_CORE = 16
"""Of gloo: each rank is a process with threads of its own, and a host that has too many stops answering."""


def plan(request: CommRequest, asked: Asked, cluster: Cluster, suite_id: str) -> Sweep:
    """The sweep for a cluster.

    Raises:
        RequestError: the cluster has too few nodes, GPUs or ranks for what is asked.
    """
    from raybench.suite.rows import described_nodes, device_columns, inherited_settings, this_code, version_columns

    backend: Backend = "nccl" if cluster.num_gpus else "gloo"
    placement = place(cluster, asked.layout, request.ranks_per_node)
    nodes = placement.addresses
    if asked.layout is not None and asked.layout.num_ranks > len(nodes):
        layout = ", ".join(f"{axis}={size}" for axis, size in asked.layout.model_dump(exclude={"nodes"}).items())
        raise RequestError(f"--layout: {layout} needs {asked.layout.num_ranks} ranks, there are {len(nodes)}")
    names = usual_groups(nodes, asked.layout) if asked.groups is None else asked.groups
    for name in names:
        groups_of(name, nodes, asked.layout)
    if not names:
        raise RequestError(f"--groups: needs 2 ranks, there is {len(nodes)} (see --ranks-per-node)")
    used = [node for node in cluster.nodes if node.address in set(nodes)]
    sizes = asked.sizes or sizes_between(*DEFAULT_SIZES[backend])
    if backend == "gloo":
        _check_memory(sizes[-1], placement, cluster)
    return Sweep(
        suite_id=suite_id,
        cases=tuple(
            SweepCase(group=group, kind=kind, dtype=dtype)
            for group in names
            for dtype in asked.dtypes
            for kind in asked.kinds
        ),
        sizes=sizes,
        settings=asked.settings,
        layout=asked.layout,
        num_rounds=request.num_rounds,
        budget_s=request.budget_s or DEFAULT_BUDGET_S[backend],
        timeout_s=request.timeout_s,
        overlap=request.overlap,
        backend=backend,
        placement=placement,
        link_bytes_per_s=None if request.link_gbps is None else request.link_gbps * 1e9 / 8,
        columns={**version_columns(cluster, request.launcher), **device_columns(used, backend)},
        environment={
            "launcher": request.launcher,
            "nodes": described_nodes(used),
            "layout": None if asked.layout is None else str(asked.layout),
            "cpus_per_rank": placement.cpus_per_rank,
            "ranks_share_cores": _shares_cores(placement, cluster),
            "inherited_nccl_env": inherited_settings(),
            "source_hash": this_code().source_hash,
        },
    )


def _check_memory(largest: int, placement: NodePlacement, cluster: Cluster) -> None:
    """Refuse sizes of which a host could not hold what its ranks keep: its other work would be ended, too."""
    from raybench.report.text import size

    memory = {node.address: node.memory_bytes for node in cluster.nodes}
    for share in placement.nodes:
        most = memory[share.address] // (share.num_ranks * COPIES)
        if largest > most:
            raise RequestError(
                f"--sizes: {size(largest)} is not allowed (at most {size(most)}: {count(share.num_ranks, 'rank')} keep "
                f"{COPIES} times a size each, and {share.address} has {size(memory[share.address])})"
            )


def place(cluster: Cluster, layout: Layout | None, ranks_per_node: int | None) -> NodePlacement:
    """Ranks on every node: one a free GPU, or without any as many as the layout or the option needs.

    Raises:
        RequestError: no node is free, or a node has fewer GPUs than ranks.
    """
    on_gpu = cluster.num_gpus > 0
    free = [node for node in cluster.nodes if (node.free_gpus if on_gpu else node.free_cpus) > 0]
    if not free:
        raise RequestError(f"cluster: no node has a free {'GPU' if on_gpu else 'CPU'}")
    if on_gpu:
        least = min(free, key=lambda node: node.free_gpus)
        if ranks_per_node is not None and ranks_per_node > least.free_gpus:
            raise RequestError(
                f"--ranks-per-node: {ranks_per_node} is not allowed (each rank needs a GPU, {least.address} has "
                f"{least.free_gpus} free)"
            )
        shares = [ranks_per_node or node.free_gpus for node in free]
    else:
        needed = DEFAULT_RANKS_PER_NODE if layout is None else -(-layout.num_ranks // len(free))
        share = ranks_per_node or needed
        fewest = min(free, key=lambda node: node.num_cpus)
        most = max(DEFAULT_RANKS_PER_NODE, int(fewest.num_cpus * MAX_RANKS_PER_CORE))
        if share > most:
            what = f"--ranks-per-node: {share}" if ranks_per_node else f"--layout: {share} ranks on a node"
            raise RequestError(
                f"{what} is not allowed (at most {most}, {MAX_RANKS_PER_CORE} for each of the {fewest.num_cpus:g} CPUs "
                f"of {fewest.address})"
            )
        shares = [share] * len(free)
    each = min(node.free_cpus / share for node, share in zip(free, shares, strict=True))
    cpus = float(int(each)) if each >= 1 else int(each * 1000) / 1000
    return NodePlacement.of(
        tuple(NodeShare(node.address, share, node.node_id) for node, share in zip(free, shares, strict=True)),
        cpus_per_rank=min(cpus, MAX_CPUS_BESIDE_GPU) if on_gpu else cpus,
        use_gpu=on_gpu,
    )


def _shares_cores(placement: NodePlacement, cluster: Cluster) -> bool:
    cores = {node.address: node.num_cpus for node in cluster.nodes}
    return any(share.num_ranks > cores[share.address] for share in placement.nodes)


def notes(request: CommRequest, sweep: Sweep, cluster: Cluster) -> list[str]:
    """What is said before anything is measured."""
    from raybench.report.text import size

    groups = dict.fromkeys(case.group for case in sweep.cases)
    told = [
        f"cluster: {cluster.describe()}; {sweep.placement.num_ranks} ranks, {sweep.backend}",
        f"groups {', '.join(groups)}; {count(len(sweep.cases), 'case')}, {count(len(sweep.sizes), 'size')} from "
        f"{size(sweep.sizes[0])} to {size(sweep.sizes[-1])}, {count(sweep.num_rounds, 'round')}",
        f"budget: {sweep.budget_s:g} s of measuring (--budget-s), without the start of jobs; sizes that do not fit "
        "into it are left out, the largest first",
    ]
    if len(sweep.settings) > 1:
        told.append(f"settings {', '.join(sweep.settings)}: a job of its own for each in every round, in turn")
    if sweep.backend == "gloo" and any(name.startswith("NCCL_") for env in sweep.settings.values() for name in env):
        told.append("there are no GPUs: gloo carries the data, and settings of NCCL change nothing")
    if _shares_cores(sweep.placement, cluster):
        told.append("ranks share cores: times of gloo are those of this machine as much as of its network")
    return told
