"""What marking every operation costs, as a fraction of a step, for each rung of the data-parallel ladder.

    python -m tests.benchmarks.marker [STEPS]

Two ranks train track F at scale smoke, whose steps are short: a larger model has the same marks in longer steps. The
marks of one step are taken down and then made again many times, the making of their texts included, since a
difference of two step times could not resolve a thousandth.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from raybench.data.batches import Batches
from raybench.suite.catalog import find_tracks
from raybench.suite.track import ResolvedTrack
from raybench.suite.track_file import Track
from raybench.worker.build import build_strategy
from raybench.worker.marker import Marker
from raybench.worker.recorder import Recorder
from tests.pool import Pool, Rank

BOUND = 0.002
NUM_REPLAYS = 200


class Taken:
    """Marks that are made and taken down."""

    def __init__(self, marker: Marker) -> None:
        self.marker = marker
        self.texts: list[str] = []

    def mark(self, text: str) -> None:
        self.texts.append(text)
        self.marker.mark(text)


def cost(rank: Rank, track: ResolvedTrack, name: str, num_steps: int) -> tuple[int, float, float]:
    """Marks of a step, the seconds that they take, and the seconds of a step."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        marker = Marker.create(Path(folder) / "marker")
        taken = Taken(marker)
        rank.recorder = Recorder(taken, rank.device)
        case = track.case(name)
        strategy = build_strategy(track.workload, case, rank.mesh(case.layout), rank.device)
        source = Batches(track.workload, case.layout.data)
        batches = [source.batch(step, rank.rank) for step in range(num_steps + 2)]
        for batch in batches[:2]:
            taken.texts.clear()
            strategy.step(batch)
        parts = [text.split(" ", 1) for text in taken.texts]
        rank.recorder.marks = marker
        steps = []
        for batch in batches[2:]:
            begin = time.perf_counter()
            strategy.step(batch)
            steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(NUM_REPLAYS):
            for kind, label in parts:
                marker.mark(f"{kind} {label}")
        marks_s = (time.perf_counter() - begin) / NUM_REPLAYS
        strategy.close()
        marker.close()
    return len(parts), marks_s, statistics.median(steps)


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    track = Track(find_tracks()["f-data-parallel-ladder"]).resolve("smoke")
    pool = Pool(2)
    try:
        worst = 0.0
        for case in track.cases:
            if case.peer:
                continue
            for rank, (count, marks_s, step_s) in enumerate(pool.run(cost, track, case.name, num_steps)):
                worst = max(worst, marks_s / step_s)
                print(
                    f"{case.name:<12} rank {rank}: {count} marks a step, {marks_s * 1e6:.0f} µs of "
                    f"{step_s * 1e3:.1f} ms = {marks_s / step_s:.3%}",
                    flush=True,
                )
        print(f"worst {worst:.3%}, allowed {BOUND:.1%}: {'kept' if worst <= BOUND else 'NOT kept'}")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
