"""What ranks tell the driver while a job runs. Every message is small, plain data; rows are dictionaries by column."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raybench.results.schema import Status

Row = dict[str, Any]


@dataclass(frozen=True)
class Hello:
    """A rank is there, its process group made."""

    rank: int
    node: str
    """Address of the node as Ray or the launcher knows it."""
    local_rank: int
    pid: int


@dataclass(frozen=True)
class RoundBegun:
    """A rank begins its part of a round."""

    rank: int
    case: str
    round: int
    num_ranks: int
    """Ranks that take part: as many `RoundRows` will follow."""


@dataclass(frozen=True)
class RoundRows:
    """All that one rank measured in one round. `run` comes from the first rank of the case alone."""

    rank: int
    case: str
    round: int
    num_ranks: int
    ranks: Row
    run: Row | None = None
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    operations: list[Row] = field(default_factory=list)
    collectives: list[Row] = field(default_factory=list)
    """Of a collective sweep, which has these alone: what the rank timed, by size."""
    trace: bytes | None = None
    """The profiler's file, where the round was traced."""


@dataclass(frozen=True)
class CaseRefused:
    """A case ended on all its ranks without harm to the group: its gate failed, or it cannot run as asked."""

    case: str
    round: int
    status: Status
    reason: str
    run: Row


@dataclass(frozen=True)
class RankFailed:
    """A rank ends because of an error of its own, or its watcher found it dead, silent, or past its deadline."""

    rank: int
    case: str | None
    """None outside any round."""
    round: int | None
    status: Status
    reason: str
    last_operation: str
    stack: str | None
    culprit: bool = True
    """False where the rank only follows another one: a peer that closed its connection, an order to stop."""
    history: tuple[tuple[float, str], ...] = ()
    """Its last operations, the oldest first, each with the seconds for which it was the last one told."""
    flight: str | None = None
    """JSON of torch's flight recorder, from a rank that hangs (`worker.flight`)."""


@dataclass(frozen=True)
class Farewell:
    """A rank is done with all rounds of its job."""

    rank: int


@dataclass(frozen=True)
class RankLost:
    """Made by the sink itself: a rank's connections are gone or silent, and nothing told why."""

    rank: int
    last_operation: str


Message = Hello | RoundBegun | RoundRows | CaseRefused | RankFailed | Farewell | RankLost


@dataclass(frozen=True)
class Introduction:
    """First on every connection to the sink: whose it is. Kept by the sink."""

    rank: int
    witness: bool
    """True for the rank's witness, False for the rank itself."""


@dataclass(frozen=True)
class Heartbeat:
    """Sent by a rank's witness every two seconds: the rank's process exists. Kept by the sink."""

    rank: int
    case: str | None
    round: int | None
    operation: str


@dataclass(frozen=True)
class Stop:
    """The sink's order to a witness: report what the rank is doing, then end it."""

    reason: str
