"""The way from a rank to the driver's sink: an authenticated connection on which messages are sent."""

from __future__ import annotations

import os
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Lock
from typing import Self

from raybench.worker.messages import Introduction

HANDSHAKE_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 30
"""After this long a send whose data the sink does not take fails."""
UNACKNOWLEDGED_TIMEOUT_MS = 20_000
"""After this long without an acknowledgement from the driver's host a connection counts as lost."""


class SinkLostError(OSError):
    """The driver's sink cannot be reached, or no longer."""


def connect(
    address: tuple[str, int], key: str, introduction: Introduction, *, timeout_s: float = 10.0
) -> tuple[Connection, socket.socket]:
    """Open an authenticated connection to the sink and say whose it is.

    Returns the connection, and a socket of the same connection for its options and for ending a blocked read.

    Raises:
        SinkLostError: not there within `timeout_s`, or the key is wrong.
    """
    host, port = address
    end = time.monotonic() + timeout_s
    pause_s = 0.05
    while True:
        try:
            return _try(address, key, introduction)
        except AuthenticationError:
            raise SinkLostError(f"the driver at {host}:{port} refused this rank's key") from None
        except (OSError, EOFError) as error:
            if time.monotonic() + pause_s > end:
                cause = str(error) or "closed"
                raise SinkLostError(
                    f"no connection to the driver at {host}:{port} within {timeout_s:g} s ({cause})"
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def _try(address: tuple[str, int], key: str, introduction: Introduction) -> tuple[Connection, socket.socket]:
    channel = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    try:
        channel.settimeout(None)
        tune(channel)
        connection = Connection(os.dup(channel.fileno()))
    except OSError:
        channel.close()
        raise
    try:
        secret = bytes.fromhex(key)
        set_timeouts(channel, receive_s=HANDSHAKE_TIMEOUT_S, send_s=SEND_TIMEOUT_S)
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        connection.send(introduction)
        set_timeouts(channel, receive_s=0, send_s=SEND_TIMEOUT_S)
    except BaseException:
        connection.close()
        channel.close()
        raise
    return connection, channel


def tune(channel: socket.socket) -> None:
    """Send small messages at once, and notice a host that went away without closing."""
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_TIMEOUT_MS),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            channel.setsockopt(socket.IPPROTO_TCP, option, value)


def set_timeouts(channel: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Bound each blocking read and write of the connection (0: unbounded); a late one raises OSError."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        channel.setsockopt(socket.SOL_SOCKET, option, value)


class Outbox:
    """A rank's sender. Threads may share it."""

    def __init__(self, address: tuple[str, int], key: str, rank: int, *, timeout_s: float = 10.0) -> None:
        """Connect, trying for at most `timeout_s`.

        Raises:
            SinkLostError: not there in time, or the key is wrong.
        """
        self._address = address
        self._lock = Lock()
        self._connection, self._channel = connect(address, key, Introduction(rank, witness=False), timeout_s=timeout_s)

        os.register_at_fork(after_in_child=self._forget)

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            SinkLostError: the connection is closed, or the sink took nothing for 30 s.
        """
        with self._lock:
            try:
                self._connection.send(message)
            except OSError as error:
                self._forget()  # a message cut short cannot be followed by another
                host, port = self._address
                raise SinkLostError(f"the connection to the driver at {host}:{port} is lost ({error})") from None

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        """Let go of the connection; in a forked child, so that its closing means the end of the rank itself."""
        self._connection.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
