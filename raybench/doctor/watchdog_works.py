"""What the watchdog's lines tell, as plain data: read by `watchdog`, judged by `watchdog_findings`."""

from __future__ import annotations

from dataclasses import dataclass, field

from raybench.doctor.findings import Result


@dataclass
class Timeout:
    """One work that timed out on one rank; what was not printed is None."""

    rank: int | None
    group_rank: int | None  # the rank inside its process group
    group: str | None
    seq: int | None
    op: str | None
    numel_in: int | None
    numel_out: int | None
    timeout_ms: int | None
    elapsed: str | None
    line: str
    placed: bool = True  # `[rankN]:` stands before it

    def facts(self) -> Result:
        """The part that is printed."""
        return {
            "rank": self.rank,
            "seq": self.seq,
            "op": self.op,
            "numel_in": self.numel_in,
            "numel_out": self.numel_out,
            "timeout_ms": self.timeout_ms,
        }


@dataclass(frozen=True)
class Status:
    """How far one rank of one group had come: the last work it enqueued, and the last that was completed."""

    rank: int | None
    group_rank: int | None
    group: str | None
    enqueued: int
    completed: int
    line: str


@dataclass
class Report:
    """Everything that a text tells."""

    timeouts: list[Timeout] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)
    statuses: list[Status] = field(default_factory=list)
    at_work: dict[tuple[int | None, int | None, int], str] = field(
        default_factory=dict
    )  # (rank, in group, seq) -> group
    first_at_work: str | None = None
    first_signal: str | None = None
