"""What one rank had under way when it was asked: torch's flight recorder as JSON, and raybench's own capture of a hang.

A capture (`results/hangs/…/rank_<r>.json`) is the recorder's dump with more beside it: `rank`, `last_operations` as
the rank marked them, its `stack`. gloo's recorder leaves every entry `scheduled` for ever: whether it ended is in
`retired`, and sends and receives are not in it at all; the marks have both.
"""

from __future__ import annotations

import json
import re
from typing import Any

from raybench.doctor.findings import Finding, Result, finding
from raybench.doctor.marks import Mark, read_mark

WAITED_FOR, CALLED = "waited for", "called"
"""States of a pending operation that is known from the rank's mark, or only from its stack."""
_SAME_SIZES = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
"""Operations to which all ranks bring as much."""
_MOST_BEGUN = 32
_OPEN = ("scheduled", "started")
_PEERS = re.compile(r"^(send|recv) (\d+)(->|<-)(\d+)$")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(
    r"(?:site-packages|dist-packages|lib/python3\.\d+)/|raybench/worker/(?:communication|channel|exchange)\.py"
)

_COMMUNICATES = re.compile(r"torch/distributed/|raybench/worker/(?:communication|channel|exchange)\.py")


def is_flight_dump(text: str) -> bool:
    """A JSON object with the recorder's entries; pickled dumps are not read (unpickling runs code)."""
    return text.lstrip()[:1] == "{" and '"entries"' in text and _parsed(text) is not None


def flight_findings(text: str) -> Result:
    """What the rank was in, and what that means by itself.

    Of the answer, `pending` are operations that were begun and had not ended, the oldest first; `reached` says how
    many operations were begun in each group, and `begun` the last of them by number; `at` is where in the code the rank
    was, and `is_past` whether it got there after `last_operation` had ended.
    """
    dump = _parsed(text) or {}
    groups = _groups(dump)
    pending = [_entry(entry, groups) for entry in dump["entries"] if isinstance(entry, dict) and _is_open(entry)]
    reached = _reached(dump)
    marked = [mark for text in _texts(dump) if (mark := read_mark(text))]
    begun = _begun(dump)
    for mark in marked:
        begun.setdefault(mark.place, {})[str(mark.number)] = mark.label if mark.is_transfer else mark.name
        reached[mark.place] = max(mark.number, reached.get(mark.place, 0))
    stack = _training_frames(str(dump.get("stack") or ""))
    last = _last_wait(dump)
    is_over = last is not None and _is_over(last, dump, stack)
    if last is not None and not is_over:
        pending.append(_marked(last))
    if not pending and (call := _call(stack)) is not None:
        pending.append(_operation("?", None, call, CALLED))
    found: list[Finding] = []
    if pending:
        found.append(_waiting(dump, pending))
    found += _idle(dump.get("pg_status"), {entry["group"] for entry in pending if entry["state"] != WAITED_FOR})
    rank = dump.get("rank")
    return {
        "rank": rank if isinstance(rank, int) else None,
        "last_operation": next(iter(_texts(dump)[-1:]), None),
        "is_past": is_over,
        "at": _place_in_code(stack),
        "pending": pending,
        "reached": reached,
        "begun": begun,
        "findings": found,
    }


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        dump = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None


def _is_open(entry: dict[str, Any]) -> bool:
    return entry.get("state") in _OPEN and not entry.get("retired")


def _entry(entry: dict[str, Any], groups: dict[str, list[int]]) -> Result:
    group = _group(entry)
    name = re.sub(r"^\w+:", "", str(entry.get("profiling_name", "?")))
    ranks = groups.get(group)
    if peers := _PEERS.match(name):
        kind, own, arrow, other = peers.groups()
        ends = [int(own), int(other)] if arrow == "->" else [int(other), int(own)]
        ranks = [ranks[end] for end in ends] if ranks and max(ends) < len(ranks) else ends
        name = "send" if kind == "send" else "receive"
    is_transfer = bool(peers) or bool(entry.get("is_p2p"))
    return {
        "group": group,
        "seq": None if is_transfer else _whole(entry.get("collective_seq_id", entry.get("seq_id"))),
        "op": name,
        "state": str(entry.get("state")),
        "input_sizes": entry.get("input_sizes"),
        "ranks": ranks,
    }


