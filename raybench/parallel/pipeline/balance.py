"""Which layers stand on which stage: contiguous, each once, and the slowest stage as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from raybench.errors import RequestError


def balance(
    blocks: Sequence[float], *, num_stages: int, embedding: float = 0.0, head: float = 0.0
) -> tuple[range, ...]:
    """The layers of every stage, such that the largest cost of a stage is least, and of these the most even.

    The first stage also has the embedding and the last the head: they may be without a layer, where the embedding or
    the head weighs enough; those between hold at least one.

    Args:
        blocks: what each layer costs, in any unit.
        embedding: what comes before the first layer, in the same unit.
        head: what comes after the last.

    Raises:
        RequestError: there are fewer layers than stages.
    """
    check_num_layers(len(blocks), num_stages)
    sums = [0.0, *accumulate(blocks)]

    def cost(stage: int, begin: int, end: int) -> float:
        ends = (embedding if stage == 0 else 0.0) + (head if stage == num_stages - 1 else 0.0)
        return sums[end] - sums[begin] + ends

    def least(limit: float) -> tuple[float, tuple[int, ...]]:
        """The least largest cost; or, under a limit to that, the least sum of squares. With where stages end."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(num_stages):
            fewest = 1 if 0 < stage < num_stages - 1 else 0
            last = stage == num_stages - 1
            found: dict[int, tuple[float, tuple[int, ...]]] = {}
            for begin, (so_far, ends) in best.items():
                for end in [len(blocks)] if last else range(begin + fewest, len(blocks) + 1):
                    own = cost(stage, begin, end)
                    if own > limit:
                        break
                    value = max(so_far, own) if math.isinf(limit) else so_far + own * own
                    if end not in found or value < found[end][0]:
                        found[end] = (value, (*ends, end))
            best = found
        return best[len(blocks)]

    slowest, _ = least(math.inf)
    _, ends = least(slowest * (1 + 1e-9))
    return tuple(range(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def placed(num_layers_of: Sequence[int], *, num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of every stage as a case asks for them: how many each stage holds.

    Raises:
        RequestError: not one number a stage, a stage between the ends without a layer, or another sum.
    """
    place = f"options.layers: {list(num_layers_of)}"
    if len(num_layers_of) != num_stages:
        raise RequestError(f"{place} is {len(num_layers_of)} numbers, not one for each of {num_stages} stages")
    if sum(num_layers_of) != num_layers:
        raise RequestError(f"{place} is {sum(num_layers_of)} layers in all, the model has {num_layers}")
    if not all(num_layers_of[1:-1]):
        raise RequestError(f"{place} leaves a stage empty (allowed: 0 on the first and the last stage alone)")
    ends = list(accumulate(num_layers_of))
    return tuple(range(end - number, end) for end, number in zip(ends, num_layers_of, strict=True))


def check_num_layers(num_layers: int, num_stages: int) -> None:
    """Refuse more stages than layers.

    Raises:
        RequestError: with the nearest sizes that work.
    """
    if num_layers < num_stages:
        raise RequestError(
            f"{num_stages} pipeline stages are more than the model's {num_layers} layers "
            f"(nearest: {num_layers} stages, or {num_stages} layers)"
        )
