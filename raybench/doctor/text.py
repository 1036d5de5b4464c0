"""Turning what users paste into lines: encodings, terminal codes, launchers' prefixes, endless lines."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from raybench.errors import RequestError

# A copied terminal often loses the escape character itself, so a bare `[4m` is one as well.
_BARE = re.compile(r"\[\d{1,2}(?:;\d{1,3})*m")
_ANSI = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|\[\d{1,2}(?:;\d{1,3})*m")
# `[1,3]<stdout>:`, `[worker0|0]:`, `(pid=1)`, `1: `, `[88] `, `node1: `, `[default0]:`
_LAUNCHER = re.compile(
    r"\s*(?:\[\d+,\d+\]<\w+>:|\[[\w./-]*[|/][\w./|-]*\]:?|\[default\d+\]:|\[rank\d+\]:|\((?:[^()]{0,60}\b)?pid=[^()]{1,60}\)"
    r"|\[\d{1,6}\](?=\s)|\d{1,6}:(?=\s))\s?"
)
_REPEATED = re.compile(
    r"\s*\[repeated \d+x across cluster\].*"
)  # Ray's mark that it left out the same of other workers
COLLECTED_KEYS = ("log", "message", "msg")
"""Where collectors that write a line as JSON (Docker, fluentd, vector) put the line itself."""
_COLLECTED = re.compile(r"\{.{0,2000}\"(?:log|message|msg)\"\s*:\s*\"")
_LONGEST_LINE = 1 << 16
_BLOCK = 1 << 18


def without_terminal_codes(line: str) -> str:
    """`line` without colours and cursor movements; cheap where there are none."""
    return _ANSI.sub("", line) if "\x1b" in line else _BARE.sub("", line)


def without_launcher_prefix(line: str) -> str:
    """`line` without what mpirun, srun, torchrun, Ray or kubectl put before it (at most two such prefixes)."""
    for _ in range(2):
        match = _LAUNCHER.match(line)
        if match is None:
            break
        line = line[match.end() :]
    return line


def without_collector(line: str) -> str:
    """`line` without what a log collector has made of it: JSON around it, Ray's mark behind it."""
    if line.startswith("{") and _COLLECTED.match(line):
        with suppress(ValueError, RecursionError):
            body = json.loads(line)
            log = next((body[key] for key in COLLECTED_KEYS if key in body), None)
            line = log.rstrip("\n") if isinstance(log, str) else line
    return _REPEATED.sub("", line) if "[repeated " in line else line


def split_lines(text: str) -> list[str]:
    """Lines without terminal codes; a carriage return (a progress bar) begins a new one."""
    lines: list[str] = []
    for raw in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        lines.append(without_collector(without_terminal_codes(raw)))
    return lines


def stream_lines(path: Path) -> Iterator[str]:
    """The file's lines with their ends, one at a time, in bounded memory (a line without end comes in pieces)."""
    try:
        with path.open("rb") as handle:
            if _is_utf16(handle):
                yield from handle.read().decode("utf-16", "replace").splitlines(keepends=True)
                return
            while raw := handle.readline(_LONGEST_LINE):
                yield raw.decode("utf-8", "replace")
    except OSError as exc:
        raise unreadable(path, exc) from exc


def stream_blocks(path: Path) -> Iterator[str]:
    """The file in blocks of whole lines, for readers that look at many lines at once."""
    try:
        with path.open("rb") as handle:
            if _is_utf16(handle):
                yield handle.read().decode("utf-16", "replace")
                return
            while data := handle.read(_BLOCK):
                yield (data + handle.readline(_LONGEST_LINE)).decode("utf-8", "replace")
    except OSError as exc:
        raise unreadable(path, exc) from exc


def _is_utf16(handle: BufferedReader) -> bool:
    """What some shells of Windows write; a mark of UTF-8 is passed over. Nothing is rewound, so pipes can be read."""
    start = handle.peek(3)[:3]
    if start == codecs.BOM_UTF8:
        handle.read(3)
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def blocks_of(lines: Iterable[str]) -> Iterator[str]:
    """Lines, with or without their ends, as blocks."""
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line if line.endswith("\n") else line + "\n")
        size += len(line)
        if size > _BLOCK:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def unreadable(path: Path, exc: OSError) -> RequestError:
    """One sentence: which path, and why it cannot be read."""
    return RequestError(f"cannot read {str(path)!r}: {exc.strerror or exc}")
