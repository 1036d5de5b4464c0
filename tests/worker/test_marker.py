"""The marker: what is written is what another process reads, also half-way through a write."""

from __future__ import annotations

import os
import threading
import time
import timeit
from pathlib import Path

import pytest

from raybench.worker.marker import _OPERATION_SLOTS, CASE_BYTES, HISTORY, TEXT_BYTES, Marker, MarkerState


@pytest.fixture
def marker(tmp_path):
    marker = Marker.create(tmp_path / "marker")
    yield marker
    marker.close()


def test_starts_outside_any_round(marker):
    assert marker.read() == MarkerState(case=None, round=None, operation="", since_ns=0, deadline_ns=None)


def test_other_mapping_reads_what_was_marked(marker):
    other = Marker.attach(os.dup(marker.fileno()))
    marker.begin_round("bucketed", 3, 10**15)
    marker.mark("step 3: all-reduce of bucket 2")
    first = other.read()
    assert (first.case, first.round, first.deadline_ns) == ("bucketed", 3, 10**15)
    assert first.operation == "step 3: all-reduce of bucket 2"
    marker.mark("step 3: optimizer")
    second = other.read()
    assert second.operation == "step 3: optimizer"
    assert second.since_ns >= first.since_ns
    marker.end_round()
    assert (other.read().case, other.read().round, other.read().deadline_ns) == (None, None, None)
    assert other.read().operation == "step 3: optimizer"
    other.close()


@pytest.mark.parametrize("text", ["", "x" * 10_000, "é" * TEXT_BYTES, "a\x00b"])
def test_any_text_can_be_marked(marker, text):
    marker.mark(text)
    read = marker.read().operation
    assert text.startswith(read)
    assert len(read.encode()) >= min(len(text.encode()), TEXT_BYTES) - 1


def test_case_name_that_does_not_fit_is_refused(marker):
    with pytest.raises(ValueError, match="case"):
        marker.begin_round("c" * (CASE_BYTES + 1), 0, 0)


def test_half_written_slot_is_not_read(marker):
    marker.mark("whole")
    marker.mark("torn")
    torn = _OPERATION_SLOTS[2]
    marker._memory[torn : torn + 8] = (99).to_bytes(8, "little")  # as if the writer had died behind the first field
    assert marker.read().operation == "whole"
    assert [text for _, text in marker.history()] == ["whole"]


def test_the_last_operations_are_kept_with_their_times(marker):
    assert marker.history() == ()
    for number in range(3 * HISTORY + 5):
        marker.mark(f"operation {number}")
        if number == 3 * HISTORY:
            time.sleep(0.05)
    seconds, texts = zip(*marker.history(), strict=True)
    assert list(texts) == [f"operation {number}" for number in range(2 * HISTORY + 5, 3 * HISTORY + 5)]
    assert seconds[texts.index(f"operation {3 * HISTORY}")] >= 0.05
    assert min(seconds) >= 0


def test_null_marker_works_alike():
    marker = Marker.null()
    marker.begin_round("naive", 1, 5)
    marker.mark("step 1")
    assert (marker.read().case, marker.read().operation) == ("naive", "step 1")
    with pytest.raises(ValueError):
        marker.fileno()


def test_file_is_private_and_must_be_new(marker, tmp_path):
    assert (tmp_path / "marker").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Marker.create(tmp_path / "marker")


def test_reader_never_sees_a_mixture(marker):
    """Every text is one letter over and over; a mixture of two marks would have two letters."""
    other = Marker.attach(os.dup(marker.fileno()))
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            marker.mark("abcdefghij"[number % 10] * (number % 200))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20_000):
            assert len(set(other.read().operation)) <= 1
    finally:
        done.set()
        writer.join()
        other.close()


def cost_of_a_mark_ns(path: Path) -> float:
    """The best of five means over 20,000 marks, in nanoseconds."""
    marker = Marker.create(path)
    times = timeit.repeat(lambda: marker.mark("step 12: all-reduce of bucket 3"), number=20_000, repeat=5)
    return min(times) / 20_000 * 1e9


def test_cost_of_a_mark(tmp_path, record_property):
    cost_ns = cost_of_a_mark_ns(tmp_path / "marker")
    record_property("cost_of_a_mark_ns", round(cost_ns))
    assert cost_ns > 0
