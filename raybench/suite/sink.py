"""The sink: where the ranks of one job leave their messages, on the driver's node.

Every rank keeps two connections to it, its own and its witness's. Rows arrive on the first as rounds end; the
second carries a heartbeat, the report of a death, and, the other way, the order to stop. Nothing that a stranger
sends is ever unpickled: a connection that does not know the key is closed in its handshake.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Condition, Event, Lock, Thread
from typing import Self

from raybench.worker.messages import (
    CaseRefused,
    Farewell,
    Heartbeat,
    Hello,
    Introduction,
    Message,
    RankFailed,
    RankLost,
    RoundBegun,
    RoundRows,
    Stop,
)
from raybench.worker.outbox import HANDSHAKE_TIMEOUT_S, SEND_TIMEOUT_S, set_timeouts, tune

SILENCE_S = 30.0
"""A rank of which nothing was heard for this long, though its connections are open, is lost."""
GRACE_S = 5.0
"""A rank whose connections are both closed, without a word why, is lost after this long."""
_LAST_WORDS_S = 2.0
"""A witness's report waits at most this long for what its rank sent before: that travels on another connection."""
_SUPERVISE_EVERY_S = 0.5
_HANDED_ON = (Hello, RoundBegun, RoundRows, CaseRefused, Farewell)


@dataclass
class _Rank:
    """What the sink knows of a rank."""

    heard_s: float
    """Monotonic time of its last message."""
    operation: str = ""
    connections: int = 0
    own_connections: int = 0
    closed_s: float | None = None
    """Monotonic time since which it has no connection."""
    ended: bool = False
    """It said farewell, or its end is told already."""


@dataclass
class _Witness:
    connection: Connection
    lock: Lock = field(default_factory=Lock)


class Sink:
    """Takes the messages of one job's ranks. A context manager; threads may share it."""

    def __init__(self, host: str = "127.0.0.1", *, silence_s: float = SILENCE_S, grace_s: float = GRACE_S) -> None:
        """Listen on a free port of `host`: the address by which the ranks' nodes reach the driver's."""
        self.key: str = secrets.token_hex(32)
        """Hexadecimal secret that opens this sink."""
        self._silence_s = silence_s
        self._grace_s = grace_s
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.settimeout(_SUPERVISE_EVERY_S)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = Condition()
        self._ranks: dict[int, _Rank] = {}
        self._witnesses: dict[int, _Witness] = {}
        self._stop: Stop | None = None
        self._channels: set[socket.socket] = set()
        self._closed = Event()
        self._threads = [
            Thread(target=self._listen, name="sink-listener", daemon=True),
            Thread(target=self._supervise, name="sink-supervisor", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, timeout: float) -> Message | None:
        """The next message in order of arrival, or None if none came within `timeout` seconds."""
        try:
            return self._messages.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def stop_ranks(self, reason: str) -> None:
        """Order every witness, also those still to come, to report its rank's stack and to end it.

        Each answers with a `RankFailed` that is nobody's fault (`culprit=False`) and gives `reason`.
        """
        with self._lock:
            self._stop = Stop(reason)
            witnesses = list(self._witnesses.values())
        for witness in witnesses:
            self._order(witness, reason)

    def last_operations(self) -> dict[int, str]:
        """The last known operation of every rank, from its heartbeats."""
        with self._lock:
            return {number: rank.operation for number, rank in sorted(self._ranks.items())}

    def close(self) -> None:
        """Close every connection, at which each witness ends its rank if that is still there."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=2 * _SUPERVISE_EVERY_S)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.1)  # such as too many open files: the next attempt may succeed
                continue
            Thread(target=self._serve, args=(channel,), name="sink-reader", daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        """One connection, from its handshake to its end."""
        with self._lock:
            self._channels.add(channel)
        try:
            channel.settimeout(None)
            tune(channel)
            with Connection(os.dup(channel.fileno())) as connection:
                set_timeouts(channel, receive_s=HANDSHAKE_TIMEOUT_S, send_s=SEND_TIMEOUT_S)
                secret = bytes.fromhex(self.key)
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
                introduction = connection.recv()
                set_timeouts(channel, receive_s=0, send_s=SEND_TIMEOUT_S)
                if isinstance(introduction, Introduction):
                    self._read(connection, introduction)
        except Exception:  # whatever a stranger sends ends its own connection alone
            pass
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _read(self, connection: Connection, introduction: Introduction) -> None:
        number = introduction.rank
        with self._lock:
            rank = self._ranks.setdefault(number, _Rank(heard_s=time.monotonic()))
            rank.connections += 1
            rank.own_connections += not introduction.witness
            rank.closed_s = None
            stop = self._stop
            if introduction.witness:
                self._witnesses[number] = _Witness(connection)
                witness = self._witnesses[number]
        try:
            if introduction.witness and stop is not None:
                self._order(witness, stop.reason)
            while True:
                message = connection.recv()
                with self._lock:
                    if introduction.witness and isinstance(message, RankFailed):
                        self._lock.wait_for(lambda: rank.own_connections == 0, _LAST_WORDS_S)
                    self._take(rank, message)
        finally:
            with self._lock:
                rank.connections -= 1
                rank.own_connections -= not introduction.witness
                self._lock.notify_all()
                if rank.connections == 0:
                    rank.closed_s = time.monotonic()
                if introduction.witness:
                    self._witnesses.pop(number, None)

    def _take(self, rank: _Rank, message: object) -> None:
        rank.heard_s = time.monotonic()
        if isinstance(message, Heartbeat):
            rank.operation = message.operation
        elif isinstance(message, RankFailed):
            rank.operation = message.last_operation
            if not rank.ended:
                rank.ended = True
                self._messages.put(message)
        elif isinstance(message, _HANDED_ON):
            rank.ended = rank.ended or isinstance(message, Farewell)
            self._messages.put(message)

    def _order(self, witness: _Witness, reason: str) -> None:
        with witness.lock, contextlib.suppress(OSError):
            witness.connection.send(Stop(reason))

    def _supervise(self) -> None:
        while not self._closed.wait(_SUPERVISE_EVERY_S):
            now = time.monotonic()
            with self._lock:
                for number, rank in self._ranks.items():
                    if rank.ended:
                        continue
                    silent = now - rank.heard_s > self._silence_s
                    gone = rank.closed_s is not None and now - rank.closed_s > self._grace_s
                    if silent or gone:
                        rank.ended = True
                        self._messages.put(RankLost(number, rank.operation))
