"""`raybench comm`: check what is asked, find the cluster, sweep, and show what was measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raybench.comm.driver import Outcome, Sweep, SweepRun
from raybench.comm.groups import GROUPS, groups_of, usual_groups
from raybench.comm.sweep import (
    DEFAULT_BUDGET_S,
    DEFAULT_ROUNDS,
    DEFAULT_SIZES,
    DEFAULT_TIMEOUT_S,
    DTYPES,
    KINDS,
    Backend,
    SweepCase,
    parse_layout,
    parse_names,
    parse_sizes,
    sizes_between,
)
from raybench.errors import RequestError, unknown
from raybench.results.sweep_writer import SweepWriter
from raybench.suite.answer import Answer, document
from raybench.suite.cluster import Cluster
from raybench.suite.commands import check_file_writable, check_writable, where_rows_are
from raybench.suite.job_run import Patience
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.suite.request import LauncherName, new_suite_id
from raybench.suite.track import Layout

DEFAULT_SETTING, NO_SETTING = "default", "none"
DEFAULT_RANKS_PER_NODE = 2
"""Where there are no GPUs."""
MAX_CPUS_BESIDE_GPU = 8
COPIES = 4
"""What a rank holds at most, in payloads: sent, received, what was expected, and whether they are the same."""
MAX_RANKS_PER_CORE = 16
"""Of gloo: each rank is a process with threads of its own, and a host that has too many stops answering."""


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """One sweep as it was asked for, in the words of its options; None where nothing was said."""

    results: str
    operations: str | None = None
    sizes: str | None = None
    groups: str | None = None
    layout: str | None = None
    dtypes: str | None = None
    ranks_per_node: int | None = None
    num_rounds: int = DEFAULT_ROUNDS
    budget_s: float | None = None
    timeout_s: int = DEFAULT_TIMEOUT_S
    link_gbps: float | None = None
    overlap: bool = True
    nccl_env: str | None = None
    launcher: LauncherName = "ray"
    png: Path | None = None
    by_size: bool = False
    """Print a line a size, not only one a case."""


@dataclass(frozen=True)
class Asked:
    """A request, read and checked as far as it can be without a cluster."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...] | None
    groups: tuple[str, ...] | None
    layout: Layout | None
    dtypes: tuple[str, ...]
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def comm_command(request: CommRequest) -> Answer:
    """Sweep, and answer with the table, the fit and where the rows are.

    Raises:
        RequestError: the request is wrong, or does not fit the cluster.
    """
    asked = read(request)
    check_writable(request.results)
    if request.png is not None:
        check_file_writable("--png", request.png)
    from raybench.suite.progress import for_stream
    from raybench.suite.session import connected_by

    suite_id = new_suite_id()
    with connected_by(request.launcher) as cluster:
        sweep = plan(request, asked, cluster, suite_id)
        writer = SweepWriter(request.results, suite_id, _record(request, asked))
        with for_stream() as progress:
            for note in notes(request, sweep, cluster):
                progress.note(note)
            outcome = _run(sweep, writer, request.launcher, cluster, progress)
    return answer(request, sweep, outcome)


def read(request: CommRequest) -> Asked:
    """Check every option by itself.

    Raises:
        RequestError: in one sentence that names the option.
    """
    return Asked(
        KINDS if request.operations is None else parse_names("--operations", request.operations, KINDS),
        None if request.sizes is None else parse_sizes(request.sizes),
        None if request.groups is None else parse_names("--groups", request.groups, GROUPS),
        None if request.layout is None else parse_layout(request.layout),
        DTYPES if request.dtypes is None else parse_names("--dtypes", request.dtypes, DTYPES),
        read_settings(request.nccl_env),
    )


