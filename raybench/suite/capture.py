"""What a round that did not end in time leaves beside its row: each rank's own evidence, and the doctor's reading."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from raybench.doctor.hang import read_hang
from raybench.doctor.read import read_watchdog, story
from raybench.doctor.render import render
from raybench.suite.attempt import Attempt
from raybench.worker.messages import RankFailed


@dataclass(frozen=True)
class Capture:
    """Files by name, and who did not come to which operation, where the ranks tell it."""

    files: dict[str, str]
    sentence: str | None


def capture(attempt: Attempt, members: Collection[int]) -> Capture | None:
    """The evidence of a round's ranks: `rank_<r>.json` each, `reading.txt` and `reading.json` over all.

    The first are what `raybench doctor watchdog FILE` reads: the dump of torch's flight recorder, and beside it the
    rank's last operations and stack. None where no rank told anything.
    """
    told = {rank: fault for rank in sorted(members) if isinstance(fault := attempt.faults.get(rank), RankFailed)}
    if not told:
        return None
    files = {f"rank_{rank}.json": _evidence(attempt, fault) for rank, fault in told.items()}
    answers = {rank: read_watchdog(files[f"rank_{rank}.json"]) for rank in told}
    reading = story([("watchdog", f"rank_{rank}.json", answer) for rank, answer in answers.items()])
    files["reading.txt"] = render(reading)
    files["reading.json"] = json.dumps(reading, indent=1)
    return Capture(files, read_hang(answers).sentence)


def _evidence(attempt: Attempt, fault: RankFailed) -> str:
    flight = json.loads(fault.flight) if fault.flight else {}
    hello = attempt.hellos.get(fault.rank)
    body = {
        "rank": fault.rank,
        "node": None if hello is None else hello.node,
        "case": fault.case,
        "round": fault.round,
        "told": fault.reason,
        "last_operations": [{"seconds": seconds, "operation": text} for seconds, text in fault.history],
        "stack": fault.stack,
        **flight,
        "entries": flight.get("entries", []),
    }
    return json.dumps(body, indent=1)
