"""What the messages of one job say so far: rounds completed, ranks gone, and whose fault it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from raybench.results.schema import Status
from raybench.worker.messages import (
    CaseRefused,
    Farewell,
    Hello,
    Message,
    RankFailed,
    RankLost,
    RoundBegun,
    RoundRows,
)

Place = tuple[str, int]
"""A round by its case and number."""


@dataclass(frozen=True)
class Round:
    """All rows of one completed round, by rank."""

    case: str
    round: int
    parts: Mapping[int, RoundRows]


@dataclass(frozen=True)
class Blame:
    """The round that ended a job; no case where none was under way."""

    case: str | None
    round: int | None
    status: Status
    reason: str


@dataclass
class Attempt:
    """Takes the messages of one job in the order in which they come."""

    world_size: int
    hellos: dict[int, Hello] = field(default_factory=dict)
    farewells: set[int] = field(default_factory=set)
    faults: dict[int, RankFailed | RankLost] = field(default_factory=dict)
    """The first fault of each rank, in the order in which they came."""
    members: dict[Place, set[int]] = field(default_factory=dict)
    """Ranks that take part in a round."""
    begun_at: dict[Place, datetime] = field(default_factory=dict)
    """When the first rank said that it begins a round."""
    _sizes: dict[Place, int] = field(default_factory=dict)
    """How many ranks take part in a round."""
    _in_flight: dict[int, Place] = field(default_factory=dict)
    """The round that each rank is in."""
    _parts: dict[Place, dict[int, RoundRows]] = field(default_factory=dict)
    _closed: set[Place] = field(default_factory=set)

    def take(self, message: Message) -> Round | CaseRefused | None:
        """Note one message; returns what it completes."""
        match message:
            case Hello(rank=rank):
                self.hellos[rank] = message
            case RoundBegun(rank=rank, case=name, round=number, num_ranks=num_ranks):
                self._begin(rank, (name, number), num_ranks)
            case RoundRows():
                return self._take_rows(message)
            case CaseRefused(case=name, round=number):
                self._close((name, number))
                return message
            case RankFailed(rank=rank) | RankLost(rank=rank):
                self.faults.setdefault(rank, message)
            case Farewell(rank=rank):
                self.farewells.add(rank)
        return None

    def _begin(self, rank: int, place: Place, num_ranks: int) -> None:
        self.members.setdefault(place, set()).add(rank)
        self._sizes[place] = num_ranks
        self.begun_at.setdefault(place, datetime.now(UTC))
        if place not in self._closed:  # connections are read side by side: a refusal may overtake a begin
            self._in_flight[rank] = place

    def _take_rows(self, message: RoundRows) -> Round | None:
        place = (message.case, message.round)
        self.members.setdefault(place, set()).add(message.rank)
        if self._in_flight.get(message.rank) == place:
            del self._in_flight[message.rank]
        parts = self._parts.setdefault(place, {})
        parts[message.rank] = message
        if len(parts) < message.num_ranks or place in self._closed:
            return None
        self._close(place)
        return Round(message.case, message.round, parts)

    def _close(self, place: Place) -> None:
        self._closed.add(place)
        self._parts.pop(place, None)
        self._in_flight = {rank: where for rank, where in self._in_flight.items() if where != place}

    @property
    def in_a_round(self) -> bool:
        return bool(self._in_flight or self._parts)

    @property
    def everyone_is_there(self) -> bool:
        return len(self.hellos) == self.world_size

    @property
    def everyone_has_ended(self) -> bool:
        return len(self.farewells | self.faults.keys()) == self.world_size

    @property
    def ended_well(self) -> bool:
        """Whether every rank took its leave and none failed."""
        return not self.faults and len(self.farewells) == self.world_size

    @property
    def culprit_is_known(self) -> bool:
        """Whether some rank failed of itself, or none is left that could say more."""
        return any(_is_own(fault) for fault in self.faults.values()) or self.everyone_has_ended

    def blame(self, *, status: Status, otherwise: str) -> Blame:
        """Who ended the job: the rank that failed of itself, else one that followed, else nobody, in given words."""
        faults = list(self.faults.values())
        if not faults:
            return Blame(*self._under_way(), status, otherwise)
        chosen = min([fault for fault in faults if _is_own(fault)] or faults, key=_severity)
        place = self._place(chosen)
        last = f" (last: {chosen.last_operation})" if chosen.last_operation else ""
        if isinstance(chosen, RankLost):
            where = f" on {hello.node}" if (hello := self.hellos.get(chosen.rank)) else ""
            return Blame(*place, "crashed", f"rank {chosen.rank}{where} went away without a word{last}")
        return Blame(*place, chosen.status, f"rank {chosen.rank}: {chosen.reason}{last}")

    def _place(self, fault: RankFailed | RankLost) -> tuple[str | None, int | None]:
        if isinstance(fault, RankFailed) and fault.case is not None:
            return fault.case, fault.round
        return self._in_flight.get(fault.rank) or self._under_way(fault.rank)

    def _under_way(self, rank: int | None = None) -> tuple[str | None, int | None]:
        """The round that some rank is in, or has left while others are still to send its rows.

        Args:
            rank: one that is in no round itself: only rounds in which it may still take part count.
        """
        for place in [*self._in_flight.values(), *self._parts]:
            members = self.members[place]
            if rank is None or rank in members or len(members) < self._sizes.get(place, self.world_size):
                return place
        return None, None


def _is_own(fault: RankFailed | RankLost) -> bool:
    return isinstance(fault, RankLost) or fault.culprit


def _severity(fault: RankFailed | RankLost) -> int:
    """A rank that ran out of memory, or died, is why others time out; ties go to the one that came first."""
    if isinstance(fault, RankLost):
        return 1
    return {"out_of_memory": 0, "crashed": 1, "failed": 1, "timeout": 2}.get(fault.status, 3)
