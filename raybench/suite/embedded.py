"""The Ray that the driver uses: the cluster named by `RAY_ADDRESS`, else one of its own on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from raybench.errors import RequestError
from raybench.suite.guard import VARIABLE, guarded, sweep
from raybench.worker.presence import one_line

CONNECT_S = 5.0
"""How long a cluster's address may take to accept a connection."""
_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",  # the driver itself waits 300 s for a rank
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_EMBEDDED_SETTINGS = {
    # Ray's workers are niced by 15 otherwise: whatever else runs on this machine would slow them down first.
    "RAY_worker_niceness": "0",
    # Without it Ray's helper processes overwrite their environment, by which the guard finds them.
    "SPT_NOENV": "1",
    # What Ray does beside a run takes the ranks' cores: no workers ahead of need, no task events, rarer reports.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_metrics_report_interval_ms": "600000",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_enable_metrics_collection": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_event_stats": "0",
}


@contextlib.contextmanager
def connect() -> Iterator[str | None]:
    """Join the cluster of `RAY_ADDRESS`, or start an embedded Ray, and leave or end exactly that one at exit.

    Yields the address of the cluster that was joined, None for an embedded one. Nothing of Ray is printed.

    Raises:
        RequestError: `RAY_ADDRESS` is not the address of a living cluster, or no Ray can be started here.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        with _embedded():
            yield None
        return
    _check_alive(address)
    with _environment(_SETTINGS), _joined(f"RAY_ADDRESS: cannot join {address!r}", address=address):
        yield address


@contextlib.contextmanager
def _embedded() -> Iterator[None]:
    """A Ray of its own, of which nothing is left at the end, also when this process is killed."""
    with contextlib.ExitStack() as stack:
        own_folder = "RAY_TMPDIR" not in os.environ
        folder = stack.enter_context(_short_folder()) if own_folder else os.environ["RAY_TMPDIR"]
        stack.enter_context(guarded(folder, remove=own_folder))
        stack.callback(sweep, folder)
        stack.enter_context(_environment({**_SETTINGS, **_EMBEDDED_SETTINGS, VARIABLE: folder}))
        stack.enter_context(
            _joined("Ray: cannot start one on this machine", address="local", include_dashboard=False, _temp_dir=folder)
        )
        _end_idle_helpers()
        yield


def _end_idle_helpers() -> None:
    """End what no suite on one machine asks, and what wakes on the ranks' cores all the same."""
    from ray._private import worker

    node = worker._global_node
    for end in (node.kill_log_monitor, node.kill_monitor, node.kill_dashboard):
        end(check_alive=False)


@contextlib.contextmanager
def _joined(what: str, **options: Any) -> Iterator[None]:
    """Connected to a Ray, quietly; `what` begins the message if that fails.

    Raises:
        RequestError: ray.init failed.
    """
    import ray

    main_thread = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        with _quiet():
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            except Exception as error:
                raise RequestError(f"{what} ({one_line(error)})") from None
            if main_thread:
                # ray.init replaced the handler of SIGTERM, in C by one that prints a stack.
                ours = on_terminate if callable(on_terminate) else signal.getsignal(signal.SIGTERM)
                signal.signal(signal.SIGTERM, ours)
            yield
    finally:
        with _uninterrupted():
            ray.shutdown()
            if main_thread:
                signal.signal(signal.SIGTERM, on_terminate)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """With those variables set that the user did not set."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No message of Ray's about the death of a worker is printed: `log_to_driver` does not cover these."""
    from ray._private import worker

    before = getattr(worker, "_worker_logs_enabled", True)
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


@contextlib.contextmanager
def _short_folder() -> Iterator[str]:
    """A folder of this Ray's own, so that it never meets another's address file; short enough for its sockets."""
    parent = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="rb-", dir=parent if len(parent) <= 20 else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield folder


def _check_alive(address: str) -> None:
    """Refuse an address at which no cluster can be.

    Raises:
        RequestError: it has another form than host:port, or nothing answers within 5 s.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise RequestError(
            f"RAY_ADDRESS: {address!r} cannot be joined (allowed: the cluster's host:port, such as 10.0.0.2:6379, "
            f"or none for a Ray of its own; a dashboard's address is for `ray job submit`)"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as channel:
            channel.settimeout(CONNECT_S)
            answers = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(channel)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"RAY_ADDRESS: no Ray answers at {address!r} ({error}); start it, or unset RAY_ADDRESS for a Ray of its own"
        ) from None
    if not answers:
        raise RequestError(f"RAY_ADDRESS: what answers at {address!r} is not a Ray cluster (its GCS port is needed)")


def _speaks_http2(channel: socket.socket) -> bool:
    """Whether a server greets as every gRPC server does; joining anything else takes Ray two minutes to give up."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    channel.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    return channel.recv(9)[3:4] == b"\4"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
