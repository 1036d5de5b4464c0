"""How the micro-batches of one step go through the model of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from raybench.data.batches import Batch

LossSum = Callable[[Callable[..., Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""(the model or what wraps it, inputs, labels) to the summed loss of a micro-batch, in the workload's precision."""


class BackwardObserver(Protocol):
    """Who synchronises gradients around the backward passes: a data strategy."""

    def before_backward(self, last: bool) -> None:
        """A backward pass begins; `last` for one that completes the gradients of the parameters it reaches.

        A pipeline's rank with several chunks of the model has a last pass for each.
        """

    def after_backward(self, last: bool) -> None:
        """It has ended."""


class Execution(Protocol):
    """Runs forward and backward of a whole step."""

    recorded: bool
    """Whether all of its own communication goes through the recorder."""

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        """Add the gradients of the global token-mean loss over this data rank's micro-batches to the parameters.

        Returns:
            This rank's share of the loss: summed over data and pipeline ranks it is the global token-mean loss.
        """


class Accumulation:
    """Micro-batch after micro-batch, forward then backward: gradient accumulation."""

    recorded = True

    def __init__(self, model: nn.Module, loss_sum: LossSum) -> None:
        self.model = model
        self.loss_sum = loss_sum

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        share = torch.zeros((), device=batch.micro_batches[0].labels.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            loss = self.loss_sum(self.model, micro_batch.inputs, micro_batch.labels) / batch.num_tokens
            share += loss.detach()
            last = index == len(batch.micro_batches) - 1
            observer.before_backward(last)
            loss.backward()
            observer.after_backward(last)
        return share
