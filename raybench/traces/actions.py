"""Pipeline actions in a trace, by their annotations: torch.distributed.pipelining's and raybench's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from raybench.traces.events import Events, Kind
from raybench.traces.intervals import Times, total, union
from raybench.traces.label import ACTION, PHASE

_ACTION = re.compile(rf"^(?:PP:|{ACTION})(\d+)(F|B|I|W|FORWARD|BACKWARD|FULL_BACKWARD)(\d+)$")
PHASES = ("forward", "backward", "optimizer")
_LOOSE = re.compile(r"^(Forward|Backward) (\d+)$")
"""torch to 2.5."""


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What a rank did for the pipeline, in order of time."""

    kinds: list[str]
    """F, B, I or W."""
    stages: list[int]
    """-1: the trace does not tell."""
    micro_batches: list[int]
    times: Times
    """Shape (actions, 2), nanoseconds."""

    def busy_ns(self, begin: int, end: int) -> int:
        """Time of a window in which an action is under way."""
        clipped = np.clip(self.times, begin, end)
        return total(union(clipped[:, 0], clipped[:, 1]))


def find_actions(events: Events, on_gpu: bool) -> Actions:
    """Compute actions; on a GPU by the times of their kernels where the trace has them."""
    parsed = {i: action for i, name in enumerate(events.names) if (action := _parse(name)) is not None}
    rows = events.of(Kind.GPU_ANNOTATION, named=parsed) if on_gpu else np.empty(0, np.intp)
    if not rows.size:
        rows = events.of(Kind.ANNOTATION, Kind.CPU_OP, named=parsed)
    rows = rows[np.argsort(events.begin[rows], kind="stable")]
    found = [parsed[i] for i in events.name[rows].tolist()]
    return Actions(
        kinds=[kind for kind, _, _ in found],
        stages=[stage for _, stage, _ in found],
        micro_batches=[micro_batch for _, _, micro_batch in found],
        times=np.stack([events.begin[rows], events.end[rows]], axis=1),
    )


def _parse(name: str) -> tuple[str, int, int] | None:
    if (exact := _ACTION.match(name)) is not None:
        return exact[2].removeprefix("FULL_")[0], int(exact[1]), int(exact[3])
    if (loose := _LOOSE.match(name)) is not None:
        return loose[1][0], -1, int(loose[2])
    return None


def phase_times(events: Events) -> dict[str, int]:
    """Nanoseconds in forward, backward and optimizer, as far as raybench or torch's optimizers mark them."""
    found = {}
    of_phase: dict[str, list[int]] = {phase: [] for phase in PHASES}
    for i, name in enumerate(events.names):
        if (action := _parse(name)) is not None:
            of_phase["forward" if action[0] == "F" else "backward"].append(i)
        elif name.startswith("Optimizer.step#"):
            of_phase["optimizer"].append(i)
        elif name.startswith(PHASE) and (phase := name.removeprefix(PHASE)) in of_phase:
            of_phase[phase].append(i)
    for phase, names in of_phase.items():
        rows = events.of(Kind.ANNOTATION, Kind.GPU_ANNOTATION, named=names)
        if rows.size:
            found[phase] = total(union(events.begin[rows], events.end[rows]))
    return found


def no_actions() -> Actions:
    """Of a source that tells nothing of a pipeline."""
    return Actions(kinds=[], stages=[], micro_batches=[], times=np.empty((0, 2), np.int64))
