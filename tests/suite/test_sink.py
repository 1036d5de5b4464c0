"""The sink: what arrives, in which order, and what a stranger can do to it."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest

from raybench.suite.sink import Sink
from raybench.worker.messages import Farewell, Heartbeat, Hello, Introduction, RankFailed, RankLost, RoundRows, Stop
from raybench.worker.outbox import Outbox, SinkLostError, connect

pytestmark = pytest.mark.timeout(30)


def failed(rank: int, **fields: object) -> RankFailed:
    known = {"case": "one", "round": 0, "status": "crashed", "reason": "r", "last_operation": "op", "stack": None}
    return RankFailed(rank=rank, **(known | fields))


@pytest.fixture
def sink():
    with Sink(silence_s=2.0, grace_s=0.5) as sink:
        yield sink


def witness_of(sink: Sink, rank: int) -> Connection:
    connection, _ = connect(sink.address, sink.key, Introduction(rank, witness=True))
    return connection


def messages(sink: Sink, seconds: float) -> list[object]:
    found = []
    while (message := sink.get(seconds)) is not None:
        found.append(message)
    return found


def test_messages_arrive_in_order_and_heartbeats_stay(sink):
    sent = [Hello(0, "n", 0, 1), *(RoundRows(0, "one", r, 1, {"x": r}) for r in range(50)), Farewell(0)]
    with Outbox(sink.address, sink.key, 0) as outbox:
        for message in sent:
            outbox.send(message)
        witness = witness_of(sink, 0)
        witness.send(Heartbeat(0, "one", 0, "step 4"))
        assert [sink.get(5.0) for _ in sent] == sent
        deadline = time.monotonic() + 5
        while sink.last_operations() != {0: "step 4"} and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sink.last_operations() == {0: "step 4"}
    assert messages(sink, 1.5) == []


def test_get_waits_no_longer_than_asked(sink):
    begin = time.monotonic()
    assert sink.get(0.2) is None
    assert sink.get(-1) is None
    assert time.monotonic() - begin < 5


class Bomb:
    """Says so when it is unpickled."""

    exploded: list[int] = []  # noqa: RUF012

    def __reduce__(self):
        return Bomb.exploded.append, (1,)


def test_stranger_neither_ends_the_listener_nor_is_unpickled(sink):
    with pytest.raises(SinkLostError, match="refused this rank's key"):
        Outbox(sink.address, "00" * 32, 5, timeout_s=2.0)
    silent = socket.create_connection(sink.address)
    for garbage in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x04abcd", b"\x7f\xff\xff\xff"):
        with socket.create_connection(sink.address) as stranger:
            stranger.sendall(garbage)
    with socket.create_connection(sink.address) as channel, Connection(channel.detach()) as stranger:
        stranger.send_bytes(pickle.dumps(Bomb()))
    with Outbox(sink.address, sink.key, 0) as outbox:
        outbox.send(Hello(0, "n", 0, 1))
        assert isinstance(sink.get(5.0), Hello)
    silent.close()
    assert Bomb.exploded == []


def test_nobody_there_is_said_in_words_and_in_time():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    begin = time.monotonic()
    with pytest.raises(SinkLostError, match=r"no connection to the driver at 127\.0\.0\.1:\d+ within 0\.5 s"):
        Outbox(address, "00" * 32, 0, timeout_s=0.5)
    assert time.monotonic() - begin < 5


def test_send_after_the_sink_is_gone_is_an_error():
    with Sink() as sink:
        outbox = Outbox(sink.address, sink.key, 0)

    def send_often() -> None:
        for _ in range(100):
            outbox.send(Hello(0, "n", 0, 1))
            time.sleep(0.01)

    with pytest.raises(SinkLostError, match="lost"):
        send_often()


def test_rank_whose_connections_close_without_a_word_is_lost(sink):
    outbox, witness = Outbox(sink.address, sink.key, 3), witness_of(sink, 3)
    witness.send(Heartbeat(3, "one", 0, "step 9: forward"))
    time.sleep(0.3)
    outbox.close()
    assert messages(sink, 1.0) == []  # its witness may still tell why
    witness.close()
    assert sink.get(5.0) == RankLost(3, "step 9: forward")


def test_silent_rank_is_lost_once(sink):
    outbox, witness = Outbox(sink.address, sink.key, 1), witness_of(sink, 1)
    assert sink.get(10.0) == RankLost(1, "")
    outbox.close()
    witness.close()
    assert messages(sink, 1.5) == []


def test_first_report_of_an_end_is_the_one(sink):
    with Outbox(sink.address, sink.key, 0) as outbox:
        outbox.send(failed(0, status="out_of_memory"))
        assert sink.get(5.0) == failed(0, status="out_of_memory")
        witness = witness_of(sink, 0)
        witness.send(failed(0))
        witness.close()
    assert messages(sink, 1.5) == []


def test_what_a_rank_sent_comes_before_its_witness_report(sink):
    """They travel on two connections; the rows were there first."""
    outbox, witness = Outbox(sink.address, sink.key, 0), witness_of(sink, 0)
    witness.send(failed(0))
    time.sleep(0.2)
    outbox.send(RoundRows(0, "one", 0, 1, {}))
    outbox.close()
    assert isinstance(sink.get(5.0), RoundRows)
    assert isinstance(sink.get(5.0), RankFailed)


def test_stop_reaches_every_witness_also_a_late_one(sink):
    early = witness_of(sink, 0)
    time.sleep(0.2)
    sink.stop_ranks("interrupted")
    late = witness_of(sink, 1)
    for witness in (early, late):
        assert witness.poll(5.0)
        assert witness.recv() == Stop("interrupted")


def test_many_ranks_at_once(sink):
    def one(rank: int) -> None:
        with Outbox(sink.address, sink.key, rank) as outbox:
            for number in range(20):
                outbox.send(RoundRows(rank, "one", number, 1, {}))
            outbox.send(Farewell(rank))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = messages(sink, 1.0)
    for rank in range(32):
        own = [m.round for m in found if isinstance(m, RoundRows) and m.rank == rank]
        assert own == list(range(20))
    assert len(found) == 32 * 21


def test_closing_leaves_no_thread():
    before = threading.active_count()
    with Sink() as sink:
        outboxes = [Outbox(sink.address, sink.key, rank) for rank in range(4)]
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before
    for outbox in outboxes:
        outbox.close()
