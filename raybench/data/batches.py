"""What a step trains on: the same global batch for every layout, cut by data rank and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raybench.data.tokens import SyntheticTokens
from raybench.suite.track import Workload

IGNORED_LABEL = -100
FIRST_HELD_OUT = 2**40
"""Index of the first sample that is never trained on."""


@dataclass(frozen=True)
class MicroBatch:
    """Inputs by name ([micro_batch, sequence] each) and labels ([micro_batch, sequence], -100 where not trained on)."""

    inputs: dict[str, Tensor]
    labels: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch({name: value.to(device) for name, value in self.inputs.items()}, self.labels.to(device))


@dataclass(frozen=True)
class Batch:
    """One data rank's micro-batches of a step, and the number of valid tokens of *all* ranks together.

    Losses are sums divided by `num_tokens`, so that gradients only ever have to be summed: a mean of means is wrong
    where ranks or micro-batches hold different numbers of valid tokens.
    """

    micro_batches: Sequence[MicroBatch]
    num_tokens: int

    def to(self, device: torch.device) -> Batch:
        return Batch([micro_batch.to(device) for micro_batch in self.micro_batches], self.num_tokens)


class Batches:
    """Step by step, the global batch of a workload over `data_size` ranks.

    Sample order is fixed by the seed: step s takes the next `global_samples` sequences, rank r the r-th part of them.
    A finite data set is passed over again and again; the samples that do not fill a global batch are dropped in each
    pass (`num_dropped`), so that every rank always has the same number of batches.
    """

    def __init__(self, workload: Workload, data_size: int) -> None:
        self.workload = workload
        self.data_size = data_size
        self.global_samples = workload.micro_batch_size * workload.num_micro_batches * data_size
        self._tokens = SyntheticTokens(
            workload.model.vocabulary_size, workload.sequence_length, workload.seed, workload.data.min_length
        )
        total = workload.data.num_samples
        self.steps_per_pass = None if total is None else total // self.global_samples
        self.num_dropped = 0 if total is None else total % self.global_samples

    def samples(self, step: int) -> range:
        """Indices of the global batch of `step`."""
        position = step if self.steps_per_pass is None else step % self.steps_per_pass
        return range(position * self.global_samples, (position + 1) * self.global_samples)

    def batch(self, step: int, data_index: int) -> Batch:
        """What data rank `data_index` trains on in `step`."""
        indices = self.samples(step)
        per_rank = self.global_samples // self.data_size
        size = self.workload.micro_batch_size
        own = indices[data_index * per_rank : (data_index + 1) * per_rank]
        micro_batches = [self._micro_batch(own[i : i + size]) for i in range(0, per_rank, size)]
        return Batch(micro_batches, sum(self._tokens.num_valid(i) for i in indices))

    def global_batch(self, step: int) -> Batch:
        """All ranks' micro-batches of `step` in one, for the single-process control."""
        parts = [self.batch(step, index) for index in range(self.data_size)]
        return Batch([m for part in parts for m in part.micro_batches], parts[0].num_tokens)

    def held_out(self, numbers: Sequence[int]) -> MicroBatch:
        """Samples for evaluation, counted from 0: the same for every layout, and none of them is ever trained on."""
        return self._micro_batch([FIRST_HELD_OUT + number for number in numbers])

    def _micro_batch(self, indices: Sequence[int]) -> MicroBatch:
        sequences = torch.stack([torch.from_numpy(self._tokens.sequence(i)) for i in indices])
        labels = sequences[:, 1:].clone()
        for row, index in enumerate(indices):
            labels[row, self._tokens.num_valid(index) :] = IGNORED_LABEL
        return MicroBatch({"input_ids": sequences[:, :-1].contiguous()}, labels)
