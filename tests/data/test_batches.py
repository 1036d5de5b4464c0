"""The same global batch for every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.data.batches import IGNORED_LABEL, Batches
from raybench.data.tokens import SyntheticTokens
from raybench.suite.track import DataConfig
from tests.gating import workload


def test_ranks_share_the_global_batch_in_order():
    work = workload(num_micro_batches=2)
    source = Batches(work, 3)
    whole = source.global_batch(4)
    parts = [source.batch(4, rank) for rank in range(3)]
    joined = [m for part in parts for m in part.micro_batches]
    assert len(joined) == len(whole.micro_batches) == 6
    for one, other in zip(joined, whole.micro_batches, strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert torch.equal(one.labels, other.labels)
    assert {part.num_tokens for part in parts} == {whole.num_tokens} == {3 * 2 * 2 * 9}


def test_the_samples_do_not_depend_on_how_ranks_are_arranged():
    two = Batches(workload(num_micro_batches=2), 2)
    four = Batches(workload(num_micro_batches=1), 4)
    ids = [torch.cat([m.inputs["input_ids"] for m in b.global_batch(1).micro_batches]) for b in (two, four)]
    assert torch.equal(*ids)


def test_labels_are_the_next_tokens_and_padding_is_not_trained_on():
    work = workload(data=DataConfig(min_length=1), micro_batch_size=4)
    source = Batches(work, 2)
    tokens = SyntheticTokens(61, 9, work.seed, 1)
    batch = source.batch(0, 1)
    for row, index in enumerate(range(4, 8)):
        sequence = torch.from_numpy(tokens.sequence(index))
        valid = tokens.num_valid(index)
        labels = batch.micro_batches[0].labels[row]
        assert torch.equal(batch.micro_batches[0].inputs["input_ids"][row], sequence[:-1])
        assert torch.equal(labels[:valid], sequence[1 : valid + 1])
        assert set(labels[valid:].tolist()) <= {IGNORED_LABEL}
    counted = sum(int((m.labels != IGNORED_LABEL).sum()) for m in source.global_batch(0).micro_batches)
    assert batch.num_tokens == counted < 8 * 9


@pytest.mark.parametrize(("num_samples", "steps", "dropped"), [(12, 3, 0), (13, 3, 1), (15, 3, 3), (4, 1, 0)])
def test_what_does_not_fill_a_global_batch_is_dropped_on_all_ranks(num_samples, steps, dropped):
    source = Batches(workload(data=DataConfig(num_samples=num_samples)), 2)
    assert (source.steps_per_pass, source.num_dropped) == (steps, dropped)
    seen = [index for step in range(steps) for index in source.samples(step)]
    assert seen == list(range(num_samples - dropped))
    assert source.samples(steps) == source.samples(0)  # the next pass


@settings(max_examples=25, deadline=None)
@given(vocabulary=st.integers(1, 300), length=st.integers(1, 40), seed=st.integers(0, 9), index=st.integers(0, 10**9))
def test_sequences_are_in_range_and_reproducible(vocabulary, length, seed, index):
    one = SyntheticTokens(vocabulary, length, seed, 1)
    ids = one.sequence(index)
    assert ids.shape == (length + 1,)
    assert ids.min() >= 0
    assert ids.max() < vocabulary
    assert (ids == SyntheticTokens(vocabulary, length, seed).sequence(index)).all()
    assert 1 <= one.num_valid(index) <= length
