"""What timed-out works of several ranks mean together: who is missing, who is at another place, who waits where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from raybench.doctor.findings import Finding, finding
from raybench.doctor.watchdog_works import Report, Status, Timeout

_PAIRWISE: Final = ("SEND", "RECV")
_BARRIER_SEQ = 20
_MANY = 100_000
TIMEOUT_FOLKLORE: Final = (
    "A longer time-out is `init_process_group(timeout=timedelta(...))`; NCCL_TIMEOUT is no variable of NCCL's. It "
    "helps only where a rank is slow, not where it never comes."
)
RECORDER: Final = (
    "For the next run TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9) and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1 record the last collectives of every rank."
)
_OLD_RECORDER: Final = (
    "For the next run NCCL_DESYNC_DEBUG=1 with NCCL_ASYNC_ERROR_HANDLING=1 reports where every rank was (since torch "
    "2.2 these names begin with TORCH_, and there is a flight recorder: TORCH_NCCL_TRACE_BUFFER_SIZE=2000)."
)


def judge(report: Report) -> list[Finding]:
    """All findings that follow from the works and the states of the ranks."""
    found: list[Finding] = []
    if report.timeouts:
        found.append(_timeout(report.timeouts))
        if all(timeout.seq in (0, 1) for timeout in report.timeouts):
            found.append(_first_collective(report.timeouts))
        for group in groups_of(report.timeouts):
            found += _group_findings(group, report.statuses)
    elif report.first_at_work or report.first_signal:
        found.append(
            finding(
                "collective-timeout",
                "The watchdog ended a collective; the line that names the operation is not in this file.",
                report.first_at_work or report.first_signal,
                ["Look for `Watchdog caught collective operation timeout` in the logs of all ranks.", RECORDER],
            )
        )
    return found + _idle_group(report)


def groups_of(timeouts: Sequence[Timeout]) -> list[list[Timeout]]:
    """The works by process group, as far as that can be told.

    `[Rank N]` counts inside a group: two ranks with one N, or one rank with several works, are several groups.
    """
    named: dict[str, list[Timeout]] = defaultdict(list)
    rest: list[Timeout] = []
    for timeout in timeouts:
        if timeout.group is None:
            rest.append(timeout)
        else:
            named[timeout.group].append(timeout)
    if rest and len(named) == 1 and _is_one_group([*next(iter(named.values())), *rest]):
        return [list(timeouts)]
    return [group for group in (*named.values(), rest) if group and _is_one_group(group)]


def _is_one_group(group: Sequence[Timeout]) -> bool:
    ranks = [timeout.rank for timeout in group]
    inside = [timeout.group_rank for timeout in group if timeout.group_rank is not None]
    return None not in ranks and len(set(ranks)) == len(ranks) and len(set(inside)) == len(inside)


def _timeout(timeouts: Sequence[Timeout]) -> Finding:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for timeout in timeouts:
        seq = "" if timeout.seq is None else f" #{timeout.seq}"
        places[timeout.op or "a collective", seq].append("?" if timeout.rank is None else str(timeout.rank))
    parts = [f"{op}{seq} on rank {some(ranks)}" for (op, seq), ranks in list(places.items())[:6]]
    limit = next((timeout.timeout_ms for timeout in timeouts if timeout.timeout_ms), None)
    after = f" after {limit / 1000:g} s" if limit else ""
    return finding(
        "collective-timeout",
        f"Timed out{after}: {'; '.join(parts)}. The ranks named here waited; the cause is usually on a rank that is "
        "not.",
        timeouts[0].line,
        [
            "Read the findings below first: they say which rank to look at.",
            TIMEOUT_FOLKLORE,
            RECORDER if any(timeout.placed for timeout in timeouts) else _OLD_RECORDER,
        ],
    )


def _first_collective(timeouts: Sequence[Timeout]) -> Finding:
    return finding(
        "stuck-first-collective",
        "The very first collective never came back, on every rank that reports: the transport or the interface, not "
        "the program.",
        timeouts[0].line,
        [
            "Run again with NCCL_DEBUG=INFO and read that log (`raybench doctor nccl FILE`).",
            "On one host test NCCL_P2P_DISABLE=1 (it moves traffic to shared memory); between hosts "
            "NCCL_SOCKET_IFNAME and the firewall.",
        ],
    )


def _group_findings(group: Sequence[Timeout], statuses: Sequence[Status]) -> list[Finding]:
    found: list[Finding] = []
    places = {_place(timeout) for timeout in group}
    if len(places) > 1:
        return [_desynchronised(group)]
    sizes = {timeout.numel_in for timeout in group if timeout.numel_in is not None}
    if len(sizes) > 1 and group[0].op not in _PAIRWISE:
        found.append(_sizes(group))
    if group[0].op not in _PAIRWISE:
        found += _silent(group, statuses)
    return found


def _place(timeout: Timeout) -> tuple[int | None, str | None]:
    """Where a rank waits; a send and a receive are two ends of one place."""
    return (None, "send/receive") if timeout.op in _PAIRWISE else (timeout.seq, timeout.op)


def _desynchronised(group: Sequence[Timeout]) -> Finding:
    by_place: dict[tuple[int | None, str | None], list[str]] = defaultdict(list)
    for timeout in group:
        by_place[timeout.seq, timeout.op].append(str(timeout.rank))
    shown = "; ".join(
        f"rank {some(ranks)} in {op or 'a collective'}{'' if seq is None else f' #{seq}'}"
        for (seq, op), ranks in sorted(by_place.items(), key=lambda item: item[0][0] or 0)
    )
    numbered = [timeout for timeout in group if timeout.seq is not None]
    lowest = min(numbered, key=lambda timeout: timeout.seq or 0, default=group[0])
    behind = [str(timeout.rank) for timeout in numbered if timeout.seq == lowest.seq]
    who = (
        f"Rank {some(behind)} is behind: it missed or added a collective."
        if len({timeout.seq for timeout in numbered}) > 1
        else "The ranks issue different operations at the same place."
    )
    return finding(
        "ranks-desynchronised",
        f"The ranks of one group wait at different places: {shown}. {who}",
        lowest.line,
        [
            "Look for a collective inside a condition that is not the same on every rank, on rank "
            f"{some(behind) or '?'} first (`py-spy dump` there shows where it is).",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL stops at the first collective that differs.",
        ],
    )


def _sizes(group: Sequence[Timeout]) -> Finding:
    shown = ", ".join(f"rank {timeout.rank}: {timeout.numel_in}" for timeout in group[:8])
    uneven = (
        " (An all-to-all may be uneven: then each pair's counts must agree.)"
        if "ALLTOALL" in (group[0].op or "")
        else ""
    )
    return finding(
        "size-mismatch",
        f"The ranks issue {group[0].op} #{group[0].seq} with different sizes: {shown} elements.{uneven}",
        group[0].line,
        [
            "The data differs between the ranks: a last batch that is smaller, padding to each rank's own longest "
            "sequence, another branch of the model.",
            "All ranks of a tensor- or expert-parallel group need the same batch.",
        ],
    )


def _silent(group: Sequence[Timeout], statuses: Sequence[Status]) -> list[Finding]:
    names = missing_ranks(group)
    late = _late(group, statuses)
    if not names and not late:
        return []
    names = names or [str(status.rank) for status in late]
    seq, op = group[0].seq, group[0].op
    message = (
        f"Every rank that reports waits in {op or 'a collective'}{'' if seq is None else f' #{seq}'}; rank "
        f"{some(names)} does not report. It has not come to it: it prepares data, saves, generates, or has died. (If "
        "this file holds the output of some ranks only, look in the others' first.)"
    )
    if late:
        message += f" Rank {late[0].rank} had only enqueued #{late[0].enqueued}."
    advice = [f"Look at rank {some(names)} first: `py-spy dump --pid PID`, or its log."]
    if group[0].numel_in == 1 and (seq or 0) <= _BARRIER_SEQ:
        advice.append(
            "One element this early is a barrier: prepare data before init_process_group (or on a gloo group), or "
            "give that group a longer timeout."
        )
    return [finding("silent-rank", message, late[0].line if late else group[0].line, advice)]


def missing_ranks(group: Sequence[Timeout]) -> list[str]:
    """Ranks of a group below the highest that reports, which do not report themselves."""
    inside = [timeout.group_rank for timeout in group]
    ranks = {
        rank for rank in (inside if None not in inside else [timeout.rank for timeout in group]) if rank is not None
    }
    top = max(ranks, default=0)
    return [] if top > _MANY else [_name(rank, group) for rank in range(top) if rank not in ranks]


def _late(group: Sequence[Timeout], statuses: Sequence[Status]) -> list[Status]:
    """Ranks of this very group that had not enqueued the work on which the others wait."""
    reporting = {timeout.rank for timeout in group}
    seq = group[0].seq
    if seq is None or group[0].group is None:
        return []
    return [
        status
        for status in statuses
        if status.group == group[0].group and status.rank not in reporting and status.enqueued < seq
    ]


def _name(inside: int, group: Sequence[Timeout]) -> str:
    """A group's rank by its global name, where the others show how the two go together."""
    known = sorted(
        {
            (timeout.group_rank, timeout.rank)
            for timeout in group
            if timeout.group_rank is not None and timeout.rank is not None
        }
    )
    if all(one == other for one, other in known):
        return str(inside)
    if len(known) > 1:
        (low, first), (high, last) = known[0], known[-1]
        step, odd = divmod(last - first, high - low)
        if not odd and all(rank == first + step * (place - low) for place, rank in known):
            return str(first + step * (inside - low))
    return f"{inside} of the group"


