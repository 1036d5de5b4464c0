"""PyTorch's watchdog messages, torch 1.8 to today: records mended where a terminal or viewer has cut them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from raybench.doctor.text import split_lines

# Records are matched with all blanks removed: then it does not matter where they were wrapped.
_WORK = r"Work[A-Z]\w{1,20}\((?:[^()]|\([^()]{0,40}\)){0,600}(?:\)|$)"
TIMEOUT: Final = re.compile(
    r"(?:\[rank(?P<rank>\d{1,6})\]:?)?(?:\[[EWIF][^\]]{0,80}\])?"
    r"(?:\[(?P<group>(?:PG[^\]]{0,160}?)?)Rank(?P<group_rank>\d{1,6})\]:?)?"
    r"(?:(?P<caught>Watchdogcaughtcollectiveoperationtimeout:?)|Work)?"
    rf"(?P<work>{_WORK})(?:ranfor(?P<elapsed>\d{{1,15}})milliseconds|(?P<blocking>timedoutinblockingwait))?"
)
STATUS: Final = re.compile(
    r"[Ll]astenqueued(?:NCCL)?work:(?P<enqueued>-?\d{1,18}),lastcompleted(?:NCCL)?(?:work)?:(?P<completed>-?\d{1,36})"
)
RANK: Final = re.compile(r"\[rank(\d{1,6})\]")
GROUP_RANK: Final = re.compile(r"\[(?P<group>(?:PG[^\]\[]{0,160}?)?)Rank(?P<group_rank>\d{1,6})\]")
AT_WORK: Final = re.compile(r"(?:detectedbywatchdogatwork(?:sequenceid)?:|TimeoutatNCCLwork:)(?P<seq>\d{1,18})")
DESYNC: Final = re.compile(r"causedthedesyncare|arethelaggingranksthatcausedthistimeout")
BEHIND: Final = re.compile(
    r"\[(?P<ranks>[\d,]+)\](?:finishedcollective#(?P<done>\d+),butdidn'tjoincollective#(?P<next>\d+)"
    r"|joinedbutdidn'tfinishcollective#(?P<open>\d+))|ranks\[(?P<never>[\d,]+)\]arethelaggingranks"
)
STORE: Final = re.compile(
    r"waitForInput:socket.{0,300}?timedoutafter(?P<ms>\d{1,12})ms|[Ww]aittimeoutafter(?P<wait>\d{1,12})ms"
    r"|Timedoutafter(?P<s>\d{1,9})secondswaitingforclients|(?P<connect>clientsockethastimedoutafter\w{1,20}whiletryingtoconnect)"
)
FRAME: Final = re.compile(r"ncclCommWatchdog|WorkNCCL::checkTimeout|Watchdog::run")
SIGNAL: Final = re.compile(r"dumpsignalduetoacollectivetimeout|timeoutsignalfrom")
MONITORED: Final = re.compile(r"[Rr]anks?(?P<ranks>[\d,]+)failedtopassmonitoredBarrierin(?P<ms>\d{1,12})ms")
GLOO: Final = re.compile(r"Timedoutwaiting(?P<ms>\d{1,12})msfor(?P<way>recv|send)operationtocomplete")
FINGERPRINT: Final = re.compile(
    r"Detectedmismatchbetweencollectivesonranks\.?Rank(?P<a>\d+)isrunningcollective:CollectiveFingerPrint\((?P<fa>.{0,300}?)\),"
    r"butRank(?P<b>\d+)isrunningcollective:CollectiveFingerPrint\((?P<fb>.{0,300}?)\)"
)
NOT_JOINED: Final = re.compile(
    r"Notallranksjoiningcollective,sequencenumber:(?P<seq>\d+)(?P<rest>.{0,400}?missingranks:\{(?P<ranks>[\d,]+)\})?"
)
STUCK: Final = re.compile(
    r"watchdoggotstuckfor(?P<s>\d{1,9})seconds|duetoProcessGroupNCCLwatchdoghang|Heartbeatmonitortimedout"
)
CLOSED: Final = re.compile(
    r"Connection(?:closed|reset)by(?:remote)?peer|ncclRemoteError|failedtorecv,got0bytes|Connectionwaslikelyclosed"
)
MESH: Final = re.compile(r"connectFullMeshfailed")
CULPRIT: Final = re.compile(r"Culpritrank(?P<rank>\d+);Errortype:(?P<type>\w+?)_MISMATCH")
_TELLING: Final = (
    *("Work", "atchdog", "enqueued", "NCCLwork", "signal", "desync", "lagging", "Notallranks", "Culprit", "mismatch"),
    *("onitoredBarrier", "imedout", "imeout", "waitForInput", "RemoteError", "failedtorecv", "FullMesh"),
    *("Connectionclosed", "Connectionreset", "Connectionwas"),
)
_START = re.compile(r"\[rank\d+\]:?\s*\[[EWIF]|\[rank\d+\]:?\s|\[[EWIF](?:\d{3,4})? (?=\d\d:|\w+\.(?:cpp|hpp|cu|h):\d)")
_WORDS: Final = (
    *("Work", "atchdog", "ProcessGroup", "c10d", "[Rank ", "[rank", "desync", "collective", "waitForInput"),
    *("milliseconds", "Numel", "SeqNum", "OpType", "Timeout(ms)", "enqueued", "completed", "imeout", "imed out"),
    *("checkTimeout", "monitoredBarrier", "missing ranks", "Culprit", "lagging", "FullMesh", "onnection closed"),
)
_KEEP_WHOLE = 8_000_000
_MAX_RECORD_LINES = 40
_OVERLAP = 6
_MAX_RECORD_CHARS = 20_000


@dataclass(frozen=True)
class Squeezed:
    """A record without its blanks, and where each of its lines begins in that."""

    text: str
    lines: tuple[str, ...]
    starts: tuple[int, ...]

    def line_at(self, position: int) -> str:
        """The line that holds a position of `text`."""
        return self.lines[max(0, bisect_right(self.starts, position) - 1)]

    def lines_of(self, start: int, end: int) -> str:
        """The lines that `text[start:end]` was read from, as one."""
        first = max(0, bisect_right(self.starts, start) - 1)
        last = max(first + 1, bisect_right(self.starts, max(start, end - 1)))
        return " ".join(line.strip() for line in self.lines[first:last])

    def cut_at_line(self, start: int, end: int) -> str:
        """`text[start:end]` up to the end of the line in which it starts."""
        limit = next((begin for begin in self.starts if begin > start), end)
        return self.text[start : min(end, limit)]


def relevant_text(lines: Iterable[str]) -> str:
    """All of a small file; of a large one the lines that may matter, with their neighbours."""
    kept: list[str] = []
    before: deque[str] = deque(maxlen=2)
    size = after = 0
    for line in lines:
        size += len(line)
        relevant = is_relevant(line)
        if relevant or after > 0 or size < _KEEP_WHOLE:
            kept += [*before, line]
            before.clear()
            after = 4 if relevant else after - 1
        else:
            before.append(line)
    return "".join(kept)


def is_relevant(line: str) -> bool:
    """The line may belong to a message of PyTorch's about communication; a cheap test."""
    for word in _WORDS:  # noqa: SIM110 (a loop is twice as quick as any() over a generator)
        if word in line:
            return True
    return False


