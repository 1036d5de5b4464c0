"""Memory that is lent again, and never to two at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raybench.worker.buffers import Buffers

LIKE = torch.empty(0)


def test_the_same_memory_comes_again():
    buffers = Buffers()
    first = buffers.take(1000, LIKE)
    second = buffers.take(1000, LIKE)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    buffers.give(first.view(10, 100))
    buffers.give(second)
    again = [buffers.take(number, LIKE.to(dtype)) for number, dtype in ((1600, torch.bfloat16), (900, torch.float32))]
    assert {tensor.data_ptr() for tensor in again} == places
    assert [(tensor.shape, tensor.dtype) for tensor in again] == [((1600,), torch.bfloat16), ((900,), torch.float32)]


def test_small_tensors_do_not_take_large_memory():
    buffers = Buffers()
    large = buffers.take(1000, LIKE)
    buffers.give(large)
    assert buffers.take(500, LIKE).data_ptr() != large.data_ptr()
    assert buffers.take(501, LIKE).data_ptr() == large.data_ptr()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=60))
def test_no_memory_is_lent_twice(actions):
    buffers, lent = Buffers(), []
    for number, (size, which) in enumerate(actions):
        if which == 0 or not lent:
            lent.append((buffers.take(size, LIKE).fill_(number), number))
        else:
            given_back, value = lent.pop(which % len(lent))
            assert set(given_back.tolist()) == {value}
            buffers.give(given_back)
    for tensor, value in lent:
        assert set(tensor.tolist()) == {value}


def test_steps_alike_take_no_new_memory():
    buffers = Buffers()
    seen = []
    for _ in range(4):
        lent = [buffers.take(number, LIKE) for number in (100, 700, 350, 50)]
        seen.append({tensor.data_ptr() for tensor in lent})
        for tensor in lent:
            buffers.give(tensor)
    assert seen[1] == seen[2] == seen[3]
