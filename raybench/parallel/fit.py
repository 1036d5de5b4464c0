"""Whether a workload can be cut as a layout asks: known from sizes alone, before anything starts."""

from __future__ import annotations

from collections.abc import Callable

from raybench.parallel.registry import Entry, entry
from raybench.suite.track import Case, Workload


def check_fit(workload: Workload, case: Case) -> None:
    """Refuse a tensor axis that the workload's sizes do not allow.

    Raises:
        ValueError: naming the axis, the size that it does not divide, and the nearest axes that fit everything.
    """
    size, model = case.layout.tensor, workload.model
    if size == 1 or case.strategy.tensor is None:
        return
    where = f"case {case.name!r}: layout.tensor: {size}"
    if model.source is not None and model.family is None:
        return  # its sizes are known once its source has been read
    if model.family is not None and case.strategy.tensor != "megatron":
        raise ValueError(
            f"case {case.name!r}: strategy.tensor: {case.strategy.tensor!r} does not cut {model.name} (allowed: "
            "megatron)"
        )
    if model.name not in ("gpt", "timed") and model.family is None:
        raise ValueError(f"{where} cannot cut {model.name} (allowed for a model of one's own: 1)")
    conditions = _conditions(workload, entry("tensor", case.strategy.tensor))
    for what, fits in conditions.items():
        if not fits(size):
            fitting = [
                n for n in range(1, max(model.num_heads, size) + 1) if all(fits(n) for fits in conditions.values())
            ]
            near = [n for n in fitting if n < size][-1:] + [n for n in fitting if n > size][:1]
            raise ValueError(f"{where} does not divide workload.{what} (nearest that fit: {', '.join(map(str, near))})")


def _conditions(workload: Workload, strategy: Entry) -> dict[str, Callable[[int], bool]]:
    """What the ranks of a tensor axis have to share out evenly; the vocabulary is padded instead."""
    model, sequence = workload.model, workload.sequence_length
    kv_heads = model.kv_heads
    conditions: dict[str, Callable[[int], bool]] = {
        f"model.ffn_width {model.ffn_width}": lambda size: model.ffn_width % size == 0
    }
    if model.name != "timed":
        conditions[f"model.num_heads {model.num_heads}"] = lambda size: model.num_heads % size == 0
        conditions[f"model.num_kv_heads {kv_heads}"] = lambda size: (
            kv_heads % size == 0 or (strategy.library is None and size % kv_heads == 0)
        )
    if strategy.cuts_sequence:
        conditions[f"sequence_length {sequence}"] = lambda size: sequence % size == 0
    return conditions
