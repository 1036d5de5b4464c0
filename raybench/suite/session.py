"""A request from its check to its last row: find the cluster, plan, drive."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from raybench.errors import RequestError
from raybench.models.sources import UnreachableError
from raybench.suite.cluster import Cluster, probe_local, probe_ray
from raybench.suite.driver import Driver, Outcome
from raybench.suite.estimate import estimate_track
from raybench.suite.interrupts import orderly
from raybench.suite.means import Means
from raybench.suite.plan import TrackPlan, plan_track, skip_track
from raybench.suite.progress import Progress
from raybench.suite.request import LauncherName, Request
from raybench.suite.resume import Recorded, find_suite, read_suite, why_none
from raybench.suite.rows import RowMaker
from raybench.suite.sources import prepare_text, with_sources
from raybench.suite.track import ResolvedTrack, Scale
from raybench.wording import count


@dataclass(frozen=True)
class Prepared:
    """What would run, and on what."""

    cluster: Cluster
    scale: Scale
    plans: tuple[TrackPlan, ...]
    notes: tuple[str, ...] = field(default=())


def prepare(request: Request, cluster: Cluster) -> Prepared:
    """Plan every track of a request for a cluster.

    Raises:
        RequestError: a track needs a key on a cluster without GPUs that it does not have, or nsys has nothing to watch.
    """
    if request.with_nsys and not cluster.num_gpus:
        raise RequestError("--nsys: this cluster has no GPU that nsys could watch (use --trace)")
    scale = request.scale or cluster.default_scale
    asked = request.tracks(scale)
    plans = tuple(_plan(track, named, request, cluster, alone=len(asked) == 1) for track, named in asked)
    for plan in plans:
        if plan.backend == "gloo" and plan.track.micro_batch == "largest" and plan.track.memory_budget_mib is None:
            raise RequestError(
                f"{plan.track.track}: memory_budget_mib: is missing; without GPUs `micro_batch: largest` needs what a "
                "rank may take (such as 256)"
            )
    notes = []
    if request.with_nsys:
        notes.append(f"nsys: its reports are on every node in Ray's logs, here {nsys_folder()}")
    if scale == "full" and not cluster.num_gpus:
        notes.append("scale full without GPUs: these are sizes for GPUs, a step may take minutes")
    for plan in plans:
        for case in plan.runnable:
            if number := plan.num_crossing(case):
                total = case.layout.num_ranks // case.layout.tensor
                notes.append(f"{plan.track.track}:{case.name}: {number} of {total} tensor groups across nodes")
    return Prepared(cluster, scale, plans, tuple(notes))


def _plan(track: ResolvedTrack, named: Sequence[str], request: Request, cluster: Cluster, *, alone: bool) -> TrackPlan:
    """The plan of one track. Among others, one whose model or text cannot be reached from here is skipped."""
    try:
        found = with_sources(track)
    except UnreachableError as error:
        if alone:
            raise
        return skip_track(track, str(error), named=named)
    return plan_track(found, cluster, peers=request.peers, named=named)


@contextmanager
def connected(request: Request) -> Iterator[Cluster]:
    """The cluster that the request is for; an embedded Ray is shut down at the end."""
    with connected_by(request.launcher, with_nsys=request.with_nsys) as cluster:
        yield cluster


@contextmanager
def connected_by(launcher: LauncherName, *, with_nsys: bool = False) -> Iterator[Cluster]:
    """The cluster on which a launcher starts jobs; an embedded Ray is shut down at the end."""
    if launcher == "torchrun":
        with orderly():
            yield probe_local()
        return
    from raybench.suite.embedded import connect

    if with_nsys:  # else raylets end nsys with its worker, before it has written its report
        os.environ.setdefault("RAY_process_group_cleanup_enabled", "0")
        # Ray starts nsys around the `python` that its PATH has.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with orderly(), connect(), orderly():
        yield probe_ray()


def nsys_folder() -> Path:
    """Where Ray lets nsys write its reports on this node."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path()) / "nsight"


def drive(request: Request, prepared: Prepared, progress: Progress, *, suite_id: str) -> tuple[str, Outcome]:
    """Run what was prepared, as `suite_id` unless it resumes another; the suite's id and how it ended."""
    from raybench.results.store import Writer
    from raybench.suite.launch import launcher
    from raybench.suite.sink import Sink

    record = request.record(prepared.scale)
    recorded = recorded_so_far(request, prepared, progress.note)
    if recorded is None:
        recorded = Recorded(suite_id)
    else:
        progress.note(f"going on with suite {recorded.suite_id}: {_what_is_left(recorded, prepared.plans)}")
    writer = Writer(request.results, recorded.suite_id, record)
    writer.check()
    rows = [
        RowMaker(
            suite_id=recorded.suite_id,
            plan=plan,
            cluster=prepared.cluster,
            launcher=request.launcher,
            nccl_env=request.nccl_env,
        )
        for plan in prepared.plans
    ]
    for plan in prepared.plans:
        if plan.runnable:
            prepare_text(plan.track, progress.note)
    host = sink_host(prepared.cluster)
    driver = Driver(
        means=Means(
            store=writer,
            launcher=launcher(request.launcher),
            make_sink=lambda: Sink(host),
            progress=progress,
            verify_only=request.verify_only,
            trace_steps=request.trace_steps,
            with_nsys=request.with_nsys,
            replan=_replanner(request, prepared.cluster, progress),
        ),
        budget_s=request.budget_s,
        estimate_s=lambda plan: estimate_track(plan).seconds,
        recorded=recorded,
    )
    return recorded.suite_id, driver.run(list(zip(prepared.plans, rows, strict=True)))


def _what_is_left(recorded: Recorded, plans: Sequence[TrackPlan]) -> str:
    left = sum(
        recorded.num_left(plan.track.track, case.name, plan.track.measure.num_rounds)
        for plan in plans
        for case in plan.runnable
    )
    return f"{count(left, 'round')} left" if left else "nothing is left to run"


def sink_host(cluster: Cluster) -> str:
    """The address by which the ranks reach this process."""
    if cluster.nodes[0].node_id is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


def recorded_so_far(request: Request, prepared: Prepared, note: Callable[[str], None]) -> Recorded | None:
    """What the suite to go on with has; None for a new one, with a note if there was none to go on with.

    Raises:
        RequestError: the suite named is not there, or cannot be gone on with.
    """
    if request.resume is None:
        return None
    record = request.record(prepared.scale)
    suite_id = find_suite(request.results, request.resume, record)
    if suite_id is None:
        note(f"{why_none(request.results, record)}, so a new one starts")
        return None
    return read_suite(request.results, suite_id, prepared.cluster, force=request.force)


def _replanner(request: Request, cluster: Cluster, progress: Progress) -> Callable[[TrackPlan], TrackPlan]:
    """Plans a track again for those nodes that still answer."""
    current = cluster

    def replan(plan: TrackPlan) -> TrackPlan:
        nonlocal current
        if len(cluster.nodes) == 1:
            return plan
        alive = {node.node_id for node in probe_ray(strict=False).nodes}
        gone = [node.address for node in current.nodes if node.node_id not in alive]
        if len(gone) == len(current.nodes):
            raise RequestError("cluster: no node answers any more")
        if gone:
            progress.note(f"cluster: {', '.join(gone)} went away; going on with what remains")
            current = replace(current, nodes=tuple(n for n in current.nodes if n.node_id in alive))
        if current is cluster:
            return plan
        return plan_track(plan.track, current, peers=request.peers, named=plan.named)

    return replan
