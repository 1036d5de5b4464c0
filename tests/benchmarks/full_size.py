"""SmolLM2-360M and DistilBERT at their full size on this machine: gated, one step each, with what they hold and take.

    python -m tests.benchmarks.full_size

Batches and sequences are short, so that two cores and 24 GiB do; the parameters are all there. Prints parameters,
gradients and optimizer state of every rank beside the published ones (L4s, MiB: 1380/1380/2761 for the baseline,
690/690/1380 for ZeRO-3), the peak of every process's memory and the times.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import raybench

MIB = 2**20
SHORT = ["--steps", "1", "--warmup", "1", "--repeats", "1", "--timeout-s", "900", "--set", "evaluate=null"]
TEXT = ["--set", "workload.data.name=reviews", "--set", "workload.data.num_samples=64"]
CASES = {
    "l:zero3": ["workload.sequence_length=64", "workload.micro_batch_size=1", "workload.num_micro_batches=2"],
    "m:one-f-one-b-3": ["workload.sequence_length=128", "workload.micro_batch_size=1", "workload.num_micro_batches=4"],
}


def measure(target: str, settings: list[str]) -> None:
    """Run one case in a process of its own and print what its rows say."""
    sizes = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "raybench", "run", target, "--scale", "full", "--launcher", "torchrun"]
        done = subprocess.run(
            [*command, *SHORT, *TEXT, *sizes, "--results", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{target}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        results = raybench.load(folder)
        (run,) = results.runs.to_dict("records")
        print(
            f"{target}: {run['status']}, gate {run['gate']} ({run['gate_scope']} scope, worst error "
            f"{run['gate_worst_error']:.1e} of {run['gate_worst_parameter']}), weights {run['weights']}, "
            f"{run['num_parameters']:,} parameters, one step {run['window_ns'] / 1e9:.2f} s, gate "
            f"{run['gate_ns'] / 1e9:.0f} s"
        )
        for rank in results.ranks.sort_values("rank").to_dict("records"):
            states = "/".join(f"{rank[f'{kind}_bytes'] / MIB:.0f}" for kind in ("parameter", "gradient", "optimizer"))
            peak = rank["peak_rss_bytes"] / MIB
            print(f"  rank {rank['rank']}: states {states} MiB, peak of the process {peak:.0f} MiB")


def main() -> None:
    for target in sys.argv[1:] or CASES:
        measure(target, CASES[target])


if __name__ == "__main__":
    main()
