"""Data parallelism from hooks: each gradient is all-reduced inside backward, as soon as it is complete, blocking."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raybench.parallel.data.order import FixedOrder
from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import Replicated, gradient


class Hooked(Replicated):
    """Post-accumulate hooks of the last micro-batch send, in reverse parameter order; backward waits meanwhile."""

    def lay_out(self) -> None:
        backward_order = list(reversed(self.parameters))
        self.order = FixedOrder(backward_order, self.send)
        self._sending = False
        self._hooks = [
            self.parameters[name].register_post_accumulate_grad_hook(self._make_hook(index))
            for index, name in enumerate(backward_order)
        ]

    def before_step(self) -> None:
        self.order.start()

    def before_backward(self, last: bool) -> None:
        self._sending = last and self.may_send

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self._sending:
                self.order.ready(index)

        return hook

    def send(self, name: str) -> None:
        GradientSum(self.axis, gradient(self.parameters[name]), label=name).wait()

    def reduce_gradients(self) -> None:
        """What no hook has sent: gradients that this rank's loss did not use, and all of the first step."""
        self.order.flush()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
