"""What several ranks had under way when they hung, read together: who has not come, to which operation.

Every rank tells what it waits for, and how many operations it has begun among which ranks. A rank that waits has an
edge to each rank that has not come to the operation. Ranks that others wait for, and that wait for nobody, are where
the hang began; where there is none, the ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.doctor.findings import Finding, Result, finding
from raybench.doctor.flight import CALLED, WAITED_FOR
from raybench.doctor.marks import WAIT
from raybench.doctor.watchdog_findings import some

_LOOK = "Look for a collective inside a condition that is not the same on every rank; `stack` of the rank tells where."
_ORDER = (
    "One of two neighbours has to receive first, or both send without blocking (`isend`) before they receive: "
    "`batch_isend_irecv` does."
)


@dataclass(frozen=True)
class Hang:
    """What was found."""

    sentence: str | None
    """Who did not come to what, in one line; None where no rank tells that it waits."""
    missing: tuple[int, ...]
    """Ranks that the others wait for, and that wait for nobody."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Wait:
    """What one rank waits for."""

    rank: int
    group: str
    number: int | None
    operation: str
    state: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    """Those that have not come."""

    def __str__(self) -> str:
        number = "" if self.number is None else f" #{self.number}"
        if self.state == CALLED:
            return self.operation
        if self.state == WAITED_FOR:
            return f"{self.operation} over {self.group}{number}"
        ends = f" {self.ranks[0]}→{self.ranks[1]}" if self.number is None and len(self.ranks) == 2 else ""
        return f"{self.operation}{number}{ends} of process group {self.group}"


def read_hang(dumps: Mapping[int, Result]) -> Hang:
    """What the answers of `flight.flight_findings` say together, by rank."""
    waits = {rank: _waits(rank, dumps) for rank in sorted(dumps)}
    waits = {rank: found for rank, found in waits.items() if found}
    told = [finding("collective-timeout", f"Hung: {_all_waits(waits)}", None, [])] if waits else []
    apart = _out_of_step(dumps)
    if apart is not None:
        rank, did = apart
        sentence = f"{did}; {_whereabouts(rank, dumps)}"
        return Hang(
            sentence, (rank,), (*told, finding("ranks-desynchronised", f"{_capital(sentence)}.", None, [_LOOK]))
        )
    if not waits:
        return Hang(None, (), ())
    if all(wait.state == CALLED for found in waits.values() for wait in found):
        return _known_by_stacks(waits, dumps, told)
    missed = {rank for found in waits.values() for wait in found for rank in wait.missing}
    roots = sorted(rank for rank in missed if not any(wait.missing for wait in waits.get(rank, ())))
    if roots:
        sentence = _not_there(roots, waits, dumps)
        advice = [f"Look at rank {some([str(rank) for rank in roots])} first: its `stack`, `py-spy dump`, its log."]
        return Hang(sentence, tuple(roots), (*told, finding("silent-rank", f"{_capital(sentence)}.", None, advice)))
    if missed:
        return _circle(sorted(missed), waits, told)
    sentence = f"no rank is missing, so it is the network, or only slow: {_all_waits(waits).rstrip('.')}"
    return Hang(sentence, (), (*told, *_first(waits)))


def _waits(rank: int, dumps: Mapping[int, Result]) -> list[_Wait]:
    """Of each group the oldest operation that the rank waits for; what its mark tells comes first."""
    oldest: dict[str, Result] = {}
    for entry in dumps[rank]["pending"]:
        oldest.setdefault(entry["group"] if entry["seq"] is not None else f"{entry['group']} {entry['ranks']}", entry)
    ordered = sorted(oldest.values(), key=lambda entry: entry["state"] != WAITED_FOR)
    return [
        _Wait(
            rank,
            entry["group"],
            entry["seq"],
            entry["op"],
            entry["state"],
            tuple(entry["ranks"] or ()),
            tuple(_missing(rank, entry, dumps)),
        )
        for entry in ordered
    ]


def _missing(rank: int, entry: Result, dumps: Mapping[int, Result]) -> Iterator[int]:
    """Ranks of the operation that have not come to it."""
    group, number = entry["group"], entry["seq"]
    for other in entry["ranks"] or [other for other, dump in sorted(dumps.items()) if group in dump["reached"]]:
        if other == rank:
            continue
        if other not in dumps:
            yield other
        elif number is None:
            if not any(_is_other_end(entry, theirs) for theirs in dumps[other]["pending"]):
                yield other
        elif dumps[other]["reached"].get(group, 0) < number:
            yield other


def _is_other_end(one: Result, other: Result) -> bool:
    return bool(
        (one["group"], one["ranks"]) == (other["group"], other["ranks"])
        and {one["op"], other["op"]} == {"send", "receive"}
    )


def _out_of_step(dumps: Mapping[int, Result]) -> tuple[int, str] | None:
    """The first place at which two ranks of a group began different operations: the rank apart from most, and words."""
    for group in sorted({group for dump in dumps.values() for group in dump["begun"]}):
        begun = {rank: dump["begun"][group] for rank, dump in dumps.items() if group in dump["begun"]}
        for number in sorted({int(number) for names in begun.values() for number in names}):
            if len({names[str(number)] for names in begun.values() if str(number) in names}) > 1:
                return _apart(group, number, begun)
    return None


