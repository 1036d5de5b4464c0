"""The same case under Ray and under torchrun, alternating; prints the ratio of their throughputs.

    python -m tests.benchmarks.launchers [ALTERNATIONS]

The first alternation is discarded. Each launch is a suite of its own in a new process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import raybench

MODEL = ["workload.model.num_layers=4", "workload.model.width=256", "workload.model.ffn_width=1024"]
CASE = ["run", "a:bucketed", "--scale", "smoke", "--repeats", "1", "--steps", "60", "--warmup", "3"]


def launch(launcher: str, results: Path) -> float:
    """Tokens per second of one launch."""
    command = [str(Path(sys.executable).with_name("raybench")), *CASE, "--launcher", launcher]
    command += ["--results", str(results)] + [part for key in MODEL for part in ("--set", key)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    newest = sorted((results / "runs").iterdir())[-1].name
    runs = raybench.load(str(results), newest).runs
    return float(runs.tokens.iloc[0] / runs.window_ns.iloc[0] * 1e9)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            ray = launch("ray", Path(folder) / "ray")
            torchrun = launch("torchrun", Path(folder) / "torchrun")
            note = " (discarded)" if index == 0 else ""
            print(f"ray {ray:,.0f}  torchrun {torchrun:,.0f}  ratio {ray / torchrun:.3f}{note}", flush=True)
            if index:
                ratios.append(ray / torchrun)
    print(f"median ratio {statistics.median(ratios):.3f}  of {len(ratios)}: {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
