"""A measured step of a pipeline beside its simulation, as PNG: one file a case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.analysis.bubble import round_operations, schedule_of, timelines
from raybench.parallel.pipeline.draw import save_png

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey


def write_timelines(results: Results, out: Path) -> list[Path]:
    """Draw the last instrumented step of each case's last good round into `out`; the files written.

    Cases without a pipeline, and peers, whose actions are not recorded, have none.
    """
    last: dict[tuple[str, ...], tuple[RoundKey, dict[str, Any]]] = {}
    for key, run in zip(results.rounds, results.runs.to_dict("records"), strict=True):
        if run["status"] == "ok":
            last[key[:3]] = (key, {str(name): value for name, value in run.items()})
    written = []
    for (_, track, case), (key, run) in last.items():
        schedule = schedule_of(run)
        drawn = None if schedule is None else timelines(schedule, round_operations(results, key))
        if drawn is None:
            continue
        measured, simulated = drawn
        titles = [
            f"{track} · {case}, {what}: step {line.step_time * 1e3:.1f} ms · bubble {line.bubble:.1%}"
            for what, line in (("simulated from its measured times", simulated), ("measured", measured))
        ]
        path = out / f"timeline-{track}-{case}.png"
        save_png([simulated, measured], path, titles=titles)
        written.append(path)
    return written
