"""The grammar of NCCL's log lines, 2.2 to today, RCCL included; and mending records that a terminal has wrapped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from raybench.doctor.text import COLLECTED_KEYS, without_collector, without_launcher_prefix, without_terminal_codes

VERSION: Final = re.compile(r"\b[NR]CCL version\s*:?\s*(\d+(?:\.\d+){1,3})")
_VERSION_BEGINS = re.compile(r"[NR]CCL version\s*:?\s*(?:\d|$)")
CUDA: Final = re.compile(r"\+cuda(\d+\.\d+)")
NUM_RANKS: Final = re.compile(r"\bn[rR]anks[ =]+0*(\d+)")
NETWORK: Final = re.compile(r"Using (?:network|internal Network) (?!plugin)(\S.*)")
NET_NAME: Final = re.compile(r"NET/([^/]+)/\d")
ENVIRONMENT: Final = re.compile(r"\b((?:NCCL|RCCL)_\w+) set (?:by environment )?to (.*)")
IB_DEVICE: Final = re.compile(r"\[\d+\]\s*([^\s\[\]{},;=:]+:\d+/(?:IB|RoCE)(?:/SHARP)?)(?=[\s,;}\[]|$)")
SOCKET: Final = re.compile(r"(?:\b(?:Using|OOB)\s+|\[\d+\]\s?)([A-Za-z][\w.\-@]*):([\w:.%\-]*[:.][\w:.%\-]*)<\d+>")
OLD_INTERFACE: Final = re.compile(r"Using interface ([A-Za-z][\w.\-@]*)(?::([\w:.%\-]+)<\d+>)?")
_CONNECTION = re.compile(
    r"\b(?:Ring|Channel) \d+(?:/\d+)? ?: ?\d+(?:\[\w+\])? -> \d+(?:\[\w+\])?(?: \[(?:send|receive)\])? via(?: |$)(.*)"
)
_COLLNET = re.compile(r"\bColl\w* (?:channel )?\d+(?:/\d+)? ?: ?\d+(?:\[\w+\])? \[(?:send|receive)\] via(?: |$)(.*)")
_PATH_TEXT = (
    r"direct shared memory|P2P/(?:CUMEM|IPC|MNNVL|direct pointer|indirect/\w+\[\w+\])(?:/(?:read|CE))*|SHM(?:/\w+)*"
    r"|(?:COLL)?NET/[^/\n]{1,40}/\d+(?:\(\d+\))?(?:/GDRDMA(?:\(PCI\))?)?(?:/Shared)?"
)
_PATH = re.compile(_PATH_TEXT)
# The lines that fill large logs, whole and on one line: taken out of a block at once, the rest is read line by line.
_BULK = re.compile(
    r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])?(?: \[(?:send|receive)\])? via "
    rf"({_PATH_TEXT})(?: comm 0x[0-9a-f]+ nRanks 0*(\d+))?\r?(?=\n(?!\s*[\d(]*\)?/))"
)
_UNUSUAL: Final = ("\r", "\x1b", "[0m", "[repeated ", *(f'"{key}":' for key in COLLECTED_KEYS))
_TAKEN = "\x00"  # stands where a line was taken out
_COMMUNICATOR = re.compile(r"\s+comm 0x.*")
_RING = re.compile(r"\b(?:Ring|Channel) \d+(?:/\d+)? ?:((?:\s+\d{1,7})+)\s*$")
_LEVELS: Final = {"INFO": "INFO", "WARN": "WARN", "TRAC": "INFO", "CALL": "INFO"}
_MARK = re.compile(r"NCCL (INFO|WARN|TRAC|CALL)")
_OLD_MARK = re.compile(r"(?:\[[0-9a-fA-F]{1,7}\]|\S+\.(?:cc|cu|cpp|h):\d+) (INFO|WARN) ")
_BARE_MARK = re.compile(r"\s*(INFO|WARN) (?:NET|Ring|Channel|NCCL|Using|Bootstrap|comm|CUDA Dev|Trees|Connected)\b")
_PATH_REST = re.compile(r"\s*[\d(]*\)?/")
_CHANNEL = re.compile(r"\b(?:Ring|Channel) \d+(?:/\d+)? ?:")
_BARE_FACT = re.compile(
    r"\s*(?:Using (?:network|internal Network) |Bootstrap ?: Using|NET(?:/\w+)? ?: Using|Connected all rings)"
)
# Warnings and notes that say only that something optional is not there.
BENIGN: Final = re.compile(
    r"Failed to open libibverbs|lib[nr]ccl-\w+\.so\S*: cannot open shared object|Could not find: lib[nr]ccl-"
    r"|Failed to find nccl\w*Plugin\w* symbol|No plugin found"
)
_ONE_RECORD = re.compile(r"(?=\S+:\d+:\d+ \[\w+\] )")
_FULL_RANKS = re.compile(r"\bn[rR]anks \d+ (?:cudaDev|nNodes|localRank)")
_KNOWN_NETWORKS = re.compile(r"(?:Socket|IB|IBext\w*|AWS Libfabric|Libfabric|UCX\w*|FastSocket|OFI)$")
_FACT_WORDS: Final = (" via", "Using", "OOB", "CCL version", "anks", "Channel ", "Ring ")
_MAX_TAIL = 12  # wrapped lists of NICs, orders of rings
_MAX_TAIL_CHARS = 400


@dataclass(slots=True)
class Record:
    """One record: its line, and the lines after it that may be its wrapped rest or somebody else's output."""

    number: int
    text: str
    level: str  # INFO, WARN, or "" for a line that is not NCCL's own
    starts: bool = False  # it begins like one of NCCL's facts, whoever prints it
    tail: list[str] = field(default_factory=list)

    def readings(self) -> list[str]:
        """The record alone, then joined with what follows: wrapped inside a word, or at a blank."""
        texts = [self.text]
        rest = [without_launcher_prefix(line) for line in self.tail]
        runs = [rest[:count] for count in range(1, len(rest) + 1)]
        runs += [rest[1:count] for count in range(2, min(len(rest), 3) + 1)]  # a foreign line has come between
        for run in runs:
            texts += ["".join([self.text, *run]), " ".join(part.strip() for part in (self.text, *run))]
        return texts


