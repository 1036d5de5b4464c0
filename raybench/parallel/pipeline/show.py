"""What `raybench schedule` shows: a schedule, built, checked and simulated, as data, text and picture.

Times are those of one of P equal stages, in ms. Under a schedule with V chunks a rank, a chunk is 1/V of
that, so that all schedules are shown at work on the same model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raybench.errors import RequestError
from raybench.parallel.pipeline.actions import Schedule
from raybench.parallel.pipeline.check import check, peak_activations, peak_receives
from raybench.parallel.pipeline.draw import grid, save_png
from raybench.parallel.pipeline.schedules import build
from raybench.parallel.pipeline.simulate import Timeline, Times, simulate
from raybench.parallel.pipeline.theory import theory_bubble

TimesMs = tuple[float, float, float, float]  # forward, input gradient, weight gradient, transfer

UNIT_TIMES: TimesMs = (1.0, 1.0, 1.0, 0.0)
_TIME_NAMES = ("forward", "input gradient", "weight gradient", "transfer")


def parse_times(text: str) -> TimesMs:
    """The four numbers of `--times F,B,W,C`."""
    parts = text.split(",")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise RequestError(f"times: {text!r} is not numbers; give F,B,W,C in ms, such as 20,20,20,0.7") from None
    return check_times(values)


def check_times(values: Sequence[float]) -> TimesMs:
    """Four times that a stage can have, or a refusal."""
    if len(values) != 4:
        raise RequestError(f"times: {len(values)} values, not 4; give F,B,W,C in ms: {', '.join(_TIME_NAMES)}")
    for name, value in zip(_TIME_NAMES, values, strict=True):
        if not math.isfinite(value) or value < 0 or (value == 0 and name == "forward"):
            least = "more than 0" if name == "forward" else "0 or more"
            raise RequestError(f"times: {name} {value:g} is not a time; it must be {least} ms")
    return values[0], values[1], values[2], values[3]


def plan(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    times: Sequence[float] | None = None,
) -> tuple[Schedule, Timeline]:
    """The schedule over `stages` ranks, checked, and its simulated step."""
    times_ms = UNIT_TIMES if times is None else check_times(times)
    schedule = build(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    check(schedule)
    forward, input_gradient, weight_gradient = (value / 1e3 / schedule.num_chunks for value in times_ms[:3])
    chunk_times = Times(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        transfer=times_ms[3] / 1e3,
    )
    return schedule, simulate(schedule, chunk_times)


def describe(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    times: Sequence[float] | None = None,
    *,
    width: int = 120,
) -> dict[str, Any]:
    """The body of `raybench schedule --json`; without times, F, B and W take 1 ms and a transfer none."""
    schedule, timeline = plan(name, stages, micro_batches, chunks, times)
    times_ms = UNIT_TIMES if times is None else check_times(times)
    return {
        "name": schedule.name,
        "stages": schedule.num_ranks,
        "micro_batches": schedule.num_micro_batches,
        "chunks": schedule.num_chunks,
        "times_ms": dict(zip(("forward", "input_gradient", "weight_gradient", "transfer"), times_ms, strict=True)),
        "step_time_s": timeline.step_time,
        "bubble": timeline.bubble,
        "theory_bubble": theory_bubble(
            schedule, forward=times_ms[0], input_gradient=times_ms[1], weight_gradient=times_ms[2]
        ),
        "peak_activations": list(peak_activations(schedule)),
        "peak_receives": list(peak_receives(schedule)),
        "placement": list(schedule.placement),
        "actions": [[str(action) for action in actions] for actions in schedule.actions],
        "grid": grid(timeline, width=width),
    }


def as_text(body: dict[str, Any]) -> str:
    """What `raybench schedule` prints, from the body of its JSON."""
    chunks = f" × {body['chunks']} chunks" if body["chunks"] > 1 else ""
    of_chunks = f" (of 1/{body['chunks']} of a rank's layers)" if body["chunks"] > 1 else ""
    return "\n".join(
        [
            f"{body['name']}: {body['stages']} ranks{chunks}, {body['micro_batches']} micro-batches",
            "",
            body["grid"],
            "",
            f"step              {body['step_time_s'] * 1e3:.6g} ms",
            f"bubble            {body['bubble']:.1%} (theory {body['theory_bubble']:.1%})",
            f"peak activations  {' '.join(map(str, body['peak_activations']))} by rank{of_chunks}",
        ]
    )


def picture(
    path: str | Path,
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    times: Sequence[float] | None = None,
) -> None:
    """The simulated step as a PNG file."""
    _, timeline = plan(name, stages, micro_batches, chunks, times)
    try:
        save_png(timeline, path)
    except OSError as error:
        raise RequestError(f"png: {path} cannot be written ({error.strerror or error})") from None
