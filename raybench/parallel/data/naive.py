"""Data parallelism as one would first write it: after every backward pass, all-reduce one gradient after the other."""

from __future__ import annotations

from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import Replicated, gradient


class Naive(Replicated):
    """Nothing overlaps, and accumulation saves nothing: each micro-batch's gradients are summed over the ranks."""

    def lay_out(self) -> None:
        self._sums = dict.fromkeys(self.parameters.values())
        """Reduced gradients of the micro-batches before the last."""

    def after_backward(self, last: bool) -> None:
        if not self.may_send or last:
            return
        self._all_reduce()
        for parameter, total in self._sums.items():
            self._sums[parameter] = gradient(parameter) if total is None else total.add_(gradient(parameter))
            parameter.grad = None

    def reduce_gradients(self) -> None:
        self._all_reduce()
        for parameter, total in self._sums.items():
            if total is not None:
                gradient(parameter).add_(total)
                self._sums[parameter] = None

    def _all_reduce(self) -> None:
        for name, parameter in self.parameters.items():
            GradientSum(self.axis, gradient(parameter), label=name).wait()
