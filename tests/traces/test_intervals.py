"""Sets of time against sets of instants."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raybench.traces.intervals import covered, overlap, subtract, total, union, within

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 12)), max_size=8)


def made(some):
    begin = np.array([begin for begin, _ in some], np.int64)
    end = begin + np.array([length for _, length in some], np.int64)
    return union(begin, end), {at for begin, length in some for at in range(begin, begin + length)}


def instants(times):
    return {at for begin, end in times.tolist() for at in range(begin, end)}


@given(pairs, pairs)
def test_as_sets(some, others):
    one, one_set = made(some)
    other, other_set = made(others)
    assert instants(one) == one_set
    assert all(end < begin for (_, end), (begin, _) in zip(one.tolist(), one.tolist()[1:], strict=False))
    assert total(one) == len(one_set)
    assert overlap(one, other) == len(one_set & other_set)
    assert instants(subtract(one, other)) == one_set - other_set


@given(pairs, st.lists(st.integers(-3, 60), min_size=1, max_size=5))
def test_covered(some, at):
    times, as_set = made(some)
    assert covered(times, np.array(at)).tolist() == [sum(1 for instant in as_set if instant < limit) for limit in at]
    begin, end = np.array([min(at)]), np.array([max(at)])
    assert within(times, begin, end).tolist() == [sum(1 for instant in as_set if min(at) <= instant < max(at))]