def may_tell(record: Squeezed) -> bool:
    """Without one of these words none of the patterns above fits; most records of a large log have none."""
    for word in _TELLING:  # noqa: SIM110 (as above)
        if word in record.text:
            return True
    return False


def squeezed_records(text: str) -> Iterator[Squeezed]:
    """The text's records in order: a start that can be recognised, with the lines up to the next."""
    held: list[str] = []
    size = 0
    for raw in split_lines(text):
        for line in _parted(raw):
            begins = _START.match(line.lstrip()) is not None
            if held and begins:
                yield _squeeze(held)
                held, size = [], 0
            elif len(held) >= _MAX_RECORD_LINES or size > _MAX_RECORD_CHARS:
                yield _squeeze(held)
                held = held[-_OVERLAP:]  # a message may lie across the cut
                size = sum(map(len, held))
                if size > _MAX_RECORD_CHARS:
                    held, size = [], 0
            if line.strip():
                held.append(line)
                size += len(line)
    if held:
        yield _squeeze(held)


def _parted(line: str) -> Iterable[str]:
    """A line whose message begins after a progress bar or stray letters is parted there."""
    marks = [match.start() for match in _START.finditer(line) if match.start() > 0]
    if not marks:
        return (line,)
    edges = [0, *marks, len(line)]
    return [line[begin:end] for begin, end in pairwise(edges)]


def _squeeze(lines: list[str]) -> Squeezed:
    parts = ["".join(line.split()) for line in lines]
    starts: list[int] = []
    position = 0
    for part in parts:
        starts.append(position)
        position += len(part)
    return Squeezed("".join(parts), tuple(lines), tuple(starts))
