"""What a collective sweep measures: its sizes, groups, operations and types, and the job that ranks are given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from raybench.errors import RequestError, unknown
from raybench.suite.job import RankJob, RoundKey
from raybench.suite.numbers import whole_number
from raybench.suite.track import Layout

TRACK = "comm"
"""What stands in the column `track` of its rows."""
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "send_receive")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
DTYPES = tuple(ELEMENT_BYTES)
MAX_BYTES = 1 << 40
Backend = Literal["nccl", "gloo"]

DEFAULT_SIZES = {"gloo": (8, 8 << 20, 4), "nccl": (8, 1 << 30, 2)}
"""Least and largest size in bytes, and the factor from one to the next."""
DEFAULT_BUDGET_S = {"gloo": 60.0, "nccl": 600.0}
DEFAULT_ROUNDS = 3
DEFAULT_TIMEOUT_S = 300

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SweepCase(Data):
    """One operation of one type among the groups of one name, at every size."""

    group: str
    kind: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.group}-{self.kind}-{self.dtype}"


class CommJob(RankJob):
    """Rounds of a sweep under one setting of the environment."""

    cases: tuple[SweepCase, ...]
    rounds: tuple[RoundKey, ...]
    """What to do, in order, by the cases' names."""
    sizes: tuple[int, ...]
    """Payloads in bytes, ascending."""
    layout: Layout | None = None
    budget_s: float
    """Seconds of measuring for all rounds: what does not fit is left out, largest sizes first."""
    timeout_s: int
    """Longest time of one round of a case."""
    overlap: bool = True
    """Measure the collectives beside compute, too."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """`MIN:MAX` or `MIN:MAX:FACTOR`, such as 8:1G:4, or one size; K, M and G are powers of 1024.

    Raises:
        RequestError: in one sentence.
    """
    parts = text.split(":")
    if len(parts) > 3:
        raise _not_sizes(text)
    least, largest = _bytes(parts[0], text), _bytes(parts[min(1, len(parts) - 1)], text)
    factor = whole_number("--sizes: factor", 2)(parts[2]) if len(parts) == 3 else 2
    if not 1 <= least <= largest <= MAX_BYTES:
        raise _not_sizes(text)
    return sizes_between(least, largest, factor)


def sizes_between(least: int, largest: int, factor: int) -> tuple[int, ...]:
    """From `least` by `factor` to at most `largest`."""
    sizes = [least]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _bytes(text: str, whole: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise _not_sizes(whole)
    return int(match[1]) * _UNITS[match[2].upper()]


def _not_sizes(text: str) -> RequestError:
    return RequestError(
        f"--sizes: {text!r} is not allowed (MIN:MAX or MIN:MAX:FACTOR in bytes, 1 to 1024G, such as 8:1G:2)"
    )


def parse_names(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between them, each once; hyphens may stand for underscores."""
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise unknown(option, name, allowed)
    if not names:
        raise RequestError(f"{option}: names nothing (allowed: {', '.join(allowed)})")
    return tuple(dict.fromkeys(names))


def parse_layout(text: str) -> Layout:
    """`data=2,pipeline=1,tensor=2`: axes that are not named have size 1.

    Raises:
        RequestError: in one sentence.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, number = part.strip().partition("=")
        if axis not in ("data", "pipeline", "tensor"):
            raise unknown("--layout", axis, ("data", "pipeline", "tensor"))
        if axis in sizes or not equals:
            raise RequestError(f"--layout: {text!r} is not allowed (each axis once, such as data=2,tensor=2)")
        sizes[axis] = whole_number(f"--layout: {axis}", 1)(number)
        if sizes[axis] > 2**16:
            raise RequestError(f"--layout: {axis}: {number} is not allowed (at most {2**16})")
    return Layout(**sizes)
