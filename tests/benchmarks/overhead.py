"""What a track takes beside its gate and its windows, against an empty TorchTrainer fit of the same world size.

    python -m tests.benchmarks.overhead [ALTERNATIONS]

Both in one Ray, alternating.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import raybench
from raybench.suite.embedded import connect


def empty_fit(folder: str, num_ranks: int) -> float:
    """Seconds of a fit whose ranks return at once."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    begin = time.perf_counter()
    TorchTrainer(
        lambda: None,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_ranks, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=0)),
    ).fit()
    return time.perf_counter() - begin


def track(folder: str) -> tuple[float, dict[str, float]]:
    """Seconds of track A at smoke, and the parts of it that its rows tell."""
    from raybench.suite.catalog import parse_targets
    from raybench.suite.cluster import probe_ray
    from raybench.suite.progress import Progress
    from raybench.suite.request import Request, new_suite_id
    from raybench.suite.session import drive, prepare

    request = Request(targets=tuple(parse_targets(["a"])), scale="smoke", results=folder, launcher="ray")
    prepared = prepare(request, probe_ray())
    suite_id = new_suite_id()
    begin = time.perf_counter()
    drive(request, prepared, Progress(), suite_id=suite_id)
    seconds = time.perf_counter() - begin
    runs = raybench.load(folder, suite_id).runs
    parts = {
        "gate": runs.gate_ns.sum(),
        "windows": runs.window_ns.sum(),
        "control windows": runs.groupby("round").control_window_ns.first().sum(),
        "build": runs.build_ns.sum(),
        "warm-up": runs.warmup_ns.sum(),
        "instrumented": runs.instrumented_ns.sum(),
    }
    return seconds, {name: float(value) / 1e9 for name, value in parts.items()}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ratios = []
    with tempfile.TemporaryDirectory() as folder, connect():
        for _ in range(count):
            fit = empty_fit(folder, 2)
            seconds, parts = track(folder)
            rest = seconds - parts["gate"] - parts["windows"] - parts["control windows"]
            told = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
            print(
                f"empty fit {fit:.1f} s; track {seconds:.1f} s ({told}); beside gate and windows {rest:.1f} s",
                flush=True,
            )
            ratios.append(rest / fit)
    print(f"ratio {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