@dataclass
class Bulk:
    """Connections that were counted a block at a time: path -> lines, and the largest `nRanks` beside them."""

    paths: Counter[str] = field(default_factory=Counter)
    num_ranks: int = 0
    examples: dict[str, str] = field(default_factory=dict)  # of P2P, NET and GDRDMA each the first line


def records(blocks: Iterable[str], bulk: Bulk) -> Iterator[Record]:
    """Records in the order of the text, without the connections, which go to `bulk`.

    Every line is a record; those that are not NCCL's own also go to the tail of the record before them.
    """
    number = 0
    held: Record | None = None
    last_error = False
    for block in blocks:
        plain = not any(mark in block for mark in _UNUSUAL)
        for line in _without_connections(block, bulk):
            number += 1
            if line.endswith(_TAKEN) and "NCCL" not in line:
                line = ""
                if held is not None:
                    yield held
                    held = None
            if not line or line.isspace():
                continue
            mark = line.find("NCCL ")
            level = _LEVELS.get(line[mark + 5 : mark + 9], "") if mark >= 0 else ""
            if level and plain and line.find("NCCL ", mark + 5) < 0 and not last_error:  # nearly every line
                if held is not None:
                    yield held
                held = Record(number, line, level)
                continue
            for piece in (line,) if plain and not level else _pieces(line):
                level = level_of(piece)
                if last_error and level != "INFO":
                    level = "WARN"
                last_error = "Last error:" in piece
                if last_error and piece.split("Last error:", 1)[1].strip():
                    level, last_error = "WARN", False
                record = Record(number, piece, level, starts=not level and _starts_fact(piece))
                if level or record.starts:
                    if held is not None:
                        yield held
                    held = record
                    continue
                if held is not None:
                    if len(held.tail) < _MAX_TAIL and len(piece) < _MAX_TAIL_CHARS:
                        held.tail.append(piece)
                    else:
                        yield held
                        held = None
                yield record
        number -= not block.endswith("\n")
    if held is not None:
        yield held


