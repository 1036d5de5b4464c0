"""Reads NCCL_DEBUG=INFO logs of NCCL 2.2 to today, RCCL and network plugins: what it used, and what went wrong.

Lines are streamed: a log of gigabytes needs no more memory than a short one.
"""

from __future__ import annotations

from collections.abc import Iterable

from raybench.doctor.findings import Finding, Result, by_severity
from raybench.doctor.nccl_findings import conclude
from raybench.doctor.nccl_lines import (
    BENIGN,
    CUDA,
    ENVIRONMENT,
    IB_DEVICE,
    NET_NAME,
    NETWORK,
    NUM_RANKS,
    OLD_INTERFACE,
    SOCKET,
    VERSION,
    Bulk,
    Record,
    connection,
    may_be_wrapped,
    mended,
    records,
    ring_length,
    whole_ring,
)
from raybench.doctor.nccl_log import Log
from raybench.doctor.text import blocks_of
from raybench.doctor.watchdog import is_relevant, read_watchdog

_MAX_WATCHDOG_LINES = 5000
_MAX_NAMES = 10_000
_LONGEST_PATH = 120
_MAX_MENDED = 5000  # joining lines is slow, and a log that needs it is one that somebody has copied by hand
_LONGEST_LINE = 400


def read_nccl(lines: Iterable[str]) -> Result:
    """Facts and findings of one log."""
    return read_blocks(blocks_of(lines))


def read_blocks(blocks: Iterable[str]) -> Result:
    """The same for text that comes in blocks of whole lines, which is quicker."""
    log = Log()
    bulk = Bulk()
    for record in records(blocks, bulk):
        _read(log, record)
    _add_bulk(log, bulk)
    log.signs.forget_cured(log.connected_at)
    findings = conclude(log)
    if log.watchdog:
        findings += _watchdog_findings(log.watchdog, {item["code"] for item in findings})
    return {
        "kind": "nccl-log",
        "nccl_version": next(iter(log.versions), None),
        "cuda_version": log.cuda,
        "num_ranks": log.num_ranks or log.whole_ring or log.ring or None,
        "network": log.network or log.net_name,
        "interfaces": list(log.interfaces),
        "ib_devices": list(log.ib_devices),
        "transports": log.transports,
        "gdrdma": log.gdrdma,
        "rings_connected": log.rings_connected,
        "num_warnings": log.num_warnings,
        "first_warning": log.first_warning,
        "environment": log.environment,
        "findings": by_severity(findings),
    }


def _read(log: Log, record: Record) -> None:
    text = record.text
    if record.tail and log.num_mended < _MAX_MENDED and may_be_wrapped(record):
        log.num_mended += 1
        text = mended(record)
    if record.level:
        log.num_records += 1
        if record.level == "WARN" and not BENIGN.search(text):
            log.num_warnings += 1
            log.first_warning = log.first_warning or text.strip()[:_LONGEST_LINE]
    if " via" in text and record.level != "WARN":
        path = connection(text)
        if path and len(path) <= _LONGEST_PATH:
            _connection(log, path, text)
            return
    if record.level == "INFO" or record.starts:
        _facts(log, record, text)
    log.signs.read(record)
    if not record.level and len(log.watchdog) < _MAX_WATCHDOG_LINES and is_relevant(record.text):
        log.watchdog.append(record.text)


def _connection(log: Log, path: str, text: str, count: int = 1) -> None:
    path = "SHM" if path == "direct shared memory" else path
    if path in log.transports or len(log.transports) < _MAX_NAMES:
        log.transports[path] = log.transports.get(path, 0) + count
    if path.startswith("P2P"):
        log.first_p2p = log.first_p2p or text
    net = NET_NAME.search(path)
    if net is None:
        return
    if path.startswith("NET/"):
        log.net_name = log.net_name or net.group(1)
    if "/GDRDMA" in path:
        log.gdr_line = log.gdr_line or text
    elif path.startswith("NET/") and _is_rdma(net.group(1)):
        log.rdma_line = log.rdma_line or text


def _add_bulk(log: Log, bulk: Bulk) -> None:
    for path, count in bulk.paths.items():
        log.num_records += count
        kind = "GDRDMA" if "/GDRDMA" in path else path.split("/")[0]
        _connection(log, path, bulk.examples.get(kind, path), count)
    log.num_ranks = max(log.num_ranks, bulk.num_ranks)


def _is_rdma(network: str) -> bool:
    """A network whose NICs could read GPU memory; TCP over sockets never does."""
    return "socket" not in network.lower() and "tcp" not in network.lower()


def _facts(log: Log, record: Record, text: str) -> None:
    if "Using" in text or "OOB" in text or "NET/IB" in text:
        _names(log, text)
    if "CCL version" in text:
        _version(log, text)
    if "Connected all" in text or "Init COMPLETE" in text:
        log.rings_connected = log.rings_connected or "Connected all rings" in text
        log.connected_at = record.number
    if "anks" in text:
        for match in NUM_RANKS.finditer(text):
            log.num_ranks = max(log.num_ranks, _small(match.group(1)))
    if "Channel " in text or "Ring " in text:
        length = ring_length(text)
        log.ring = max(log.ring, length)
        if length > 1 and whole_ring(text):
            log.whole_ring = max(log.whole_ring, length)
    if "GPU Direct RDMA" in text and "isabled" in text:
        log.gdr_off_line = log.gdr_off_line or text
    if " set " in text and len(log.environment) < _MAX_NAMES:
        setting = ENVIRONMENT.search(text)
        if setting:
            log.environment.setdefault(setting.group(1), setting.group(2).strip().removesuffix("."))


def _small(digits: str) -> int:
    return int(digits) if len(digits) < 8 else 0


def _version(log: Log, text: str) -> None:
    match = VERSION.search(text)
    if match and len(log.versions) < _MAX_NAMES:
        log.versions.setdefault(match.group(1), text.strip())
        cuda = CUDA.search(text, match.end())
        if cuda and log.cuda is None:
            log.cuda = cuda.group(1)


def _names(log: Log, text: str) -> None:
    network = NETWORK.search(text)
    if network and log.network is None:
        log.network = network.group(1).split("  ")[0].strip().rstrip(".")
        log.network_line = text
    devices = IB_DEVICE.findall(text)
    if devices and len(log.ib_devices) < _MAX_NAMES:
        for device in devices:
            log.ib_devices.setdefault(device, text)
        layers = {"RoCE" if "/RoCE" in device else "IB" for device in devices}
        if len(layers) > 1:
            log.mixed_layers = log.mixed_layers or text
    if len(log.interfaces) >= _MAX_NAMES:
        return
    for name, address in SOCKET.findall(text) + OLD_INTERFACE.findall(text):
        log.interfaces.setdefault(name, text)
        if address.lower().startswith("fe80"):
            log.link_local = log.link_local or text


def _watchdog_findings(lines: list[str], known: set[str]) -> list[Finding]:
    """PyTorch's watchdog often writes into the same file; what it says belongs to the story."""
    found: list[Finding] = read_watchdog("\n".join(lines))["findings"]
    return [item for item in found if item["code"] not in known and item["code"] != "not-recognised"]