def read_settings(names: str | None) -> dict[str, Mapping[str, str]]:
    """Environments by name: `none`, or what `--nccl-env` of other commands takes; the cluster's own by default.

    Raises:
        RequestError: one does not exist, or two have one name.
    """
    from raybench.suite.nccl_env import OPTION, VARIABLE, load_environments, resolve, selected

    if names is None:
        chosen = selected()
        return {DEFAULT_SETTING: {} if chosen is None else resolve(chosen, VARIABLE)}
    found: dict[str, Mapping[str, str]] = {}
    for name in (part.strip() for part in names.split(",")):
        label = Path(name).stem if os.sep in name or Path(name).is_file() else name
        if label in found:
            raise RequestError(f"{OPTION}: {label!r} is named twice (each setting needs a name of its own)")
        is_file = os.sep in name or Path(name).expanduser().is_file()
        if name not in (NO_SETTING, *(named := load_environments())) and not is_file:
            raise unknown(OPTION, name, (NO_SETTING, *named, "a file of KEY=VALUE"))
        found[label] = {} if name == NO_SETTING else resolve(name)
    return found


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
            "inherited_nccl_env": inherited_settings(),
            "source_hash": this_code().source_hash,
        },
    )


def _check_memory(largest: int, placement: NodePlacement, cluster: Cluster) -> None:
    """Refuse sizes of which a host could not hold what its ranks keep: its other work would be ended, too."""
    from raybench.report.text import count, size

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


def notes(request: CommRequest, sweep: Sweep, cluster: Cluster) -> list[str]:
    """What is said before anything is measured."""
    from raybench.report.text import count, size

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
    cores = {node.address: node.num_cpus for node in cluster.nodes}
    if any(share.num_ranks > cores[share.address] for share in sweep.placement.nodes):
        told.append("ranks share cores: times of gloo are those of this machine as much as of its network")
    return told


def _record(request: CommRequest, asked: Asked) -> dict[str, Any]:
    """The request as the parts' metadata hold it."""
    return {
        "operations": list(asked.kinds),
        "dtypes": list(asked.dtypes),
        "groups": None if asked.groups is None else list(asked.groups),
        "sizes": None if asked.sizes is None else list(asked.sizes),
        "layout": None if asked.layout is None else str(asked.layout),
        "settings": {name: dict(variables) for name, variables in asked.settings.items()},
        "launcher": request.launcher,
        "overlap": request.overlap,
    }


def _run(sweep: Sweep, writer: SweepWriter, launcher: LauncherName, cluster: Cluster, progress: Any) -> Outcome:
    from raybench.comm.driver import LOOP
    from raybench.suite.launch import launcher as launcher_by_name
    from raybench.suite.session import sink_host
    from raybench.suite.sink import Sink

    writer.check()
    host = sink_host(cluster)
    return SweepRun(
        sweep=sweep,
        store=writer,
        launcher=launcher_by_name(launcher, loop=LOOP),
        make_sink=lambda: Sink(host),
        progress=progress,
        patience=Patience(),
    ).run()


def answer(request: CommRequest, sweep: Sweep, outcome: Outcome) -> Answer:
    """The table and rows of the sweep, as they are in the store."""
    from raybench.analysis.links import links, sizes
    from raybench.comm.render import as_rows, draw, legend, table
    from raybench.results.folder import open_folder
    from raybench.results.reader import load

    errors = [*outcome.errors, *(outcome.refused if request.operations is not None else [])]
    code = 130 if outcome.interrupted else 1 if errors or not outcome.num_measured else 0
    place, lines, told = str(open_folder(request.results)), [f"raybench: {error}" for error in errors], None
    body: dict[str, Any] = {"links": []}
    rows: Sequence[Mapping[str, Any]] = []
    try:
        loaded = load(request.results, sweep.suite_id, of="collectives")
    except RequestError as error:
        errors.append(str(error))
        lines.append(f"raybench: {error}")
        code = code or 1
    else:
        measured, fitted = sizes(loaded), links(loaded)
        told, rows, body["links"] = table(measured, fitted, by_size=request.by_size), as_rows(measured), as_rows(fitted)
        lines = [*legend(measured, by_size=request.by_size), *lines]
        if request.png is not None and measured.time_ns.notna().any():
            try:
                draw(measured, fitted, request.png)
            except OSError as error:
                errors.append(f"--png: {request.png} cannot be written ({error.strerror or error})")
                lines.append(f"raybench: {errors[-1]}")
                code = code or 1
            else:
                body["png"] = str(request.png)
                lines.append(f"wrote {request.png}")
        lines.append(where_rows_are(place, sweep.suite_id))
    body |= {"suite_id": sweep.suite_id, "results": place, "budget_s": sweep.budget_s}
    return Answer(
        exit_code=code,
        table=told,
        text="\n".join(lines),
        document=document(code, rows=rows, errors=errors, skipped=outcome.refused, **body),
    )
