"""Messages that tell the whole finding by themselves: desync and flight-recorder reports, the store, stack frames."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raybench.doctor.findings import Finding, finding
from raybench.doctor.watchdog_findings import RECORDER, TIMEOUT_FOLKLORE
from raybench.doctor.watchdog_lines import (
    BEHIND,
    CLOSED,
    CULPRIT,
    DESYNC,
    FINGERPRINT,
    FRAME,
    GLOO,
    MESH,
    MONITORED,
    NOT_JOINED,
    STORE,
    STUCK,
    Squeezed,
)

_SAME_CALLS = (
    "Look for a collective inside a condition that is not the same on every rank (`py-spy dump` on the rank named)."
)


def report_findings(record: Squeezed) -> Iterator[Finding]:
    """The findings that one record carries."""
    for reader in (
        _desync,
        _not_joined,
        _culprit,
        _fingerprints,
        _monitored,
        _gloo,
        _frames,
        _store,
        _stuck,
        _mesh,
        _closed,
    ):
        found = reader(record)
        if found is not None:
            yield found


def _evidence(record: Squeezed, match: re.Match[str]) -> str:
    return record.lines_of(match.start(), match.end())


def _desync(record: Squeezed) -> Finding | None:
    match = DESYNC.search(record.text)
    if match is None:
        return None
    told: list[str] = []
    evidence = _evidence(record, match)
    for behind in BEHIND.finditer(record.text):
        evidence = _evidence(record, behind) if not told else evidence
        ranks = (behind["ranks"] or behind["never"] or "").replace(",", ", ")
        if behind["done"]:
            told.append(f"rank {ranks} finished collective #{behind['done']} and never joined #{behind['next']}")
        elif behind["open"]:
            told.append(f"rank {ranks} joined collective #{behind['open']} and did not finish it")
        else:
            told.append(f"rank {ranks} never joined any collective")
    what = "; ".join(told) or "its report names no rank"
    return finding(
        "ranks-desynchronised",
        f"PyTorch's own desync report: {what}. (It counts from 1; SeqNum of old versions counts from 0.)",
        evidence,
        [_SAME_CALLS],
    )


def _not_joined(record: Squeezed) -> Finding | None:
    match = NOT_JOINED.search(record.text)
    if match is None:
        return None
    ranks = (match["ranks"] or "").replace(",", ", ")
    who = f"rank {ranks} never joined" if ranks else "some rank never joined"
    return finding(
        "ranks-desynchronised",
        f"The flight recorder: {who} collective #{match['seq']}.",
        _evidence(record, match),
        [_SAME_CALLS],
    )


def _culprit(record: Squeezed) -> Finding | None:
    match = CULPRIT.search(record.text)
    if match is None:
        return None
    kind = match["type"].replace("_", " ").lower()
    return finding(
        "size-mismatch" if kind.startswith(("size", "collective dtype")) else "ranks-desynchronised",
        f"The flight recorder names rank {match['rank']}: its collective differs in "
        f"{kind.removeprefix('collective ')}. (It assumes that the rank which it compares with is right.)",
        _evidence(record, match),
        [_SAME_CALLS],
    )


def _fingerprints(record: Squeezed) -> Finding | None:
    match = FINGERPRINT.search(record.text)
    if match is None:
        return None
    kinds = [re.search(r"OpType=(\w+)", match[name]) for name in ("fa", "fb")]
    same = all(kinds) and len({kind.group(1) for kind in kinds if kind}) == 1
    return finding(
        "size-mismatch" if same else "ranks-desynchronised",
        f"Ranks {match['a']} and {match['b']} issue "
        + ("the same operation with different shapes or types." if same else "different operations at the same place."),
        _evidence(record, match),
        [_SAME_CALLS],
    )


def _monitored(record: Squeezed) -> Finding | None:
    match = MONITORED.search(record.text)
    if match is None:
        return None
    ranks = match["ranks"].replace(",", ", ")
    return finding(
        "silent-rank",
        f"Rank {ranks} did not come to a monitored barrier within {int(match['ms']) / 1000:g} s.",
        _evidence(record, match),
        [f"Look at rank {ranks} first: `py-spy dump --pid PID`, or its log."],
    )


def _gloo(record: Squeezed) -> Finding | None:
    match = GLOO.search(record.text)
    if match is None:
        return None
    return finding(
        "collective-timeout",
        f"A gloo operation waited {int(match['ms']) / 1000:g} s to {'receive' if match['way'] == 'recv' else 'send'}: "
        "the rank at the other end never came.",
        _evidence(record, match),
        ["The cause is on the rank that does not report this: look at it first (`py-spy dump`).", TIMEOUT_FOLKLORE],
    )


def _frames(record: Squeezed) -> Finding | None:
    match = FRAME.search(record.text)
    if match is None:
        return None
    return finding(
        "collective-timeout",
        "The watchdog thread ended the process; this is its stack, the message above it (which names the operation, "
        "or another error) is not in this file.",
        _evidence(record, match),
        ["Give the lines before `terminate called after throwing`.", RECORDER],
    )


def _store(record: Squeezed) -> Finding | None:
    match = STORE.search(record.text)
    if match is None:
        return None
    milliseconds = match["ms"] or match["wait"] or (match["s"] and match["s"] + "000")
    after = f" for {int(milliseconds) / 1000:g} s" if milliseconds else ""
    if match["connect"]:
        message = "This process could not reach the TCPStore at all: its host does not run yet, or is not reachable."
        advice = ["Check MASTER_ADDR and MASTER_PORT, the firewall, and that rank 0 has started."]
    else:
        message = (
            f"This process waited{after} for an answer of the TCPStore, not in a collective: another rank is still "
            "busy before it, preparing data or loading a model."
        )
        advice = [
            "See what the slowest rank does before init_process_group or the next barrier; let one rank prepare, the "
            "others wait with a longer timeout.",
            TIMEOUT_FOLKLORE,
        ]
    return finding("store-timeout", message, _evidence(record, match), advice)


def _stuck(record: Squeezed) -> Finding | None:
    match = STUCK.search(record.text)
    if match is None:
        return None
    after = f" for {int(match['s'])} s" if match["s"] else ""
    return finding(
        "collective-timeout",
        f"The watchdog itself made no progress{after}: a call of CUDA's or NCCL's hangs in this process, or a thread "
        "keeps Python's lock inside one. It could not time out any collective.",
        _evidence(record, match),
        [
            "`py-spy dump --native --pid PID` shows the call: loading a kernel, freeing memory, ending a communicator.",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is how long it waits; TORCH_NCCL_ENABLE_MONITORING=0 only hides it.",
        ],
    )


def _mesh(record: Squeezed) -> Finding | None:
    match = MESH.search(record.text)
    if match is None:
        return None
    return finding(
        "wrong-interface",
        "gloo could not connect every rank with every other: it listens on the address that the host's own name has, "
        "often 127.0.0.1 or 127.0.1.1, which leads to no other host.",
        _evidence(record, match),
        [
            "GLOO_SOCKET_IFNAME=<the interface that routes between the hosts> (`ip route get ADDRESS` names it), on "
            "every host, before init_process_group.",
        ],
    )


def _closed(record: Squeezed) -> Finding | None:
    match = CLOSED.search(record.text)
    if match is None:
        return None
    return finding(
        "peer-closed",
        "The process at the other end ended, or closed its connection: this rank only follows.",
        _evidence(record, match),
        ["Look for the first error of another rank, and on its host for `Out of memory: Killed process` in dmesg."],
    )