def _without_connections(block: str, bulk: Bulk) -> list[str]:
    parts = _BULK.split(block)
    if len(parts) > 1:
        paths = parts[1::3]
        bulk.paths.update(paths)
        ranks = [int(digits) for digits in set(parts[2::3]) if digits and len(digits) < 8]
        bulk.num_ranks = max([bulk.num_ranks, *ranks])
        for path in dict.fromkeys(paths):
            kind = "GDRDMA" if "/GDRDMA" in path else path.split("/")[0]
            if kind not in bulk.examples:
                match = re.search(rf"^.*via {re.escape(path)}(?=\r?$| comm)", block, re.MULTILINE)
                bulk.examples[kind] = match.group().strip() if match else path
        block = _TAKEN.join(parts[0::3])
    lines = block.split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _pieces(raw: str) -> list[str]:
    """A physical line without terminal codes; two records on one line, or a progress bar before one, are parted."""
    if "\r" in raw:
        return [piece for part in raw.split("\r") for piece in _pieces(part) if piece.strip()]
    line = without_collector(without_terminal_codes(raw))
    if line.count("NCCL INFO") + line.count("NCCL WARN") > 1:
        return [piece for piece in _ONE_RECORD.split(line) if piece.strip()]
    return [line] if line.strip() else []


def level_of(line: str) -> str:
    """INFO or WARN for a line of NCCL's own (the oldest name no library), else nothing."""
    mark = _MARK.search(line)
    if mark:
        return _LEVELS[mark.group(1)]
    if "INFO " in line or "WARN " in line:
        match = _OLD_MARK.search(line) or _BARE_MARK.match(line)
        if match:
            return match.group(1)
    return ""


def _starts_fact(line: str) -> bool:
    if "CCL version" in line:
        return _VERSION_BEGINS.search(line) is not None
    return (" :" in line and _CHANNEL.search(line) is not None) or _BARE_FACT.match(line) is not None


def connection(text: str) -> str | None:
    """What a connection line says after `via`; None where it is no connection, empty where it is cut there."""
    match = _CONNECTION.search(text) or _COLLNET.search(text)
    if match is None:
        return None
    path = _COMMUNICATOR.sub("", match.group(1)).strip()
    return "SHM" if path == "direct shared memory" else path


def ring_length(text: str) -> int:
    """How many ranks a ring-order line (`Channel 00/02 :  0 1 2 3`) lists; 0 for any other line."""
    match = _RING.search(text)
    return len(match.group(1).split()) if match else 0


def whole_ring(text: str) -> bool:
    """The line lists every rank once."""
    match = _RING.search(text)
    if match is None:
        return False
    ranks = sorted(map(int, match.group(1).split()))
    return ranks == list(range(len(ranks)))


def may_be_wrapped(record: Record) -> bool:
    """The record speaks of a fact and is not whole in itself, so what follows it may be its rest."""
    if not record.tail or record.level == "WARN":
        return False
    probe = record.text + record.tail[0]
    if not any(word in probe for word in _FACT_WORDS):
        return False
    path = connection(record.text)
    return not (path and _PATH.fullmatch(path) and not _PATH_REST.match(record.tail[0]))


def mended(record: Record) -> str:
    """The reading of a record in which most is whole: a wrapped one is joined, a foreign line after it is left."""
    return max(record.readings(), key=_wholeness)  # the first of equals: the record alone


def _wholeness(text: str) -> int:
    if len(text) > 4000:
        return 0
    score = len(IB_DEVICE.findall(text)) + len(SOCKET.findall(text))
    path = connection(text)
    if path and (path == "SHM" or _PATH.fullmatch(path)):
        net = NET_NAME.search(path)
        score += 2 + path.count("/") + (net is not None and _KNOWN_NETWORKS.match(net.group(1)) is not None)
    if ring_length(text):
        score += ring_length(text) + 1000 * whole_ring(text)
    network = NETWORK.search(text)
    if network:
        score += 1 + (_KNOWN_NETWORKS.match(network.group(1).strip()) is not None)
    score += _FULL_RANKS.search(text) is not None
    return score + len(VERSION.findall(text)) + len(NUM_RANKS.findall(text)) + len(CUDA.findall(text))
