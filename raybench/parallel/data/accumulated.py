"""Data parallelism that communicates once a step: accumulate locally, all-reduce after the last backward pass."""

from __future__ import annotations

from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import Replicated, gradient


class Accumulated(Replicated):
    """As naive, but the gradients of all micro-batches are summed on each rank before they are sent."""

    def reduce_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            GradientSum(self.axis, gradient(parameter), label=name).wait()
