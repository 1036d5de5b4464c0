"""Several files read together: the topology, the logs and the watchdog of one run as one story."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from raybench.doctor.findings import SEVERITY, Finding, Result, finding
from raybench.doctor.hang import Hang, read_hang
from raybench.doctor.nccl_advice import parse_version, text_of
from raybench.doctor.watchdog_findings import groups_of, judge, missing_ranks
from raybench.doctor.watchdog_works import Report, Timeout

_RANKING: Final = ("error", "warning", "info")
Read = tuple[str, Path | str, Result]

# What follows from all ranks together, so is judged anew over all files.
_ACROSS: Final = (
    "collective-timeout",
    "stuck-first-collective",
    "silent-rank",
    "ranks-desynchronised",
    "size-mismatch",
)
# Errors of a log that explain a hang by themselves, nearest to the cause first.
_CAUSES: Final = (
    *(
        "mixed-versions",
        "duplicate-gpu",
        "interface-not-found",
        "net-plugin-failed",
        "memlock-too-low",
        "shm-too-small",
    ),
    *(
        "peer-access-unsupported",
        "nvls-fabric-manager",
        "ib-local-protection",
        "roce-gid-or-route",
        "ib-retry-exceeded",
    ),
    *("size-mismatch", "ranks-desynchronised", "peer-unreachable", "connection-timeout", "connection-refused"),
)


def story(results: Sequence[Read]) -> Result:
    """One verdict over several answers, the findings of all of them, and the ranks that are silent."""
    hosts = [host for kind, _, result in results if kind == "topo" for host in result.get("hosts", [result])]
    logs = [result for kind, _, result in results if kind == "nccl"]
    watchdogs = [result for kind, _, result in results if kind == "watchdog"]
    timeouts = [_timeout(item) for result in watchdogs for item in result["timeouts"]]
    findings = [
        item
        for item in _all(results)
        if len(watchdogs) < 2 or item["code"] not in _ACROSS or item["kind"] != "watchdog"
    ]
    hang = read_hang(_dumps(results))
    if hang.sentence:
        findings = [item for item in findings if item["code"] != "other-group-stuck"]
        findings += [_tagged(item, "watchdog", None) for item in hang.findings]
    if len(watchdogs) > 1:
        findings += [_tagged(item, "watchdog", None) for item in judge(Report(timeouts=timeouts))]
        findings += _not_judged_anew(results, {item["code"] for item in findings})
    findings += [_tagged(item, "nccl", None) for item in _different_versions(logs)]
    if hosts and all(host["nvlink_full_mesh"] for host in hosts):
        findings = [item for item in findings if item["code"] != "p2p-hang-risk"]  # the peer-to-peer is NVLink
    silent = [rank for group in groups_of(timeouts) for rank in missing_ranks(group)] if timeouts else []
    silent += [rank for rank in map(str, hang.missing) if rank not in silent]
    return {
        "kind": "story",
        "verdict": _verdict(findings, hosts, logs, silent, hang),
        "silent_ranks": silent,
        "files": [{"kind": kind, "path": str(path)} for kind, path, _ in results],
        "findings": _merged(findings),
    }


def _dumps(results: Sequence[Read]) -> dict[int, Result]:
    """The ranks' flight records; a rank that is not told is the last number in the file's name."""
    found: dict[int, Result] = {}
    for _, path, result in results:
        if "reached" in result:
            digits = re.findall(r"\d{1,6}", Path(path).name)
            rank = result["rank"] if result["rank"] is not None else int(digits[-1]) if digits else len(found)
            found.setdefault(rank, result)
    return found if len(found) > 1 else {}


def _all(results: Sequence[Read]) -> Iterator[dict[str, Any]]:
    for kind, path, result in results:
        for part in result.get("hosts", [result]):
            for item in part["findings"]:
                yield _tagged(item, kind, str(path))


def _tagged(item: Finding, kind: str, path: str | None) -> dict[str, Any]:
    return {**item, "kind": kind, "path": path}


def _timeout(facts: Result) -> Timeout:
    seq = "" if facts["seq"] is None else f" #{facts['seq']}"
    return Timeout(**facts, group_rank=None, group=None, elapsed=None, line=f"rank {facts['rank']}: {facts['op']}{seq}")


def _not_judged_anew(results: Sequence[Read], known: set[str]) -> list[dict[str, Any]]:
    """Reports that say it themselves (a desync report, a stack) stay, where the works of all ranks do not say it."""
    told = [item for item in _all(results) if item["kind"] == "watchdog" and item["code"] in _ACROSS]
    keep = ("ranks-desynchronised", "size-mismatch", "collective-timeout")
    return [item for item in told if item["code"] in keep and item["code"] not in known]


def _different_versions(logs: Sequence[Result]) -> list[Finding]:
    versions = {parse_version(log["nccl_version"]): str(log["nccl_version"]) for log in logs if log["nccl_version"]}
    if len(versions) < 2:
        return []
    message, advice = text_of("mixed-versions", None)
    return [finding("mixed-versions", f"{message} Over these files: {' and '.join(versions.values())}.", None, advice)]


def _merged(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One finding a code and message, with all the files it is from."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for item in sorted(findings, key=lambda item: _RANKING.index(item["severity"])):
        plain = {name: value for name, value in item.items() if name not in ("kind", "path")}
        entry = kept.setdefault((item["code"], item["message"]), {**plain, "paths": []})
        if item["path"] and item["path"] not in entry["paths"]:
            entry["paths"].append(item["path"])
    return list(kept.values())


def _verdict(
    findings: Sequence[dict[str, Any]],
    hosts: Sequence[Result],
    logs: Sequence[Result],
    silent: Sequence[str],
    hang: Hang,
) -> str:
    codes = {item["code"] for item in findings}
    timed_out = "collective-timeout" in codes
    for code in _CAUSES:
        if code in codes and SEVERITY[code] == "error":
            return _sentence(findings, code) + (" The time-out of the collective follows from it." if timed_out else "")
    if hang.sentence and hang.missing:
        return f"{hang.sentence[0].upper()}{hang.sentence[1:]}."
    near = any(link in ("PIX", "PXB") for host in hosts for link in host["links"].values())
    peer = any(path.startswith("P2P") for log in logs for path in log["transports"])
    if near and (peer or not logs) and codes & {"stuck-first-collective", "collective-timeout"} and not silent:
        return (
            "NCCL connected without a warning and uses PCIe peer-to-peer between GPUs on one switch (PIX/PXB), and "
            "then hung: most likely PCIe ACS or an IOMMU. Test with NCCL_P2P_DISABLE=1; then disable ACS and "
            "VT-d/IOMMU, or boot with iommu=pt."
        )
    if silent:
        names = ", ".join(silent[:8])
        return f"Rank {names} does not report while the others wait: look at it first (`py-spy dump`, its log)."
    for code in ("stuck-first-collective", "other-group-stuck", "store-timeout", "peer-closed", "collective-timeout"):
        if code in codes:
            return _sentence(findings, code)
    if "socket-fallback" in codes and any(host["nics"] for host in hosts):
        names = ", ".join(nic["device"] or nic["name"] for nic in hosts[0]["nics"][:4])
        return (
            f"Nothing failed, but traffic goes over TCP although the host has RDMA NICs ({names}): see socket-fallback."
        )
    unread = [item for item in findings if item["code"] == "not-recognised"]
    if unread:
        names = ", ".join(dict.fromkeys(Path(item["path"]).name for item in unread))
        return f"Nothing can be said of {names}: not-recognised."
    warnings = [item for item in findings if item["severity"] == "warning"]
    if warnings:
        return f"Nothing failed. {len(warnings)} thing(s) to look at, first: {warnings[0]['code']}."
    return "Nothing wrong was found in these files."


def _sentence(findings: Sequence[dict[str, Any]], code: str) -> str:
    item = next(item for item in findings if item["code"] == code)
    where = f" ({Path(item['path']).name})" if item["path"] else ""
    return f"{code}{where}: {item['message']}"
