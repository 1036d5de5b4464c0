"""What batches are made of: numbered samples, the same for whoever asks, with known numbers of tokens and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raybench.data.corpus import Part, load
from raybench.data.tokens import SyntheticTokens
from raybench.suite.track import Workload

IGNORED_LABEL = -100
FIRST_HELD_OUT = 2**40
"""Index of the first sample that is never trained on."""


class Samples(Protocol):
    """Samples by index; from `FIRST_HELD_OUT` on those for evaluation."""

    size: int | None
    """How many there are to train on; None: endlessly many."""

    def num_labels(self, index: int) -> int:
        """How many labels a sample has, those that are ignored apart."""

    def num_tokens(self, index: int) -> int:
        """How many tokens of it are not padding."""

    def collate(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of a model by name, and labels, for several samples."""


def samples_of(workload: Workload) -> Samples:
    """The samples of a workload.

    Raises:
        RequestError: text that cannot be prepared.
    """
    if workload.data.name == "synthetic":
        return Synthetic(workload)
    parts = load(workload)
    if workload.model.task == "classification":
        return Classified(workload, parts["trained"], parts["held_out"])
    return Running(workload, parts["trained"], parts["held_out"])


class Synthetic:
    """Sequences of a Markov chain, to be continued."""

    def __init__(self, workload: Workload) -> None:
        self.size = workload.data.num_samples
        self._tokens = SyntheticTokens(
            workload.model.vocabulary_size, workload.sequence_length, workload.seed, workload.data.min_length
        )

    def num_labels(self, index: int) -> int:
        return self._tokens.num_valid(index)

    def num_tokens(self, index: int) -> int:
        return self._tokens.num_valid(index)

    def collate(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        sequences = torch.stack([torch.from_numpy(self._tokens.sequence(i)) for i in indices])
        labels = sequences[:, 1:].clone()
        for row, index in enumerate(indices):
            labels[row, self._tokens.num_valid(index) :] = IGNORED_LABEL
        return {"input_ids": sequences[:, :-1].contiguous()}, labels


class _Text:
    """Samples of a corpus."""

    def __init__(self, workload: Workload, trained: Part, held_out: Part) -> None:
        self.workload = workload
        self.trained = trained
        self.held_out = held_out
        wanted = workload.data.num_samples
        self.size: int | None = len(trained) if wanted is None else min(wanted, len(trained))

    def locate(self, index: int) -> tuple[Part, int]:
        """The part that a sample is in and its place there; what is held out is gone through again and again."""
        if index < FIRST_HELD_OUT:
            return self.trained, index
        return self.held_out, (index - FIRST_HELD_OUT) % len(self.held_out)

    def num_tokens(self, index: int) -> int:
        part, place = self.locate(index)
        return int(part.lengths[place])


class Running(_Text):
    """Running text, to be continued: sequences of the corpus in an order that the seed gives."""

    def __init__(self, workload: Workload, trained: Part, held_out: Part) -> None:
        super().__init__(workload, trained, held_out)
        self._order = np.random.default_rng(workload.seed).permutation(len(trained))

    def num_labels(self, index: int) -> int:
        return self.workload.sequence_length

    def collate(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        rows = np.stack([self._row(index) for index in indices]).astype(np.int64)
        ids = torch.from_numpy(rows)
        return {"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

    def _row(self, index: int) -> NDArray[np.int32]:
        part, place = self.locate(index)
        begin = part.offsets[self._order[place] if part is self.trained else place]
        return part.ids[begin : begin + self.workload.sequence_length + 1]


class Classified(_Text):
    """Texts with a class each, padded at their end.

    A Llama reads its class off the last token, so the label stands there, in [batch, sequence]; a BERT off the first,
    so labels are [batch, 1].
    """

    def __init__(self, workload: Workload, trained: Part, held_out: Part) -> None:
        super().__init__(workload, trained, held_out)
        self._padding = int(workload.model.options.get("pad_token_id", 0))
        self._label_last = workload.model.family == "llama"

    def num_labels(self, index: int) -> int:
        return 1

    def collate(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        places = [self.locate(index) for index in indices]
        rows = [part.sample(place) for part, place in places]
        classes = torch.tensor([int(part.labels[place]) for part, place in places])
        lengths = torch.tensor([len(row) for row in rows])
        longest = self.workload.data.padding == "longest"
        width = int(lengths.max()) if longest else self.workload.sequence_length
        ids = torch.full((len(rows), width), self._padding)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        labels = classes.unsqueeze(1)
        if self._label_last:
            spread = torch.full_like(ids, IGNORED_LABEL)
            labels = spread.scatter_(1, (lengths - 1).unsqueeze(1), labels)
        return {"input_ids": ids, "attention_mask": mask}, labels
