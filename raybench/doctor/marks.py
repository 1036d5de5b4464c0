"""How a rank notes an operation among ranks, written by `worker.communication` and read by the doctor.

    all_reduce bucket 2 over data 0-3 #17
    wait for send 0F1 over pipeline 0→1 #4

The number counts what began among exactly these ranks: it is the same on all of them for the same operation, and the
n-th send of a direction is the n-th receive. So the marks of several ranks tell who has not come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WAIT = "wait for "
TRANSFERS = ("send", "receive")
_MARK = re.compile(rf"^({WAIT})?(\S+) (.*) over ([\w ]+?) ([\d,/-]+|\d+→\d+) #(\d+)")
_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Mark:
    """An operation among ranks, as it was noted."""

    is_wait: bool
    """The rank waits for its end; else it began it."""
    kind: str
    label: str
    axis: str
    ranks: tuple[int, ...]
    """Global ranks; of a transfer its sender and its receiver."""
    number: int

    @property
    def is_transfer(self) -> bool:
        return self.kind in TRANSFERS

    @property
    def place(self) -> str:
        """Among whom: the same text on all of its ranks."""
        return f"{self.axis} {among(self.ranks, self.is_transfer)}"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.label}".strip()


def text_of(kind: str, label: str, where: str, number: int) -> str:
    """What is noted of the beginning of an operation; `where` is an axis and `among(...)`."""
    return f"{kind} {label} over {where} #{number}"


def read_mark(text: str) -> Mark | None:
    """The operation that a mark tells of; None for any other text, or where its end was cut off."""
    match = _MARK.match(text)
    if match is None:
        return None
    wait, kind, label, axis, ranks, number = match.groups()
    members = _expanded(ranks)
    return None if members is None else Mark(wait is not None, kind, label, axis, members, int(number))


def among(ranks: Sequence[int], is_transfer: bool = False) -> str:
    """Ranks in few letters: `0→1` for a transfer, `0-3`, `0-12/4` for every fourth, else all with commas."""
    if is_transfer:
        return f"{ranks[0]}→{ranks[1]}"
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if len(ranks) > 1 and step > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def _expanded(text: str) -> tuple[int, ...] | None:
    if "→" in text:
        sender, _, receiver = text.partition("→")
        return int(sender), int(receiver)
    if match := re.fullmatch(r"(\d+)-(\d+)(?:/(\d+))?", text):
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        return tuple(range(first, last + 1, step)) if step and last - first < _MOST_RANKS else None
    return tuple(map(int, text.split(","))) if re.fullmatch(r"\d+(,\d+)*", text) else None
