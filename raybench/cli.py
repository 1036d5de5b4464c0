"""The command line: thin, and quick to start; torch, Ray and pandas are imported where they are used."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raybench import __version__
from raybench import options as opt
from raybench.errors import RequestError
from raybench.suite.answer import Answer
from raybench.suite.shell import call

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which parallelism should I train with, here? Measured on your own Ray cluster.",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> Answer | None:
    if version:
        return Answer(text=f"raybench {__version__}")
    if context.invoked_subcommand is None:
        return Answer(exit_code=2, text=context.get_help())
    return None


@app.command("list")
def list_tracks(
    cluster: opt.OnCluster = False,
    as_json: opt.Json = False,
) -> Answer:
    """Tracks, cases, what each needs, and whether it can run here."""
    from raybench.suite.commands import list_command

    return list_command(on_cluster=cluster)


@app.command("run")
def run(
    tracks: opt.Tracks = None,
    results: opt.Results = None,
    scale: opt.Scale = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    repeats: opt.Repeats = None,
    budget_s: opt.Budget = None,
    timeout_s: opt.Timeout = None,
    resume: opt.Resume = None,
    force: opt.Force = False,
    launcher: opt.Launcher = "ray",
    peers: opt.Peers = True,
    settings: opt.Set = None,
    nccl_env: opt.NcclEnv = None,
    trace: opt.Trace = None,
    nsys: opt.Nsys = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> Answer:
    """Measure tracks, or single cases of them."""
    return _run(_named(tracks), **_without(locals(), "tracks"))


@app.command("run-all")
def run_all(
    results: opt.Results = None,
    scale: opt.Scale = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    repeats: opt.Repeats = None,
    budget_s: opt.Budget = None,
    timeout_s: opt.Timeout = None,
    resume: opt.Resume = None,
    force: opt.Force = False,
    launcher: opt.Launcher = "ray",
    peers: opt.Peers = True,
    settings: opt.Set = None,
    nccl_env: opt.NcclEnv = None,
    trace: opt.Trace = None,
    nsys: opt.Nsys = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> Answer:
    """Measure every track of the suite."""
    return _run(None, **locals())


@app.command("verify")
def verify(
    tracks: opt.Tracks = None,
    results: opt.Results = None,
    scale: opt.Scale = None,
    timeout_s: opt.Timeout = None,
    resume: opt.Resume = None,
    force: opt.Force = False,
    launcher: opt.Launcher = "ray",
    peers: opt.Peers = True,
    settings: opt.Set = None,
    nccl_env: opt.NcclEnv = None,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> Answer:
    """The gate alone: are the gradients right? Nothing is timed."""
    return _run(_named(tracks), verify_only=True, **_without(locals(), "tracks"))


def _named(tracks: list[str] | None) -> list[str]:
    if not tracks:
        raise RequestError("TRACK: none is named (raybench list shows them, raybench run-all takes all)")
    return tracks


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _run(
    tracks: list[str] | None,
    *,
    results: str | None,
    scale: str | None,
    timeout_s: int | None,
    resume: str | None,
    force: bool,
    launcher: str,
    peers: bool,
    settings: list[str] | None,
    nccl_env: str | None,
    dry_run: bool,
    as_json: bool,
    steps: int | None = None,
    warmup: int | None = None,
    repeats: int | None = None,
    trace: str | None = None,
    nsys: bool = False,
    budget_s: float | None = None,
    verify_only: bool = False,
) -> Answer:
    from raybench.suite import request as asked
    from raybench.suite.catalog import parse_targets, whole_suite
    from raybench.suite.commands import run_command

    measure = asked.measure_settings(steps=steps, warmup=warmup, repeats=repeats, timeout_s=timeout_s)
    request = asked.Request(
        targets=tuple(whole_suite() if tracks is None else parse_targets(tracks)),
        results=asked.default_results() if results is None else results,
        scale=asked.check_scale(scale),
        settings=(*(settings or ()), *measure),
        budget_s=budget_s,
        resume=resume,
        force=force,
        launcher=asked.check_launcher(launcher),
        peers=peers,
        nccl_env=_nccl_settings(nccl_env),
        verify_only=verify_only,
        trace_steps=asked.traced_steps(trace, with_nsys=nsys),
        with_nsys=nsys,
    )
    return run_command(request, dry_run=dry_run)


def _nccl_settings(name: str | None) -> dict[str, str]:
    from raybench.suite.nccl_env import VARIABLE, resolve, selected

    if name is not None:
        return resolve(name)
    chosen = selected()
    return {} if chosen is None else resolve(chosen, VARIABLE)


@app.command("report")
def report(
    results: opt.Measured = "results",
    out: opt.Out = Path("report"),
    price: opt.Price = None,
    reference: opt.Reference = False,
    export: opt.Export = None,
    as_json: opt.Json = False,
) -> Answer:
    """A table of what was measured; BENCHMARK_SUMMARY.md, report.html and figures."""
    from raybench.suite.commands import report_command

    return report_command(results, out, price=price, reference=reference, exports=export)


@app.command("compare")
def compare(
    base: opt.Base,
    new: opt.New,
    as_json: opt.Json = False,
) -> Answer:
    """Faster, slower or the same, case by case; at least 3 suites a side. Exit code 3 when anything got worse."""
    from raybench.suite.commands import compare_command

    return compare_command(base, new)


@app.command("schedule")
def schedule(
    name: opt.ScheduleName,
    stages: opt.Stages,
    micro_batches: opt.MicroBatches,
    chunks: opt.Chunks = None,
    times: opt.Times = None,
    png: opt.Png = None,
    as_json: opt.Json = False,
) -> Answer:
    """A pipeline schedule, checked and simulated."""
    from raybench.suite.commands import schedule_command

    return schedule_command(name, stages=stages, micro_batches=micro_batches, chunks=chunks, times=times, png=png)


@app.command("comm")
def comm(
    operations: opt.Operations = None,
    sizes: opt.Sizes = None,
    groups: opt.Groups = None,
    layout: opt.SweepLayout = None,
    dtypes: opt.Dtypes = None,
    ranks_per_node: opt.RanksPerNode = None,
    repeats: opt.Repeats = None,
    budget_s: opt.SweepBudget = None,
    timeout_s: opt.SweepTimeout = None,
    link_gbps: opt.LinkGbps = None,
    nccl_env: opt.NcclEnvs = None,
    overlap: opt.Overlap = True,
    by_size: opt.BySize = False,
    png: opt.Png = None,
    results: opt.Results = None,
    launcher: opt.Launcher = "ray",
    as_json: opt.Json = False,
) -> Answer:
    """How fast the network between the ranks is: latency and bandwidth, operation by operation, checked."""
    from raybench.comm.command import comm_command
    from raybench.comm.request import CommRequest
    from raybench.comm.sweep import DEFAULT_ROUNDS, DEFAULT_TIMEOUT_S
    from raybench.suite import request as asked

    return comm_command(
        CommRequest(
            results=asked.default_results() if results is None else results,
            operations=operations,
            sizes=sizes,
            groups=groups,
            layout=layout,
            dtypes=dtypes,
            ranks_per_node=ranks_per_node,
            num_rounds=repeats or DEFAULT_ROUNDS,
            budget_s=budget_s,
            timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
            link_gbps=link_gbps,
            overlap=overlap,
            nccl_env=nccl_env,
            launcher=asked.check_launcher(launcher),
            png=png,
            by_size=by_size,
        )
    )


@app.command("doctor")
def doctor(
    files: opt.Evidence = None,
    out: opt.EnvFile = None,
    as_json: opt.Json = False,
) -> Answer:
    """What is wrong with this cluster; or what topologies, NCCL logs and watchdog reports say, several as one story."""
    from raybench.suite.commands import doctor_command

    return doctor_command(files or [], out)


@app.command("traces")
def traces(
    folder: opt.TraceFolder,
    out: opt.Out = Path("traces"),
    select: opt.Select = "latest",
    as_json: opt.Json = False,
) -> Answer:
    """Where the time went, from the profiler's traces: summary.csv and summary.html."""
    from raybench.traces.command import traces_command

    return traces_command(folder, out, select)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: every ending is an answer and an exit code."""
    atexit.register(gc.freeze)  # an ending process needs no search for cycles in all that it has imported
    return call(app, list(sys.argv[1:] if arguments is None else arguments))
