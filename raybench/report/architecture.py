"""Who holds what on which node, for each layout of a track."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raybench.report.charts import Holder, Nodes
from raybench.report.content import Section
from raybench.report.text import known, plain

OPTIMIZER_STATE = "whole parameters and gradients, {} of the optimizer state"
GRADIENTS = "whole parameters, {} of gradients and optimizer state"
ALL = "{} of parameters, gradients and optimizer state"
SHARDED = {
    **dict.fromkeys(("zero1", "torch-zero1", "deepspeed-1"), OPTIMIZER_STATE),
    **dict.fromkeys(("zero2", "deepspeed-2"), GRADIENTS),
    **dict.fromkeys(("zero3", "hybrid-sharded", "torch-fsdp2", "torch-fsdp2-keep", "deepspeed-3"), ALL),
}
"""What a rank holds between steps, by the data strategies that divide it."""
MOST_LAYOUTS = 8


def architecture(section: Section) -> Nodes | None:
    """Cases of one layout and one way of sharding share a drawing."""
    drawn: dict[tuple[Any, ...], tuple[list[str], pd.DataFrame]] = {}
    for row in section.rows:
        placement = section.details.placements.get((section.suite_id, section.track, row.case))
        if placement is None or not all(known(s) for s in (row.data_size, row.pipeline_size, row.tensor_size)):
            continue
        sizes = int(row.data_size), int(row.pipeline_size), int(row.tensor_size)
        if len(placement) == sizes[0] * sizes[1] * sizes[2]:
            names, _ = drawn.setdefault((*sizes, _sharded(row), tuple(placement.node)), ([], placement))
            names.append(plain(row.case, 40))
    groups = [
        (f"data {d} × pipeline {p} × tensor {t}: {', '.join(names)}", _nodes(placement, (d, p, t), sharded))
        for (d, p, t, sharded, _), (names, placement) in drawn.items()
    ]
    return Nodes(section.title, "ranks by node", tuple(groups[:MOST_LAYOUTS])) if groups else None


def _sharded(row: Any) -> str | None:
    """With the share of a rank; of hybrid sharding, whose copies are as large as a node, without it."""
    name = str(row.data_strategy)
    share = "a part" if name == "hybrid-sharded" else f"1/{int(row.data_size)}"
    return SHARDED[name].format(share) if name in SHARDED else None


def _nodes(
    placement: pd.DataFrame, sizes: tuple[int, int, int], sharded: str | None
) -> tuple[tuple[str, tuple[Holder, ...]], ...]:
    """The holders of each node, tensor innermost."""
    data, pipeline, tensor = sizes
    nodes: dict[str, list[Holder]] = {}
    for place, (rank, node) in enumerate(zip(placement["rank"], placement.node, strict=True)):
        d, p, t = place // (pipeline * tensor), place // tensor % pipeline, place % tensor
        parts = [f"stage {p + 1} of {pipeline}"] if pipeline > 1 else []
        parts += [f"slice {t + 1} of {tensor} of every matrix"] if tensor > 1 else []
        parts += [sharded] if sharded else [] if parts else ["whole model"]
        parts += [f"batch {d + 1} of {data}"] if data > 1 else []
        series = f"stage {p + 1}" if pipeline > 1 else f"slice {t + 1}" if tensor > 1 else "whole layers"
        name = plain(node, 40) if known(node) else "node"
        nodes.setdefault(name, []).append(Holder(f"rank {rank}", ", ".join(parts), series))
    return tuple((name, tuple(ranks)) for name, ranks in nodes.items())
