"""What a rank tells of its own end."""

from __future__ import annotations

import pytest

from raybench.worker.identity import Identity
from raybench.worker.messages import Farewell, Hello, RankFailed
from raybench.worker.outbox import SinkLostError
from raybench.worker.presence import Presence, classify, one_line


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class DistStoreError(RuntimeError):
    """Named as torch names it."""


@pytest.mark.parametrize(
    ("error", "status", "culprit"),
    [
        (ValueError("the model is wrong"), "failed", True),
        (KeyboardInterrupt(), "failed", True),
        (MemoryError(), "out_of_memory", True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory", True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", True),
        (OSError(12, "Cannot allocate memory"), "out_of_memory", True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9622"), "failed", False),
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:57019: Connection reset by peer"), "failed", False),
        (RuntimeError("Write error: Broken pipe"), "failed", False),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), "failed", False),
        (RuntimeError("ncclRemoteError: a network error or a remote process exiting prematurely"), "failed", False),
        (RuntimeError("recvValue failed: Connection was likely closed. Did the remote server crash?"), "failed", False),
        (DistStoreError("anything"), "failed", False),
        (ConnectionResetError(), "failed", False),
        (SinkLostError("the driver is gone"), "failed", False),
        (ValueError("connection closed by peer is what my data says"), "failed", True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_classify(error, status, culprit):
    assert classify(error) == (status, culprit)


def test_out_of_memory_is_found_behind_another_error():
    error = RuntimeError("the forward pass failed")
    error.__cause__ = MemoryError()
    assert classify(error) == ("out_of_memory", True)


def test_torch_out_of_memory():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert classify(caught.value) == ("out_of_memory", True)


def test_one_line():
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(one_line(ValueError("x" * 5000))) == 400


def test_tells_how_the_work_ended():
    identity = Identity(rank=2, world_size=3, local_rank=1, node="10.0.0.2")
    sent: list[object] = []
    with Presence.detached(identity, sent.append) as presence:
        presence.hello()
    assert isinstance(sent[0], Hello)
    assert (sent[0].node, sent[0].local_rank) == ("10.0.0.2", 1)
    assert sent[1:] == [Farewell(2)]


def test_tells_of_an_error():
    identity = Identity(rank=2, world_size=3, local_rank=1, node="10.0.0.2")
    sent: list[object] = []

    def work() -> None:
        with Presence.detached(identity, sent.append) as presence:
            presence.marker.begin_round("naive", 4, 10)
            presence.marker.mark("step 7: backward")
            print(1 / 0)

    with pytest.raises(ZeroDivisionError):
        work()
    (failed,) = sent
    assert isinstance(failed, RankFailed)
    assert (failed.case, failed.round, failed.last_operation) == ("naive", 4, "step 7: backward")
    assert failed.reason == "ZeroDivisionError: division by zero"
    assert "in work" in failed.stack