def _group(entry: dict[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, list) and group else str(entry.get("pg_id", "?"))


def _marked(mark: Mark) -> Result:
    return _operation(mark.place, mark.number, mark.name, WAITED_FOR, list(mark.ranks))


def _operation(group: str, number: int | None, name: str, state: str, ranks: list[int] | None = None) -> Result:
    return {"group": group, "seq": number, "op": name, "state": state, "input_sizes": None, "ranks": ranks}


def _groups(dump: dict[str, Any]) -> dict[str, list[int]]:
    """The ranks of every process group that tells them."""
    configs = dump.get("pg_config")
    found: dict[str, list[int]] = {}
    for name, config in (configs if isinstance(configs, dict) else {}).items():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        numbers = [int(digits) for digits in re.findall(r"\d{1,9}", str(ranks))]
        if numbers:
            found[str(name)] = numbers
    return found


def _reached(dump: dict[str, Any]) -> dict[str, int]:
    """The last collective that was begun in each process group."""
    found: dict[str, int] = {}
    for entry in dump["entries"]:
        number = _whole(entry.get("collective_seq_id")) if isinstance(entry, dict) and not entry.get("is_p2p") else None
        if number is not None:
            found[_group(entry)] = max(number, found.get(_group(entry), 0))
    statuses = dump.get("pg_status")
    for group, status in (statuses if isinstance(statuses, dict) else {}).items():
        number = _whole(status.get("last_enqueued_collective")) if isinstance(status, dict) else None
        if number is not None and number >= 0:
            found[str(group)] = max(number, found.get(str(group), 0))
    return found


def _begun(dump: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The last collectives that were begun in each process group: names by number."""
    found: dict[str, dict[str, str]] = {}
    for entry in dump["entries"]:
        if isinstance(entry, dict) and (number := _entry(entry, {})["seq"]) is not None:
            told = _entry(entry, {})
            sizes = f" {told['input_sizes']}" if told["op"] in _SAME_SIZES and told["input_sizes"] else ""
            found.setdefault(_group(entry), {})[str(number)] = f"{told['op']}{sizes}"
    return {group: dict(list(names.items())[-_MOST_BEGUN:]) for group, names in found.items()}


def _texts(dump: dict[str, Any]) -> list[str]:
    operations = dump.get("last_operations")
    return [
        str(operation["operation"])
        for operation in (operations if isinstance(operations, list) else [])
        if isinstance(operation, dict) and "operation" in operation
    ]


def _last_wait(dump: dict[str, Any]) -> Mark | None:
    """The operation that the rank was in by its last mark; one that only began something else goes on computing."""
    texts = _texts(dump)
    mark = read_mark(texts[-1]) if texts else None
    return mark if mark and (mark.is_wait or mark.kind in ("barrier", "gather")) else None


def _is_over(mark: Mark, dump: dict[str, Any], stack: list[tuple[str, str, str]]) -> bool:
    """Whether the wait for a collective has ended: the recorder has none left, and the stack is elsewhere.

    No mark is made where a wait ends, so it stays the last one while the rank computes.
    """
    statuses = dump.get("pg_status")
    if mark.is_transfer or not stack or not isinstance(statuses, dict) or not statuses:
        return False
    completed = all(
        isinstance(status, dict)
        and status.get("last_enqueued_collective") is not None
        and status["last_enqueued_collective"] == status.get("last_completed_collective")
        for status in statuses.values()
    )
    return completed and not any(_COMMUNICATES.search(path) for path, _, _ in stack)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _training_frames(stack: str) -> list[tuple[str, str, str]]:
    """Path, line and function of the training thread's frames, the innermost first."""
    own = re.split(r"\n\n(?=Thread |Current thread )", stack)[0]
    frames = [(frame[1], frame[2], frame[3]) for frame in _FRAME.finditer(own)]
    return frames[::-1] if "Traceback (most recent call last)" in own else frames


def _place_in_code(frames: list[tuple[str, str, str]]) -> str | None:
    """The innermost frame that is no library's: `suite/train.py:77 in step`."""
    for path, line, function in [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames:
        return f"{'/'.join(path.split('/')[-2:])}:{line} in {function}"
    return None


def _call(frames: list[tuple[str, str, str]]) -> str | None:
    """The function of torch.distributed that the rank is in."""
    for path, _, function in frames:
        if path.endswith("torch/distributed/distributed_c10d.py"):
            return {"recv": "receive"}.get(function, function)
        if not _LIBRARY.search(path):
            return None
    return None


def _waiting(dump: dict[str, Any], pending: list[Result]) -> Finding:
    first = pending[0]
    number = "" if first["seq"] is None else f" #{first['seq']}"
    return finding(
        "collective-timeout",
        f"When this was recorded, {first['op']}{number} of group {first['group']} was still {first['state']}, with "
        f"{len(pending)} in all.",
        json.dumps(first),
        ["Give the dumps of all ranks (`watchdog FILE` for each): together they name the rank that did not join."],
    )


def _idle(statuses: Any, busy: set[str]) -> list[Finding]:
    if not isinstance(statuses, dict):
        return []
    idle = [
        str(group)
        for group, status in statuses.items()
        if isinstance(status, dict)
        and status.get("last_enqueued_collective") is not None
        and status.get("last_enqueued_collective") == status.get("last_completed_collective")
        and str(group) not in busy
    ]
    if not idle or not busy:
        return []
    return [
        finding(
            "other-group-stuck",
            f"Group {', '.join(idle)} had nothing under way; the hang is in group {', '.join(sorted(busy))}.",
            None,
            [],
        )
    ]
