"""What a reader reports: one object a finding, its severity fixed by its code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypedDict

Severity = Literal["info", "warning", "error"]
Result = dict[str, Any]


class Finding(TypedDict):
    """One thing the doctor noticed; `evidence` is the line it was read from, `advice` what to do, in order."""

    code: str
    severity: Severity
    message: str
    evidence: str | None
    advice: list[str]


SEVERITY: Final[dict[str, Severity]] = {
    "not-recognised": "error",
    "truncated-input": "warning",
    "single-gpu": "info",
    "p2p-through-host-bridge": "warning",
    "mixed-nvlink-pcie": "warning",
    "p2p-hang-risk": "warning",
    "p2p-disabled": "info",
    "nic-far-from-gpu": "warning",
    "peer-access-unsupported": "error",
    "socket-fallback": "info",
    "no-gpudirect-rdma": "warning",
    "mixed-link-layers": "warning",
    "ib-retry-exceeded": "error",
    "ib-local-protection": "error",
    "roce-gid-or-route": "error",
    "memlock-too-low": "error",
    "shm-too-small": "error",
    "duplicate-gpu": "error",
    "interface-not-found": "error",
    "wrong-interface": "warning",
    "connection-refused": "error",
    "connection-timeout": "error",
    "peer-unreachable": "error",
    "peer-closed": "error",
    "size-mismatch": "error",
    "mixed-versions": "error",
    "net-plugin-failed": "error",
    "nvls-fabric-manager": "error",
    "iommu-not-passthrough": "warning",
    "collective-timeout": "error",
    "ranks-desynchronised": "error",
    "stuck-first-collective": "error",
    "silent-rank": "warning",
    "other-group-stuck": "warning",
    "store-timeout": "error",
    # of a living cluster
    "node-no-answer": "error",
    "node-lost": "warning",
    "clock-offset": "warning",
    "slow-link": "warning",
    "mtu-differs": "warning",
    "environment-differs": "warning",
    "collective-failed": "error",
    "container-limit": "warning",
    "driver-not-working": "error",
    "driver-too-old": "error",
    "driver-differs": "warning",
    "torch-without-cuda": "error",
    "gpu-missing": "error",
    "gpus-differ": "warning",
    "gpu-in-use": "warning",
    "gpu-memory-errors": "error",
    "gpu-throttled": "warning",
    "gpu-link-degraded": "warning",
    "acs-enabled": "warning",
}

_ORDER: Final[dict[str, int]] = {"error": 0, "warning": 1, "info": 2}
_EVIDENCE_LENGTH = 400


def finding(code: str, message: str, evidence: str | None = None, advice: Sequence[str] = ()) -> Finding:
    """A finding of a known code; long evidence is cut, since some records run over kilobytes."""
    if evidence is not None:
        evidence = evidence.strip()
        if len(evidence) > _EVIDENCE_LENGTH:
            evidence = evidence[: _EVIDENCE_LENGTH - 3] + "..."
    return {
        "code": code,
        "severity": SEVERITY[code],
        "message": message,
        "evidence": evidence,
        "advice": list(advice),
    }


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then information; within each the order in which they were found."""
    return sorted(findings, key=lambda item: _ORDER[item["severity"]])
