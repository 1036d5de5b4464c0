"""Embedding and cross-entropy over a vocabulary that is spread over the ranks: no rank ever sees all logits.

Section 3 of Shoeybi et al., "Megatron-LM" (2019, arXiv:1909.08053). A vocabulary that the ranks do not divide is padded
at its end: nothing looks the padding up, and its logits take no part in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raybench.data.batches import IGNORED_LABEL
from raybench.parallel.autograd import applied
from raybench.parallel.parts import Shard
from raybench.parallel.tensor.functions import reduce_output
from raybench.worker.communication import Axis


@dataclass(frozen=True)
class VocabularyPart:
    """The token ids of one rank: `length` rows from `begin` on, the last of them padding."""

    begin: int
    length: int
    num_valid: int
    """How many are ids of the vocabulary."""

    @staticmethod
    def of(size: int, axis: Axis) -> VocabularyPart:
        length = -(-size // axis.size)
        begin = axis.index * length
        return VocabularyPart(begin, length, min(max(size - begin, 0), length))


class VocabularyParallelEmbedding(nn.Embedding):
    """Ids [batch, sequence] to their rows [batch, sequence, width]: each rank looks its own up, the rest are zeros.

    With `sequence`: ids [sequence, batch] to this rank's part [sequence / size, batch, width].
    """

    def __init__(self, whole: nn.Embedding, axis: Axis, *, sequence: bool) -> None:
        self.part = VocabularyPart.of(whole.num_embeddings, axis)
        super().__init__(self.part.length, whole.embedding_dim, device=whole.weight.device)
        self.axis = axis
        self.sequence = sequence
        self.shards = {"weight": Shard(0, whole.num_embeddings)}

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.part.begin
        elsewhere = (local < 0) | (local >= self.part.length)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        own = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_output(own, self.axis, sequence=self.sequence, label="embedding")


class VocabularyParallelLoss:
    """Summed cross-entropy of this rank's logits [batch, sequence, columns] and labels [batch, sequence].

    With `sequence` the logits are [sequence, batch, columns].
    """

    def __init__(self, size: int, axis: Axis, *, sequence: bool) -> None:
        self.part = VocabularyPart.of(size, axis)
        self.axis = axis
        self.sequence = sequence

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.t() if self.sequence else labels
        loss: Tensor = applied(_CrossEntropySum, logits, labels.flatten(), self.part, self.axis)
        return loss


class _CrossEntropySum(Function):
    """Σ log Σ exp(logits) − logit of the label, over the tokens that count; the same number on every rank.

    Ranks exchange three numbers a token, in one all-gather: their largest logit, the sum of the exponentials under it,
    and the label's logit where it is theirs.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: VocabularyPart, axis: Axis) -> Tensor:
        rows = logits.flatten(0, -2).float()
        counted = labels != IGNORED_LABEL
        column = labels - part.begin
        own = counted & (column >= 0) & (column < part.length)
        column = column.where(own, 0).unsqueeze(1)

        valid = rows[:, : part.num_valid]
        largest = valid.amax(1) if part.num_valid else rows.new_full((len(rows),), -torch.inf)
        exponentials = torch.sub(rows, largest.unsqueeze(1)).exp_()
        exponentials[:, part.num_valid :] = 0.0
        target = rows.gather(1, column).squeeze(1).where(own, 0.0)
        told = torch.stack([largest, exponentials.sum(1), target])

        heard = told.new_empty(axis.size, *told.shape)
        axis.all_gather(heard, told.unsqueeze(0), label="cross-entropy", in_order=True).wait()
        all_largest, all_sums, all_targets = heard.unbind(1)
        highest = all_largest.amax(0)
        total = (all_sums * (all_largest - highest).exp()).sum(0)
        losses = total.log() + highest - all_targets.sum(0)

        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.save_for_backward(exponentials, (largest - highest).exp() / total, counted, own, column)
        return losses.where(counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exponentials, scale, counted, own, column = ctx.saved_tensors
        factor = (gradient * scale).where(counted, 0.0)
        rows = exponentials.mul_(factor.unsqueeze(1))  # in place: nobody else needs them
        rows.scatter_add_(1, column, -gradient.expand(len(own)).where(own, 0.0).unsqueeze(1))
        return rows.view(ctx.shape).to(ctx.dtype), None, None, None
