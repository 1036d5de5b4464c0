"""Reads what PyTorch's watchdog writes when a collective does not come back, and flight-recorder reports."""

from __future__ import annotations

import re

from raybench.doctor.findings import Finding, Result, by_severity
from raybench.doctor.flight import flight_findings, is_flight_dump
from raybench.doctor.watchdog_findings import judge, not_recognised
from raybench.doctor.watchdog_lines import (
    AT_WORK,
    GROUP_RANK,
    RANK,
    SIGNAL,
    STATUS,
    TIMEOUT,
    Squeezed,
    is_relevant,
    may_tell,
    relevant_text,
    squeezed_records,
)
from raybench.doctor.watchdog_reports import report_findings
from raybench.doctor.watchdog_works import Report, Status, Timeout

__all__ = ["is_relevant", "read_watchdog", "relevant_text"]

_LOOK_BACK = 400
_MAX_ITEMS = 20_000


def read_watchdog(text: str) -> Result:
    """Timed-out works, each once per rank, in the order of the text, and what they mean together."""
    if is_flight_dump(text):
        return {"kind": "watchdog", "timeouts": [], **flight_findings(text)}
    report = Report()
    told: dict[str, Finding] = {}
    relevant = False
    for record in squeezed_records(text):
        if may_tell(record):
            _timeouts(report, record)
            _statuses(report, record)
            for item in report_findings(record):
                told.setdefault(item["code"], item)
        relevant = relevant or "ProcessGroup" in record.text or "[c10d]" in record.text
    _name_groups(report)
    findings = [item for item in judge(report) if item["code"] != "ranks-desynchronised" or item["code"] not in told]
    judged = {item["code"] for item in findings}
    findings += [item for item in told.values() if item["code"] not in judged]
    if not findings and not relevant:
        findings = [not_recognised(text)]
    return {
        "kind": "watchdog",
        "timeouts": [timeout.facts() for timeout in report.timeouts],
        "findings": by_severity(findings),
    }


def _timeouts(report: Report, record: Squeezed) -> None:
    for match in TIMEOUT.finditer(record.text):
        if not (match["caught"] or match["elapsed"] or match["blocking"]) or len(report.timeouts) >= _MAX_ITEMS:
            continue
        work = match["work"]
        rank = int(match["rank"]) if match["rank"] else _rank_of_line(record, match)
        timeout = Timeout(
            rank=rank if rank is not None else _int(match["group_rank"]),
            group_rank=_int(match["group_rank"]),
            group=_group_name(match["group"]),
            seq=_number(r"SeqNum=(\d{1,18})", work),
            op=_word(r"OpType=(\w{1,80})", work),
            numel_in=_number(r"NumelIn=(\d{1,18})", work),
            numel_out=_number(r"NumelOut=(\d{1,18})", work),
            timeout_ms=_number(r"Timeout\(ms\)=(\d{1,18})", work),
            elapsed=match["elapsed"],
            line=record.lines_of(match.start(), match.end()),
            placed=bool(match["rank"]),
        )
        if _is_new(report, timeout):
            report.timeouts.append(timeout)


def _rank_of_line(record: Squeezed, match: re.Match[str]) -> int | None:
    """The one `[rankN]` of the line, or at the start of the record."""
    for line in (record.line_at(match.start()), record.lines[0]):
        marks = set(RANK.findall(line))
        if len(marks) == 1:
            return int(marks.pop())
    return None


def _is_new(report: Report, timeout: Timeout) -> bool:
    """Not said before: the blocking wait and the exception that ends the process repeat a work of their rank.

    Such a copy has the same elapsed time, or none; the exception's text comes without `[rankN]:`.
    """
    facts = tuple(timeout.facts().values())
    copy = (timeout.group_rank, timeout.seq, timeout.op, timeout.numel_in, timeout.elapsed)
    known = report.seen
    if timeout.elapsed is None:
        repeated = ("facts", *facts) in known
    else:
        repeated = ("timed", timeout.elapsed, *facts) in known or ("untimed", *facts) in known
        repeated = repeated or (not timeout.placed and ("copy", *copy) in known)
    known.add(("facts", *facts))
    known.add(("untimed", *facts) if timeout.elapsed is None else ("timed", timeout.elapsed, *facts))
    known.add(("copy", *copy))
    return not repeated


def _statuses(report: Report, record: Squeezed) -> None:
    if report.first_signal is None:
        signal = SIGNAL.search(record.text)
        report.first_signal = record.line_at(signal.start()) if signal else None
    for match in AT_WORK.finditer(record.text):
        report.first_at_work = report.first_at_work or record.line_at(match.start())
        rank, group_rank, group = _speaker(record, match.start())
        if group is not None and len(report.at_work) < _MAX_ITEMS:
            report.at_work.setdefault((rank, group_rank, int(match["seq"])), group)
    for match in STATUS.finditer(record.text):
        enqueued, completed = int(match["enqueued"]), int(match["completed"])
        if completed > enqueued:  # digits of the next line have run into it
            completed = int(record.cut_at_line(match.start("completed"), match.end()))
        rank, group_rank, group = _speaker(record, match.start())
        if len(report.statuses) < _MAX_ITEMS:
            report.statuses.append(Status(rank, group_rank, group, enqueued, completed, record.line_at(match.start())))


def _speaker(record: Squeezed, position: int) -> tuple[int | None, int | None, str | None]:
    """(rank, rank in its group, group) of the message at a position."""
    before = record.text[max(0, position - _LOOK_BACK) : position]
    ranks = RANK.findall(before)
    groups = list(GROUP_RANK.finditer(before))
    group_rank = _int(groups[-1]["group_rank"]) if groups else None
    rank = int(ranks[-1]) if ranks else group_rank
    return rank, group_rank, _group_name(groups[-1]["group"]) if groups else None


def _name_groups(report: Report) -> None:
    """`[Rank 1] Watchdog caught` names no group; the `[PG 3 Rank 1] ... at work` after it does."""
    for timeout in report.timeouts:
        if timeout.group is None and timeout.seq is not None:
            timeout.group = report.at_work.get((timeout.rank, timeout.group_rank, timeout.seq))
    named = {(timeout.seq, timeout.op, timeout.group) for timeout in report.timeouts if timeout.group}
    for timeout in report.timeouts:
        groups = {group for seq, op, group in named if (seq, op) == (timeout.seq, timeout.op)}
        if timeout.group is None and len(groups) == 1:
            timeout.group = groups.pop()


def _group_name(printed: str | None) -> str | None:
    """`PG ID 2 PG GUID 7` by its global id (the other counts on each rank for itself), else as printed."""
    if not printed:
        return None
    match = re.search(r"PGGUID(.+)", printed)
    return match.group(1) if match else printed.removeprefix("PG") or None


def _int(digits: str | None) -> int | None:
    return int(digits) if digits else None


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else None


def _word(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None
