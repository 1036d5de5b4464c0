"""A trace file, a piece of whole events at a time, so that memory does not grow with the file.

The list of events is cut where one event seems to end and the next to begin. Whether the cut was right is for the JSON
parser to say: a piece that starts between two events and parses as a list has ended between two events. Where it does
not parse, the brackets of the piece are counted, which finds the end of the list, the place where a file was cut off,
and the events beside a broken one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

FIRST_BYTES = 1 << 11
BLOCK_BYTES = 1 << 17
BLOCK_SHARE = 8
"""Unpacked bytes are taken at a time: an eighth of what was taken already, since events become objects of several
times their size, but no fewer than the first and no more than the second."""
MAX_HEAD_BYTES = 64 << 20
"""A trace whose events have not begun by then has none."""

_EVENTS_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|["\[\]{}]', re.DOTALL)
_GZIP_MAGIC = b"\x1f\x8b"


Parse = Callable[[bytes, bool], bool]


class UnreadableTraceError(Exception):
    """Nothing in the file can be used: one sentence."""


@dataclass
class Surroundings:
    """What stands around the list of events, and what was wrong with the file."""

    head: bytes = b""
    """The document up to the list, with an empty list in its place, closed; empty where the document is the list."""
    tail: bytes = b""
    """The document from behind the list, opened; empty where nothing follows."""
    problems: list[str] = field(default_factory=list)
    lost: int = 0
    """Events that could not be read."""
    unpacked_bytes: int = 0


def blocks(file: RawIOBase, problems: list[str]) -> Iterator[bytes]:
    """The unpacked file; what ends early or is broken in the packed one is told in `problems`."""
    start = file.read(2)
    file.seek(0)
    size, taken = FIRST_BYTES, 0
    if start != _GZIP_MAGIC:
        while block := file.read(size):
            yield block
            taken += len(block)
            size = _block_bytes(taken)
        return
    unpack, packed = zlib.decompressobj(wbits=31), b""
    while True:
        packed = packed or file.read(size)
        if not packed:
            if not unpack.eof:
                problems.append("the packed file ends early")
            return
        if unpack.eof:  # several packed files, one after the other
            unpack = zlib.decompressobj(wbits=31)
        try:
            block = unpack.decompress(packed, size)
        except zlib.error:
            problems.append("the packed file is broken")
            return
        packed = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
        if block:
            yield block
            taken += len(block)
            size = _block_bytes(taken)


def _block_bytes(taken: int) -> int:
    return min(max(FIRST_BYTES, taken // BLOCK_SHARE), BLOCK_BYTES)


def pieces(path: Path, around: Surroundings, parse: Parse) -> None:
    """Give `parse` every event of a trace, as JSON lists of some events each.

    Args:
        path: A Kineto trace, packed by gzip or not.
        around: Filled with what stands before and behind the events.
        parse: Takes a JSON list of events and whether they are known to be whole; says whether it could be read.

    Raises:
        UnreadableTraceError: The file has no list of events.
        OSError: The file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        source = _Counted(blocks(file, around.problems), around)
        pending = _events_begin(source, around)
        more = pending
        while more:
            if (cut := _last_cut(pending)) is not None and parse(_listed(pending, 0, cut[0]), False):
                pending = pending[cut[1] :]
            else:
                end, closed = _parse_carefully(pending, parse, around)
                pending = pending[end:]
                if closed:
                    around.tail = _opened(pending + source.rest(MAX_HEAD_BYTES))
                    return
            more = source.rest(max(1, len(pending) - BLOCK_BYTES))
            pending += more
        end, closed = _parse_carefully(pending, parse, around)
        if closed:
            around.tail = _opened(pending[end:])
        else:
            around.problems.append("the file ends before its list of events does")


class _Counted:
    """Blocks, counted and joined."""

    def __init__(self, source: Iterator[bytes], around: Surroundings) -> None:
        self._source = source
        self._around = around

    def rest(self, at_most: int) -> bytes:
        """The next bytes, about as many; empty at the end."""
        taken: list[bytes] = []
        while at_most > 0 and (block := next(self._source, None)) is not None:
            taken.append(block)
            at_most -= len(block)
            self._around.unpacked_bytes += len(block)
        return b"".join(taken) if len(taken) != 1 else taken[0]


def _events_begin(source: _Counted, around: Surroundings) -> bytes:
    """Read up to the list of events; returns what was read of the list already."""
    head = b""
    while more := source.rest(max(1, len(head))):
        head += more
        if head.lstrip()[:1] == b"[":  # the format without a document around the list
            return head.lstrip()[1:]
        if (found := _EVENTS_BEGIN.search(head)) is not None:
            around.head = head[: found.end()] + b"]}"
            return head[found.end() :]
        if len(head) > MAX_HEAD_BYTES:
            break
    if around.problems:  # before its events began
        raise UnreadableTraceError("; ".join(around.problems))
    if not head:
        raise UnreadableTraceError("the file is empty")
    if head.lstrip()[:1] != b"{":
        raise UnreadableTraceError("not JSON")
    if b'"nodes"' in head:
        raise UnreadableTraceError("an execution trace (nodes without times), not a profile: it has no traceEvents")
    raise UnreadableTraceError("no traceEvents in it: not a trace of torch.profiler")


def _last_cut(pending: bytes) -> tuple[int, int] | None:
    """The last place where an event seems to end, and where the next one begins."""
    reach = 1 << 16
    while True:
        begin = max(0, len(pending) - reach)
        cut = None
        for cut in _BETWEEN_EVENTS.finditer(pending, begin):  # noqa: B007
            pass
        if cut is not None:
            return cut.start() + 1, cut.end()
        if begin == 0:
            return None
        reach *= 8


def _listed(pending: bytes, begin: int, end: int) -> bytes:
    return b"".join((b"[", memoryview(pending)[begin:end], b"]"))


def _spans(pending: bytes) -> tuple[list[tuple[int, int]], int | None]:
    """Where each whole event lies, and where the list ends if it does."""
    spans: list[tuple[int, int]] = []
    depth = begin = 0
    for token in _TOKENS.finditer(pending):
        sign = pending[token.start() : token.start() + 1]
        if sign == b'"':
            if token.end() - token.start() == 1:  # a text that does not end here
                break
        elif sign in b"{[":
            if depth == 0:
                begin = token.start()
            depth += 1
        elif depth == 0:
            return spans, token.start()
        else:
            depth -= 1
            if depth == 0:
                spans.append((begin, token.end()))
    return spans, None


def _parse_carefully(pending: bytes, parse: Parse, around: Surroundings) -> tuple[int, bool]:
    """Give `parse` all whole events; where they end, and whether the list ends there."""
    spans, closed = _spans(pending)
    around.lost += _parse_spans(pending, spans, parse)
    if closed is not None:
        return closed + 1, True
    return spans[-1][1] if spans else 0, False


def _parse_spans(pending: bytes, spans: list[tuple[int, int]], parse: Parse) -> int:
    """All at once, or, where one of them is broken, in ever smaller parts; how many could not be read at all."""
    if not spans or parse(_listed(pending, spans[0][0], spans[-1][1]), True):
        return 0
    if len(spans) == 1:
        return 1
    half = len(spans) // 2
    return _parse_spans(pending, spans[:half], parse) + _parse_spans(pending, spans[half:], parse)


def _opened(tail: bytes) -> bytes:
    """What follows the list in a document, as a document of its own."""
    rest = tail.lstrip(b", \t\r\n")
    return b"{" + rest if rest[:1] == b'"' else b""
