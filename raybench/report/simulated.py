"""A pipeline's simulated step as rows of a figure."""

from __future__ import annotations

from raybench.parallel.pipeline.actions import Kind
from raybench.parallel.pipeline.simulate import Timeline
from raybench.report.charts import Row, Stretch

SERIES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
"""Of each action, as its measured span is called."""


def simulated(timeline: Timeline) -> tuple[Row, ...]:
    """A row a rank of the pipeline."""
    return tuple(
        Row(
            f"pipeline rank {rank}",
            tuple(Stretch(SERIES[e.action.kind], e.begin, e.end, str(e.action)) for e in events),
        )
        for rank, events in enumerate(timeline.events)
    )
