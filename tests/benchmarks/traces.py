"""`raybench traces` against HolisticTraceAnalysis: time and memory of the whole process, runs alternating.

    python -m tests.benchmarks.traces HTA_PYTHON [ROUNDS] [FOLDER|million:N ...]

HTA_PYTHON is an interpreter that has HolisticTraceAnalysis; FOLDER holds one case's traces; `million:2` makes a trace
of two million events. HTA reads the traces, and gives idle, compute and overlap.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

HTA = """
import logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print(analysis.get_temporal_breakdown(visualize=False).to_csv())
print(analysis.get_comm_comp_overlap(visualize=False).to_csv())
"""
AS_INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""What pip installs is compiled; a checkout's modules are kept compiled after the first round, too."""
KERNELS = ("ampere_sgemm_128x64_tn", "void at::native::elementwise_kernel<128, 4>(int)", "vectorized_layer_norm_kernel")
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EVENTS_AN_OPERATOR = 3
"""The operator, its launch, and the kernel."""
OPERATORS_A_STEP = 5000


def main() -> None:
    python, *arguments = sys.argv[1:]
    num_rounds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 5
    with TemporaryDirectory() as made:
        for place in arguments:
            folder = Path(place)
            if place.startswith("million:"):
                folder = Path(made) / "in"
                write_trace(folder, int(float(place.removeprefix("million:")) * 1e6))
            compare(python, folder, Path(made) / "out", num_rounds, place)


def compare(python: str, folder: Path, out: Path, num_rounds: int, name: str) -> None:
    """One line of medians."""
    commands = {
        "raybench": [sys.executable, "-m", "raybench", "traces", str(folder), "-o", str(out)],
        "HTA": [python, "-c", HTA, str(folder)],
    }
    found: dict[str, list[tuple[float, float, int, int]]] = {who: [] for who in commands}
    for _ in range(num_rounds):
        for who, command in commands.items():
            found[who].append(run(command))
    medians = {who: [statistics.median(values) for values in zip(*rows, strict=True)] for who, rows in found.items()}
    ratio = statistics.median(a[0] / b[0] for a, b in zip(*found.values(), strict=True))
    told = "  ".join(
        f"{who} {wall:.2f} s ({cpu:.2f} s of CPU), {memory / 2**20:.0f} MiB, exit {code:.0f}"
        for who, (wall, cpu, memory, code) in medians.items()
    )
    print(f"{name[-40:]:<40}  {told}  time {ratio:.3f}", flush=True)


def run(command: list[str]) -> tuple[float, float, int, int]:
    """Seconds, seconds of CPU, peak bytes of the largest process, and how it ended."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=AS_INSTALLED, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, status


def write_trace(folder: Path, num_events: int) -> None:
    """A trace as torch 2.4 writes one of a data-parallel job on a GPU: every operator launches a kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Made GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
    }
    with (folder / "rank_0.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(about)[:-1] + ', "traceEvents": [\n')
        for place, event in enumerate(events(num_events)):
            file.write((",\n" if place else "") + json.dumps(event))
        file.write('\n], "traceName": "made.json"}')


def events(num_events: int) -> Iterator[dict[str, object]]:
    """Of operators, launches and kernels, every twentieth an all-reduce on a stream of its own."""
    at = 0.0
    for index in range(num_events // EVENTS_AN_OPERATOR):
        place, kernel = index % 20, KERNELS[index % 3]
        if index % OPERATORS_A_STEP == 0:
            yield event("user_annotation", f"ProfilerStep#{index // OPERATORS_A_STEP}", at, 20.0 * OPERATORS_A_STEP)
        yield event("cpu_op", ("aten::addmm", "aten::add_", "aten::layer_norm")[index % 3], at, 15.25,
                    **{"External id": index, "Sequence number": index, "Input Dims": [[64, 768], [768, 768], []],
                       "Input type": ["float", "float", ""], "Ev Idx": index})  # fmt: skip
        yield event("cuda_runtime", "cudaLaunchKernel", at + 5, 4.5, correlation=index + 1, **{"External id": index})
        stream = 20 if place == 19 else 7
        more = {
            **{"External id": index, "queued": 0, "device": 0, "context": 1, "stream": stream},
            **{"correlation": index + 1, "registers per thread": 96, "shared memory": 0, "blocks per SM": 3.55},
            **{"warps per SM": 28.4, "grid": [96, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 41},
        }
        name, length = (ALL_REDUCE, 150.125) if place == 19 else (kernel, 12.625)
        yield {**event("kernel", name, at + 12, length, **more), "pid": 0, "tid": stream}
        at += 20.0


def event(category: str, name: str, at: float, length: float, **arguments: object) -> dict[str, object]:
    """As Kineto writes one; times in microseconds."""
    times = {"ts": 1_700_000_000_000_000 + at, "dur": length}
    return {"ph": "X", "cat": category, "name": name, "pid": 42, "tid": 42, **times, "args": arguments}


if __name__ == "__main__":
    main()