def _apart(group: str, number: int, begun: Mapping[int, Mapping[str, str]]) -> tuple[int, str]:
    names = {rank: found[str(number)] for rank, found in sorted(begun.items()) if str(number) in found}
    counts = Counter(names.values())
    usual = [name for name, count in counts.items() if count == max(counts.values())]
    for name in usual:
        like = next(rank for rank in names if names[rank] == name)
        for odd in names:
            if names[odd] != name and names[odd] == begun[like].get(str(number + 1)):
                return odd, f"rank {odd} left out {name}, #{number} over {group}, which {_those(names, name)} began"
    name = usual[0]
    odd = next(rank for rank in names if names[rank] != name)
    began = f"rank {odd} began {names[odd]} as #{number} over {group}"
    if begun[odd].get(str(number + 1)) == name:
        return odd, f"{began}, which {_those(names, name)} did not"
    return odd, f"{began}, where {_those(names, name)} began {name}"


def _those(names: Mapping[int, str], name: str) -> str:
    return f"rank {some([str(rank) for rank in names if names[rank] == name])}"


def _not_there(roots: Sequence[int], waits: Mapping[int, list[_Wait]], dumps: Mapping[int, Result]) -> str:
    root = roots[0]
    wait = next(wait for found in waits.values() for wait in found if root in wait.missing)
    waiting = [str(rank) for rank, found in waits.items() if any(_is_same(wait, other) for other in found)]
    absent = [str(rank) for rank in roots if rank in wait.missing]
    came = f"rank {some(absent)} {'has' if len(absent) == 1 else 'have'} not come to {wait}"
    waits_there = f", in which rank {some(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return f"{came}{waits_there}; {_whereabouts(root, dumps, wait.group)}"


def _is_same(one: _Wait, other: _Wait) -> bool:
    return (one.group, one.number, one.ranks) == (other.group, other.number, other.ranks)


def _whereabouts(rank: int, dumps: Mapping[int, Result], group: str = "") -> str:
    """Where a rank was: by its own words, else by the last operation of the group that it began."""
    dump: Mapping[str, Any] = dumps.get(rank, {})
    last, place = dump.get("last_operation"), dump.get("at")
    begun = list(dump.get("begun", {}).get(group, {}).items())
    where = f" ({place})" if place else ""
    if last and place and dump.get("is_past"):
        return f"rank {rank} was at {place}, after '{last.removeprefix(WAIT)}'"
    if last:
        return f"rank {rank} was at '{last}'{where}"
    if place:
        return f"rank {rank} was at {place}"
    return f"its last there is {begun[-1][1]} #{begun[-1][0]}" if begun else f"rank {rank} does not tell where it was"


def _circle(ranks: Sequence[int], waits: Mapping[int, list[_Wait]], told: Sequence[Finding]) -> Hang:
    """Ranks that wait for each other."""
    stuck = [next((wait for wait in waits[rank] if wait.missing), waits[rank][0]) for rank in ranks]
    shown = "; ".join(f"rank {wait.rank} in {wait}" for wait in stuck[:8])
    kinds = {wait.operation.split(" ")[0] for wait in stuck}
    why = {"send": ", and none receives", "receive": ", and none sends"}.get(kinds.pop() if len(kinds) == 1 else "", "")
    names = " and ".join(map(str, ranks)) if len(ranks) < 9 else some([str(rank) for rank in ranks])
    sentence = f"ranks {names} wait for each other{why}: {shown}"
    found = finding("ranks-desynchronised", f"{_capital(sentence)}.", None, [_ORDER if why else _LOOK])
    return Hang(sentence, (), (*told, found))


def _known_by_stacks(waits: Mapping[int, list[_Wait]], dumps: Mapping[int, Result], told: Sequence[Finding]) -> Hang:
    """Where only stacks tell what ranks are in, and not with whom."""
    free = sorted(set(dumps) - set(waits))
    if free:
        others = _all_waits(waits).rstrip(".")
        sentence = f"rank {some([str(rank) for rank in free])} is in no operation, while {others} waits"
        sentence += f"; {_whereabouts(free[0], dumps)}"
        found = finding(
            "silent-rank", f"{_capital(sentence)}.", None, [f"Look at rank {free[0]} first: its `stack`, its log."]
        )
        return Hang(sentence, tuple(free), (*told, found))
    if {wait.operation for found in waits.values() for wait in found} in ({"send"}, {"receive"}):
        return _circle(sorted(waits), waits, told)
    return Hang(f"every rank waits: {_all_waits(waits).rstrip('.')}", (), tuple(told))


def _all_waits(waits: Mapping[int, list[_Wait]]) -> str:
    """Who waits where, by what each rank waits for first."""
    places: dict[str, list[str]] = {}
    for rank, found in waits.items():
        places.setdefault(str(found[0]), []).append(str(rank))
    shown = [f"rank {some(ranks)} in {place}" for place, ranks in list(places.items())[:6]]
    return f"{'; '.join(shown)}{' and others' if len(places) > 6 else ''}."


def _first(waits: Mapping[int, list[_Wait]]) -> list[Finding]:
    if any(wait.number != 1 for found in waits.values() for wait in found):
        return []
    advice = [
        "Run again with NCCL_DEBUG=INFO and read that log (`raybench doctor nccl FILE`); between hosts look at "
        "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and the firewall."
    ]
    message = "The very first collective never came back: the transport or the interface, not the program."
    return [finding("stuck-first-collective", message, None, advice)]


def _capital(sentence: str) -> str:
    return f"{sentence[:1].upper()}{sentence[1:]}"
