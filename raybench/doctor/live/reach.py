"""Between two nodes: do ports answer, whose clock is ahead, how fast does data go? Plain TCP, no Ray.

A `Listener` answers lines: `who` with the node's name, `time` with its clock in nanoseconds, and after `stream NAME`
it counts what comes.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from raybench.doctor.live.facts import Outcome, Reach

CONNECT_S: Final = 3.0
NUM_SAMPLES: Final = 16
"""Ports tried in the range from which programs get theirs, one in each part of it."""
FIXED_PORTS: Final = (29500,)
"""Of torchrun, unless it is told another."""
NUM_EXCHANGES: Final = 20
WARM_UP_S: Final = 0.3
STREAM_S: Final = 1.0
NUM_STREAMS: Final = 4
"""Connections at a time: a single one does not fill a fast link."""
_CHUNK: Final = 1 << 20
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Listener:
    """Sockets that answer other nodes until closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sockets = _bind(_is_v6(name))
        self._received: dict[str, list[tuple[int, int]]] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="doctor-listener", daemon=True)
        self._thread.start()

    @property
    def ports(self) -> list[int]:
        return [int(each.getsockname()[1]) for each in self._sockets]

    def received(self, source: str) -> tuple[int, int]:
        """(bytes, nanoseconds) of what `source` has streamed since the last call, its connections together."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._received.get(source, ())) >= NUM_STREAMS, WARM_UP_S + STREAM_S)
            found = self._received.pop(source, [])
        return sum(size for size, _ in found), max((duration for _, duration in found), default=0)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in self._sockets:
                selector.register(each, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(0.2):
                    with suppress(OSError):
                        connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as lines:
            connection.settimeout(30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while line := lines.readline(256):
                if line == b"who\n":
                    connection.sendall(f"{self._name}\n".encode())
                elif line == b"time\n":
                    connection.sendall(b"%d\n" % time.time_ns())
                elif line.startswith(b"stream "):
                    measured = _count(connection)
                    with self._changed:
                        self._received.setdefault(line[7:].decode().strip(), []).append(measured)
                        self._changed.notify_all()
                    return
                else:
                    return


def reach(source: str, target: str, at: str, ports: Sequence[int], listener_ports: Sequence[int]) -> Reach:
    """Try `ports` and the ports of the target's Listener at address `at`; ask one of the latter who and when it is."""
    every = [*ports, *listener_ports]
    with ThreadPoolExecutor(max_workers=max(1, len(every))) as pool:
        outcomes = dict(zip(every, pool.map(lambda port: try_port(at, port), every), strict=True))
    answered_by, clock = None, None
    for port in listener_ports:
        if outcomes[port] == "ok" and answered_by is None:
            answered_by, clock = _ask(at, port)
    return {
        "source": source,
        "target": target,
        "at": at,
        "ports": outcomes,
        "answered_by": answered_by,
        "round_trip_ns": clock[0] if clock else None,
        "offset_ns": clock[1] if clock else None,
    }


def try_port(address: str, port: int) -> Outcome:
    """Connect once and hang up."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return "timeout" if error.errno == errno.ETIMEDOUT else "unreachable"
    return "ok"


def stream(source: str, at: str, port: int) -> None:
    """Send to a Listener for its time, over several connections at once. How much came, it knows itself."""
    threads = [threading.Thread(target=_send, args=(source, at, port), daemon=True) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_S + 2 * (WARM_UP_S + STREAM_S) + 5)


def _bind(is_v6: bool) -> list[socket.socket]:
    """One socket in each part of the range of ephemeral ports, and the fixed ports where they are free."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    width = max(1, (high - low + 1) // NUM_SAMPLES)
    wanted = [[port] for port in FIXED_PORTS]
    parts = [range(low + part * width, low + (part + 1) * width) for part in range(NUM_SAMPLES)]
    wanted += [random.sample(part, min(5, width)) for part in parts]
    return [bound for ports in wanted if (bound := _bind_one(ports, is_v6)) is not None]


def _bind_one(ports: Sequence[int], is_v6: bool) -> socket.socket | None:
    for port in ports:
        with suppress(OSError):
            if is_v6:
                return socket.create_server(("::", port), family=socket.AF_INET6, backlog=512)
            return socket.create_server(("", port), backlog=512)
    return None


def _ask(address: str, port: int) -> tuple[str | None, tuple[int, int] | None]:
    """Who answers, and (round trip, offset) of the exchange with the shortest round trip (Cristian, 1989)."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rb") as lines:
                connection.sendall(b"who\n")
                name = lines.readline(256).decode().strip()
                return name or None, min(_exchange(connection, lines) for _ in range(NUM_EXCHANGES))
    except (OSError, ValueError):
        return None, None


def _exchange(connection: socket.socket, lines: BinaryIO) -> tuple[int, int]:
    sent = time.time_ns()
    connection.sendall(b"time\n")
    theirs = int(lines.readline(64))
    received = time.time_ns()
    return received - sent, theirs - (sent + received) // 2


def _send(source: str, address: str, port: int) -> None:
    data = memoryview(bytes(_CHUNK))
    with suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S) as connection:
        connection.settimeout(WARM_UP_S + STREAM_S + 2)
        connection.sendall(f"stream {source}\n".encode())
        end = time.monotonic() + WARM_UP_S + STREAM_S + 0.2
        while time.monotonic() < end:
            connection.sendall(data)  # until the receiver has seen enough and hangs up


def _count(connection: socket.socket) -> tuple[int, int]:
    """(bytes, nanoseconds) after the warm-up, in which bursts and slow start pass."""
    buffer = bytearray(_CHUNK)
    connection.settimeout(WARM_UP_S + STREAM_S)
    begin = time.perf_counter_ns()
    begin_counting, end = begin + int(WARM_UP_S * 1e9), begin + int((WARM_UP_S + STREAM_S) * 1e9)
    size, now = 0, begin
    with suppress(TimeoutError):
        while now < end and (received := connection.recv_into(buffer)):
            now = time.perf_counter_ns()
            size += received if now > begin_counting else 0
    return size, max(now, end) - begin_counting


def _is_v6(name: str) -> bool:
    return ":" in name
