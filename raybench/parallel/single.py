"""No parallelism: one process takes the whole step. The control that every case is checked against."""

from __future__ import annotations

from raybench.parallel.data.replicated import Replicated


class Single(Replicated):
    """One replica, nobody to talk to."""

    def reduce_gradients(self) -> None:
        """The gradients of one process are the sum over all."""
