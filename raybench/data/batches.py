"""What a step trains on: the same global batch for every layout, cut by data rank and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raybench.data.samples import FIRST_HELD_OUT, IGNORED_LABEL, samples_of
from raybench.errors import RequestError
from raybench.suite.track import Workload

__all__ = ["IGNORED_LABEL", "Batch", "Batches", "MicroBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """Inputs by name ([micro_batch, sequence] each) and labels, -100 where not trained on.

    Labels are [micro_batch, sequence]; [micro_batch, 1] for a model that scores a sequence by its first token.
    """

    inputs: dict[str, Tensor]
    labels: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch({name: value.to(device) for name, value in self.inputs.items()}, self.labels.to(device))


@dataclass(frozen=True)
class Batch:
    """One data rank's micro-batches of a step, and the number of valid labels of *all* ranks together.

    Losses are sums divided by `num_tokens`, the tokens that are trained on (one a sequence in classification), so that
    gradients only ever have to be summed: a mean of means is wrong where ranks or micro-batches hold different numbers
    of them.
    """

    micro_batches: Sequence[MicroBatch]
    num_tokens: int
    num_read: int = 0
    """Tokens of all ranks together that the model reads, padding apart: what throughput counts. 0 where nobody asks."""

    def to(self, device: torch.device) -> Batch:
        return Batch([micro_batch.to(device) for micro_batch in self.micro_batches], self.num_tokens, self.num_read)


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
        self._samples = samples_of(workload)
        total = self._samples.size
        if total is not None and total < self.global_samples:
            raise RequestError(
                f"workload.data.name: {workload.data.name} has {total} samples, less than one global batch "
                f"({self.global_samples})"
            )
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
        num_tokens = sum(self._samples.num_labels(index) for index in indices)
        return Batch(micro_batches, num_tokens, sum(self._samples.num_tokens(index) for index in indices))

    def global_batch(self, step: int) -> Batch:
        """All ranks' micro-batches of `step` in one, for the single-process control."""
        parts = [self.batch(step, index) for index in range(self.data_size)]
        return Batch([m for part in parts for m in part.micro_batches], parts[0].num_tokens, parts[0].num_read)

    def held_out(self, numbers: Sequence[int]) -> MicroBatch:
        """Samples for evaluation, counted from 0: the same for every layout, and none of them is ever trained on."""
        return self._micro_batch([FIRST_HELD_OUT + number for number in numbers])

    def _micro_batch(self, indices: Sequence[int]) -> MicroBatch:
        return MicroBatch(*self._samples.collate(indices))
