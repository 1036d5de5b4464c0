"""The command line: thin, and quick to start; torch, Ray and pandas are imported where they are used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raybench import __version__
from raybench.errors import RequestError
from raybench.suite.answer import Answer
from raybench.suite.numbers import above_zero, seconds, whole_number
from raybench.suite.shell import call

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which parallelism should I train with, here? Measured on your own Ray cluster.",
)
Tracks = Annotated[
    list[str] | None,
    typer.Argument(metavar="TRACK[:CASE] …", help="Letter, name or prefix of a track, or a YAML file."),
]
Results = Annotated[str | None, typer.Option("--results", metavar="DIR|s3://…", help="Where rows go.")]
Scale = Annotated[
    str | None, typer.Option("--scale", metavar="smoke|full", help="By default full with GPUs, else smoke.")
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", parser=whole_number("--steps", 1), help="Steps in the timed window."),
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", metavar="N", parser=whole_number("--warmup", 0), help="Steps before the window."),
]
Repeats = Annotated[
    int | None, typer.Option("--repeats", metavar="N", parser=whole_number("--repeats", 1), help="Rounds a case.")
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget-s",
        metavar="N",
        parser=seconds("--budget-s"),
        help="Seconds for all; costs rounds, never the gate.",
    ),
]
Timeout = Annotated[
    int | None,
    typer.Option(
        "--timeout-s",
        metavar="N",
        parser=whole_number("--timeout-s", 1),
        help="Longest time of a round, gate included.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[=SUITE_ID]", help="Go on with the newest suite of this request, or the one named."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Resume although code, versions or hardware changed.")]
Launcher = Annotated[
    str, typer.Option("--launcher", metavar="ray|torchrun", help="torchrun: this node alone, without Ray.")
]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Run the libraries' implementations too.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A dotted key of the track; may be repeated."),
]
NcclEnv = Annotated[
    str | None,
    typer.Option("--nccl-env", metavar="NAME|FILE", help="NCCL settings for every rank, by name or from a file."),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="[=N]", help="Trace N steps (2) of every case behind its last window."),
]
Nsys = Annotated[bool, typer.Option("--nsys", help="Trace with NVIDIA Nsight Systems instead of torch.profiler.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, on what, and roughly how long.")]
SIDE = "A folder, a suite_id in results/, or FOLDER@SUITE_ID"
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]


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
    cluster: Annotated[bool, typer.Option("--cluster", help="Ask every node of the Ray cluster.")] = False,
    as_json: Json = False,
) -> Answer:
    """Tracks, cases, what each needs, and whether it can run here."""
    from raybench.suite.commands import list_command

    return list_command(on_cluster=cluster)


@app.command("run")
def run(
    tracks: Tracks = None,
    results: Results = None,
    scale: Scale = None,
    steps: Steps = None,
    warmup: Warmup = None,
    repeats: Repeats = None,
    budget_s: Budget = None,
    timeout_s: Timeout = None,
    resume: Resume = None,
    force: Force = False,
    launcher: Launcher = "ray",
    peers: Peers = True,
    settings: Set = None,
    nccl_env: NcclEnv = None,
    trace: Trace = None,
    nsys: Nsys = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> Answer:
    """Measure tracks, or single cases of them."""
    return _run(_named(tracks), **_without(locals(), "tracks"))


@app.command("run-all")
def run_all(
    results: Results = None,
    scale: Scale = None,
    steps: Steps = None,
    warmup: Warmup = None,
    repeats: Repeats = None,
    budget_s: Budget = None,
    timeout_s: Timeout = None,
    resume: Resume = None,
    force: Force = False,
    launcher: Launcher = "ray",
    peers: Peers = True,
    settings: Set = None,
    nccl_env: NcclEnv = None,
    trace: Trace = None,
    nsys: Nsys = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> Answer:
    """Measure every track of the suite."""
    return _run(None, **locals())


@app.command("verify")
def verify(
    tracks: Tracks = None,
    results: Results = None,
    scale: Scale = None,
    timeout_s: Timeout = None,
    resume: Resume = None,
    force: Force = False,
    launcher: Launcher = "ray",
    peers: Peers = True,
    settings: Set = None,
    nccl_env: NcclEnv = None,
    dry_run: DryRun = False,
    as_json: Json = False,
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
    results: Annotated[str, typer.Argument(metavar="[RESULTS]", help=f"{SIDE}.")] = "results",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the files go.")] = Path("report"),
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            metavar="USD_PER_GPU_HOUR",
            parser=above_zero("--price", "USD"),
            help="Adds what a million tokens cost.",
        ),
    ] = None,
    reference: Annotated[bool, typer.Option("--reference", help="Show published numbers beside the rows.")] = False,
    export: Annotated[
        str | None, typer.Option("--export", metavar="csv,md,tensorboard,mlflow", help="For other tools, too.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """A table of what was measured; BENCHMARK_SUMMARY.md, report.html and figures."""
    from raybench.suite.commands import report_command

    return report_command(results, out, price=price, reference=reference, exports=export)


@app.command("compare")
def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help=f"{SIDE}; several suites with commas between them.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Likewise.")],
    as_json: Json = False,
) -> Answer:
    """Faster, slower or the same, case by case; at least 3 suites a side. Exit code 3 when anything got worse."""
    from raybench.suite.commands import compare_command

    return compare_command(base, new)


@app.command("schedule")
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as gpipe or one-f-one-b.")],
    stages: Annotated[
        int, typer.Option("--stages", metavar="P", parser=whole_number("--stages", 1), help="Ranks of the pipeline.")
    ],
    micro_batches: Annotated[
        int,
        typer.Option(
            "--micro-batches", metavar="M", parser=whole_number("--micro-batches", 1), help="Micro-batches a step."
        ),
    ],
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", metavar="V", parser=whole_number("--chunks", 1), help="Chunks of the model a rank."),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            "--times", metavar="F,B,W,C", help="Forward, input gradient, weight gradient and transfer, in ms."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it, too.")] = None,
    as_json: Json = False,
) -> Answer:
    """A pipeline schedule, checked and simulated."""
    from raybench.suite.commands import schedule_command

    return schedule_command(name, stages=stages, micro_batches=micro_batches, chunks=chunks, times=times, png=png)


@app.command("comm")
def comm(
    operations: Annotated[
        str | None,
        typer.Option("--operations", metavar="A,B,…", help="Such as all-reduce or send-receive; all by default."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="MIN:MAX[:FACTOR]", help="8:8M:4 without GPUs, 8:1G:2 with, by default."),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups",
            metavar="node,across,all,AXIS",
            help="Ranks of a node, one of each node, all, or an axis of --layout; by default all that there are.",
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="AXIS=N,…", help="Such as data=2,tensor=4: adds its axes.")
    ] = None,
    dtypes: Annotated[str | None, typer.Option("--dtypes", metavar="fp32,bf16", help="Both by default.")] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            metavar="N",
            parser=whole_number("--ranks-per-node", 1),
            help="By default as many as GPUs, 2 without.",
        ),
    ] = None,
    repeats: Repeats = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            metavar="N",
            parser=seconds("--budget-s"),
            help="Seconds of measuring, 60 without GPUs, 600 with; costs the largest sizes.",
        ),
    ] = None,
    timeout_s: Annotated[
        int | None,
        typer.Option(
            "--timeout-s",
            metavar="N",
            parser=whole_number("--timeout-s", 1),
            help="Longest time of one operation's sizes.",
        ),
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(
            "--link-gbps",
            metavar="X",
            parser=above_zero("--link-gbps", "Gbit/s"),
            help="The link between nodes (on one node: within it); by default as its interface says.",
        ),
    ] = None,
    nccl_env: Annotated[
        str | None,
        typer.Option(
            "--nccl-env",
            metavar="A,B,…",
            help="Settings to compare, by name or file, or none; each in jobs of its own.",
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Measure the largest size beside compute, too.")
    ] = True,
    by_size: Annotated[bool, typer.Option("--by-size", help="Print a line a size, not only one an operation.")] = False,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it, too.")] = None,
    results: Results = None,
    launcher: Launcher = "ray",
    as_json: Json = False,
) -> Answer:
    """How fast the network between the ranks is: latency and bandwidth, operation by operation, checked."""
    from raybench.comm.command import CommRequest, comm_command
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
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[topo|nccl|watchdog FILE] …", help="Output of nvidia-smi topo -m, NCCL, or PyTorch."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="ENV_FILE", help="Write the environment to use, for --nccl-env."),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """What is wrong with this cluster; or what topologies, NCCL logs and watchdog reports say, several as one story."""
    from raybench.suite.commands import doctor_command

    return doctor_command(files or [], out)


@app.command("traces")
def traces(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of traces (PyTorch, nsys), or one trace.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the files go.")] = Path("traces"),
    select: Annotated[
        str, typer.Option("--select", metavar="latest|all", help="Of several traces a rank: the newest, or every one.")
    ] = "latest",
    as_json: Json = False,
) -> Answer:
    """Where the time went, from the profiler's traces: summary.csv and summary.html."""
    from raybench.traces.command import traces_command

    return traces_command(folder, out, select)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: every ending is an answer and an exit code."""
    return call(app, list(sys.argv[1:] if arguments is None else arguments))
