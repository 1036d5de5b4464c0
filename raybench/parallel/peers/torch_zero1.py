"""Peer: torch's ZeroRedundancyOptimizer around the fused optimizer, beside DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from raybench.parallel.peers.torch_ddp import TorchDDP
from raybench.parallel.strategy import Held, StateBytes, Strategy, distinct_bytes, optimizer_tensors


class TorchZero1(TorchDDP):
    """The optimizer deals out whole parameters, and broadcasts each rank's after its step."""

    def make_optimizers(self) -> list[Optimizer]:
        make = self.context.make_optimizer
        defaults = make([nn.Parameter(torch.zeros(1))]).defaults
        own: Any = lambda parameters, **_: make(parameters)  # noqa: E731  it is called like an optimizer's class
        self.sharded = ZeroRedundancyOptimizer(
            self.parameters.values(),
            optimizer_class=own,
            process_group=self.axis.group,
            parameters_as_bucket_view=True,
            **defaults,
        )
        return [self.sharded]

    def held_states(self) -> Iterator[Held]:
        return Strategy.held_states(self)

    def state_bytes(self) -> StateBytes:
        whole = super().state_bytes()
        return StateBytes(whole.parameters, whole.gradients, distinct_bytes(optimizer_tensors([self.sharded.optim])))

    def instrument(self) -> bool:
        """The optimizer's broadcasts cannot be seen from here."""
        return False
