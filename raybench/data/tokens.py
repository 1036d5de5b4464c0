"""Synthetic text: sequences of token ids that a model can learn from, made on the spot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SyntheticTokens:
    """A seeded Markov chain: each id is followed by its successor half of the time, else by a draw of Zipf's law.

    Sequence `i` depends on the seed and on `i` alone: ranks make their own samples without a word to each other, and
    the number of valid tokens of any sample is known to all.
    """

    def __init__(self, vocabulary_size: int, sequence_length: int, seed: int, min_length: int | None = None) -> None:
        self.sequence_length = sequence_length
        self.min_length = sequence_length if min_length is None else min(min_length, sequence_length)
        self._seed = seed
        random = np.random.default_rng([seed, 0])
        self._successor = random.permutation(vocabulary_size)
        weights = 1.0 / np.arange(1, vocabulary_size + 1)
        self._cumulative = np.cumsum(weights / weights.sum())

    def num_valid(self, index: int) -> int:
        """How many tokens of sequence `index` are trained on."""
        if self.min_length == self.sequence_length:
            return self.sequence_length
        return int(np.random.default_rng([self._seed, 1, index]).integers(self.min_length, self.sequence_length + 1))

    def sequence(self, index: int) -> NDArray[np.int64]:
        """`sequence_length + 1` ids: inputs are all but the last, labels all but the first."""
        random = np.random.default_rng([self._seed, 2, index])
        draws = random.random((2, self.sequence_length + 1))
        drawn = np.searchsorted(self._cumulative, draws[0]).clip(max=len(self._cumulative) - 1)
        ids: NDArray[np.int64] = drawn.astype(np.int64)
        for position in range(1, len(ids)):
            if draws[1, position] < 0.5:
                ids[position] = self._successor[ids[position - 1]]
        return ids
