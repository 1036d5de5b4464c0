"""How the micro-batches of one step go through the model of one rank."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from raybench.data.batches import Batch
from raybench.parallel.strategy import LossSum


class BackwardObserver(Protocol):
    """Who synchronises gradients around the backward passes: a data strategy."""

    def before_backward(self, last: bool) -> None:
        """A micro-batch's backward pass begins; `last` for the one that completes this rank's gradients."""

    def after_backward(self, last: bool) -> None:
        """It has ended."""


class Execution(Protocol):
    """Runs forward and backward of a whole step."""

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        """Add the gradients of the global token-mean loss over this data rank's micro-batches to the parameters.

        Returns:
            This rank's share of the loss: summed over ranks it is the global token-mean loss.
        """


class Accumulation:
    """Micro-batch after micro-batch, forward then backward: gradient accumulation."""

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