def _idle_group(report: Report) -> list[Finding]:
    idle = [status for status in report.statuses if status.enqueued == status.completed]
    if not idle:
        return []
    names = sorted({str(status.group) for status in idle if status.group is not None})
    group = f" {names[0]}" if len(names) == 1 else ""
    stuck = sorted({timeout.group for timeout in report.timeouts if timeout.group} - set(names))
    where = f" (group {', '.join(stuck)})" if stuck else ""
    return [
        finding(
            "other-group-stuck",
            f"Process group{group} had nothing under way on rank {some([str(status.rank) for status in idle])}: last "
            f"enqueued equals last completed (#{idle[0].enqueued}). The hang is in another group{where}, or these "
            "ranks never came to the collective.",
            idle[0].line,
            ["Find the group whose `last enqueued` is ahead of `last completed`, and the rank of it that is silent."],
        )
    ]


def not_recognised(text: str) -> Finding:
    """Nothing of PyTorch's in the text."""
    advice = ["Give the standard error of all ranks: the lines with `ProcessGroupNCCL` and `Watchdog caught`."]
    if text[:2] in ("\ufffd\x04", "\ufffd\x02", "\ufffd\x05") or "torch_recorder" in text[:200]:
        advice = [
            "This looks like a pickled flight-recorder dump: `torchfrtrace DIR` prints it as text, which can be read "
            "here."
        ]
    return finding(
        "not-recognised",
        "There is no message of PyTorch's watchdog or flight recorder in this file.",
        next((line for line in text.splitlines() if line.strip()), None),
        advice,
    )


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
