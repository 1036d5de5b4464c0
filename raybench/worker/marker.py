"""The marker: a little shared memory in which a rank always notes its last operations.

The rank's witness reads it from another process, so that a rank which died, hangs or was stopped still tells
what it did last. Writing takes about a microsecond: no system call, no lock, one `pack_into` a mark. A mark goes
to the slot that holds the oldest of 32; each slot begins and ends with the mark's number, so that a reader that meets
a half-written one leaves it out.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from time import monotonic_ns
from typing import Any, Self

TEXT_BYTES = 232
CASE_BYTES = 256
_OPERATION = Struct(f"<QqI{TEXT_BYTES}sQ")
_ROUND = Struct(f"<QqqI{CASE_BYTES}sQ")
HISTORY = 32
"""How many operations are kept; a power of two."""
_ROUND_SLOTS = (0, 512)
_OPERATION_SLOTS = tuple(1024 + 320 * place for place in range(HISTORY))
_SIZE = 12288
_NOWHERE = -1


@dataclass(frozen=True)
class MarkerState:
    """What a marker says."""

    case: str | None
    """None outside any round."""
    round: int | None
    operation: str
    """Empty before the first mark."""
    since_ns: int
    """Monotonic clock of the host when the operation was marked."""
    deadline_ns: int | None
    """Monotonic clock of the host at which the round must have ended; None outside any round."""


class Marker:
    """A rank's last operation and current round, in memory shared with its witness: one writer, any readers."""

    def __init__(self, memory: mmap.mmap, *, fd: int | None = None) -> None:
        self._memory = memory
        self._fd = fd
        self._operations = 0
        self._rounds = 0

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the file `path` (which must not exist) and map it for writing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _SIZE)
        marker = cls(mmap.mmap(fd, _SIZE), fd=fd)
        marker.end_round()
        return marker

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the marker open at `fd` for reading; takes the descriptor over."""
        return cls(mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ), fd=fd)

    @classmethod
    def null(cls) -> Self:
        """One that no other process sees."""
        marker = cls(mmap.mmap(-1, _SIZE))
        marker.end_round()
        return marker

    def fileno(self) -> int:
        """The descriptor to hand to a witness."""
        if self._fd is None:
            raise ValueError("a null marker has no file")
        return self._fd

    def mark(self, text: str) -> None:
        """Note `text` as what this rank does from now on; more than 232 bytes are cut."""
        number = self._operations = self._operations + 1
        data = text.encode()
        _OPERATION.pack_into(
            self._memory, _OPERATION_SLOTS[number & (HISTORY - 1)], number, monotonic_ns(), len(data), data, number
        )

    def begin_round(self, case: str, round: int, deadline_monotonic_ns: int) -> None:
        """Note that a round begins, which must end before `deadline_monotonic_ns` (`time.monotonic_ns`)."""
        self._note_round(case, round, deadline_monotonic_ns)

    def end_round(self) -> None:
        """Note that no round is under way: nothing has a deadline."""
        self._note_round("", _NOWHERE, 0)

    def _note_round(self, case: str, round: int, deadline_ns: int) -> None:
        number = self._rounds = self._rounds + 1
        data = case.encode()
        if len(data) > CASE_BYTES:
            raise ValueError(f"case: {case!r} is longer than {CASE_BYTES} bytes")
        _ROUND.pack_into(self._memory, _ROUND_SLOTS[number & 1], number, deadline_ns, round, len(data), data, number)

    def read(self) -> MarkerState:
        """The newest whole mark and round."""
        _, since_ns, size, text, _ = self._newest(_OPERATION, _OPERATION_SLOTS)
        _, deadline_ns, round, case_size, case, _ = self._newest(_ROUND, _ROUND_SLOTS)
        inside = round != _NOWHERE
        return MarkerState(
            case=case[:case_size].decode(errors="replace") if inside else None,
            round=round if inside else None,
            operation=_decoded(text, size),
            since_ns=since_ns,
            deadline_ns=deadline_ns if inside else None,
        )

    def history(self) -> tuple[tuple[float, str], ...]:
        """The last operations, the oldest first, each with how long it was the last one, in seconds."""
        slots = [_OPERATION.unpack_from(self._memory, slot) for slot in _OPERATION_SLOTS]
        whole = sorted(fields for fields in slots if fields[0] == fields[-1] and fields[0])
        ends = [*(fields[1] for fields in whole), monotonic_ns()][1:]
        return tuple(
            (round((end - since_ns) / 1e9, 6), _decoded(text, size))
            for (_, since_ns, size, text, _), end in zip(whole, ends, strict=True)
        )

    def _newest(self, layout: Struct, slots: tuple[int, ...]) -> tuple[Any, ...]:
        """The fields of the slot with the highest number that is not half-written."""
        while True:
            found = [layout.unpack_from(self._memory, slot) for slot in slots]
            whole = [fields for fields in found if fields[0] == fields[-1]]
            if whole:
                return max(whole)

    def close(self) -> None:
        """Unmap the memory; the file goes with its last user if it was unlinked."""
        self._memory.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _decoded(text: bytes, size: int) -> str:
    return text[: min(size, TEXT_BYTES)].decode(errors="ignore")
