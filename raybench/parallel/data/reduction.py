"""How a gradient is summed over ranks: in fp32 at least, whatever the parameter's own precision.

Summing bf16 in bf16 rounds at every rank, and a sum stops growing once it is 256 times what is added to it. Here it is
rounded once, at the end. It costs twice the bytes for parameters that are kept in bf16; under `precision: bf16` they,
and so their gradients, are fp32 anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raybench.worker.communication import Axis


class GradientSum:
    """The sum of a gradient over an axis, in place, begun when made and complete after `wait`."""

    def __init__(self, axis: Axis, gradient: Tensor, *, label: str) -> None:
        self._gradient = gradient
        self._summed = gradient.float() if torch.finfo(gradient.dtype).bits < 32 else gradient
        self._pending = axis.all_reduce(self._summed, label=label)

    def wait(self) -> None:
        self._pending.wait()
        if self._summed is not self._gradient:
            self._gradient.copy_(self._summed)
