"""The options of the commands, each once: its type, its name, what it takes and its line of `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raybench.suite.numbers import above_zero, seconds, whole_number


def _whole(name: str, metavar: str, least: int, help: str) -> Any:
    return typer.Option(name, metavar=metavar, parser=whole_number(name, least), help=help)


def _seconds(name: str, help: str) -> Any:
    return typer.Option(name, metavar="N", parser=seconds(name), help=help)


def _above_zero(name: str, metavar: str, unit: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, parser=above_zero(name, unit), help=help)


# Of several commands

Results = Annotated[str | None, typer.Option("--results", metavar="DIR|s3://…", help="Where rows go.")]
Repeats = Annotated[int | None, _whole("--repeats", "N", 1, "Rounds a case.")]
Launcher = Annotated[
    str, typer.Option("--launcher", metavar="ray|torchrun", help="torchrun: this node alone, without Ray.")
]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it, too.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the files go.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]

# list

OnCluster = Annotated[bool, typer.Option("--cluster", help="Ask every node of the Ray cluster.")]

# run, run-all, verify

Tracks = Annotated[
    list[str] | None,
    typer.Argument(metavar="TRACK[:CASE] …", help="Letter, name or prefix of a track, or a YAML file."),
]
Scale = Annotated[
    str | None, typer.Option("--scale", metavar="smoke|full", help="By default full with GPUs, else smoke.")
]
Steps = Annotated[int | None, _whole("--steps", "N", 1, "Steps in the timed window.")]
Warmup = Annotated[int | None, _whole("--warmup", "N", 0, "Steps before the window.")]
Budget = Annotated[float | None, _seconds("--budget-s", "Seconds for all; costs rounds, never the gate.")]
Timeout = Annotated[int | None, _whole("--timeout-s", "N", 1, "Longest time of a round, gate included.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[=SUITE_ID]", help="Go on with the newest suite of this request, or the one named."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Resume although code, versions or hardware changed.")]
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

# report, compare

SIDE = "A folder, a suite_id in results/, or FOLDER@SUITE_ID"
Measured = Annotated[str, typer.Argument(metavar="[RESULTS]", help=f"{SIDE}.")]
Price = Annotated[float | None, _above_zero("--price", "USD_PER_GPU_HOUR", "USD", "Adds what a million tokens cost.")]
Reference = Annotated[bool, typer.Option("--reference", help="Show published numbers beside the rows.")]
Export = Annotated[
    str | None, typer.Option("--export", metavar="csv,md,tensorboard,mlflow", help="For other tools, too.")
]
Base = Annotated[str, typer.Argument(metavar="BASE", help=f"{SIDE}; several suites with commas between them.")]
New = Annotated[str, typer.Argument(metavar="NEW", help="Likewise.")]

# schedule

ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="Such as gpipe or one-f-one-b.")]
Stages = Annotated[int, _whole("--stages", "P", 1, "Ranks of the pipeline.")]
MicroBatches = Annotated[int, _whole("--micro-batches", "M", 1, "Micro-batches a step.")]
Chunks = Annotated[int | None, _whole("--chunks", "V", 1, "Chunks of the model a rank.")]
Times = Annotated[
    str | None,
    typer.Option("--times", metavar="F,B,W,C", help="Forward, input gradient, weight gradient and transfer, in ms."),
]

# comm

Operations = Annotated[
    str | None,
    typer.Option("--operations", metavar="A,B,…", help="Such as all-reduce or send-receive; all by default."),
]
Sizes = Annotated[
    str | None,
    typer.Option("--sizes", metavar="MIN:MAX[:FACTOR]", help="8:8M:4 without GPUs, 8:1G:2 with, by default."),
]
Groups = Annotated[
    str | None,
    typer.Option(
        "--groups",
        metavar="node,across,all,AXIS",
        help="Ranks of a node, one of each node, all, or an axis of --layout; by default all that there are.",
    ),
]
SweepLayout = Annotated[
    str | None, typer.Option("--layout", metavar="AXIS=N,…", help="Such as data=2,tensor=4: adds its axes.")
]
Dtypes = Annotated[str | None, typer.Option("--dtypes", metavar="fp32,bf16", help="Both by default.")]
RanksPerNode = Annotated[int | None, _whole("--ranks-per-node", "N", 1, "By default as many as GPUs, 2 without.")]
SweepBudget = Annotated[
    float | None,
    _seconds("--budget-s", "Seconds of measuring, 60 without GPUs, 600 with; costs the largest sizes."),
]
SweepTimeout = Annotated[int | None, _whole("--timeout-s", "N", 1, "Longest time of one operation's sizes.")]
LinkGbps = Annotated[
    float | None,
    _above_zero(
        "--link-gbps",
        "X",
        "Gbit/s",
        "The link between nodes (on one node: within it); by default as its interface says.",
    ),
]
NcclEnvs = Annotated[
    str | None,
    typer.Option(
        "--nccl-env",
        metavar="A,B,…",
        help="Settings to compare, by name or file, or none; each in jobs of its own.",
    ),
]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Measure the largest size beside compute, too.")]
BySize = Annotated[bool, typer.Option("--by-size", help="Print a line a size, not only one an operation.")]

# doctor, traces

Evidence = Annotated[
    list[str] | None,
    typer.Argument(metavar="[topo|nccl|watchdog FILE] …", help="Output of nvidia-smi topo -m, NCCL, or PyTorch."),
]
EnvFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="ENV_FILE", help="Write the environment to use, for --nccl-env."),
]
TraceFolder = Annotated[str, typer.Argument(metavar="DIR", help="A folder of traces (PyTorch, nsys), or one trace.")]
Select = Annotated[
    str, typer.Option("--select", metavar="latest|all", help="Of several traces a rank: the newest, or every one.")
]
