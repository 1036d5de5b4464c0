"""Whether a workload can be cut as a layout asks: known from sizes alone, before anything starts."""

from __future__ import annotations

from collections.abc import Callable

from raybench.parallel.registry import entry
from raybench.suite.track import Case, ModelConfig, Workload


def check_fit(workload: Workload, case: Case) -> None:
    """Refuse a tensor axis that the workload's sizes do not allow.

    Raises:
        ValueError: naming the axis, the size that it does not divide, and the nearest axes that fit everything.
    """
    size, model = case.layout.tensor, workload.model
    if size == 1 or case.strategy.tensor is None:
        return
    where = f"case {case.name!r}: layout.tensor: {size}"
    if model.name != "gpt":
        raise ValueError(f"{where} cannot cut {model.name} (allowed for a model of one's own: 1)")
    sequence = workload.sequence_length if entry("tensor", case.strategy.tensor).cuts_sequence else None
    for what, fits in _conditions(model, sequence).items():
        if not fits(size):
            raise ValueError(
                f"{where} does not divide workload.{what} (nearest that fit: {_nearest(model, sequence, size)})"
            )


def _conditions(model: ModelConfig, sequence: int | None) -> dict[str, Callable[[int], bool]]:
    """What the ranks of a tensor axis have to share out evenly; the vocabulary is padded instead."""
    kv_heads = model.kv_heads
    conditions: dict[str, Callable[[int], bool]] = {
        f"model.num_heads {model.num_heads}": lambda size: model.num_heads % size == 0,
        f"model.num_kv_heads {kv_heads}": lambda size: kv_heads % size == 0 or size % kv_heads == 0,
        f"model.ffn_width {model.ffn_width}": lambda size: model.ffn_width % size == 0,
    }
    if sequence is not None:
        conditions[f"sequence_length {sequence}"] = lambda size: sequence % size == 0
    return conditions


def _nearest(model: ModelConfig, sequence: int | None, wanted: int) -> str:
    """The sizes below and above `wanted` that fit, in words; 1 always does."""
    conditions = _conditions(model, sequence).values()
    fitting = [size for size in range(1, model.num_heads + 1) if all(fits(size) for fits in conditions)]
    below, above = [s for s in fitting if s < wanted][-1:], [s for s in fitting if s > wanted][:1]
    return ", ".join(map(str, below + above))
