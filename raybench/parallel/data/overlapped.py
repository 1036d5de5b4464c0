"""Data parallelism that overlaps: each gradient is all-reduced from its hook while backward goes on."""

from __future__ import annotations

from raybench.parallel.data.hooked import Hooked
from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import gradient


class Overlapped(Hooked):
    """As hooked, but nothing waits before backward has ended."""

    def lay_out(self) -> None:
        super().lay_out()
        self._pending: list[GradientSum] = []

    def send(self, name: str) -> None:
        self._pending.append(GradientSum(self.axis, gradient(self.parameters[name]), label=name))

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
