"""From an examination to its findings and the verdict: pure, with no cluster at hand."""

from __future__ import annotations

from typing import Final

from raybench.doctor.findings import by_severity
from raybench.doctor.live.facts import Collective, Examination
from raybench.doctor.live.finding import LiveFinding, about, from_reader, some
from raybench.doctor.live.judge_gpus import judge_gpus
from raybench.doctor.live.judge_hosts import judge_hosts
from raybench.doctor.live.judge_network import judge_network
from raybench.doctor.nccl import read_nccl
from raybench.wording import count

STAGES: Final = {
    "within": "Two ranks of one node",
    "between": "Two ranks of two nodes",
    "all": "All ranks",
}


_P2P: Final = "Once more with NCCL_P2P_DISABLE=1: if it works, ACS or an IOMMU is on."


def judge(found: Examination) -> list[LiveFinding]:
    """All findings, errors first; among equals causes before what follows from them."""
    findings = [*judge_hosts(found), *judge_network(found), *judge_gpus(found)]
    for each in found["collectives"]:
        if each["status"] != "ok":
            findings += _from_log(each)
            findings.append(_collective(each, findings))
    return by_severity(findings)  # type: ignore[return-value]


def verdict(found: Examination, findings: list[LiveFinding]) -> str:
    """One sentence: ready, usable, or not ready, and why."""
    errors = [each for each in findings if each["severity"] == "error"]
    warnings = [each for each in findings if each["severity"] == "warning"]
    where = count(len(found["nodes"]) + len(found["silent"]), "node")
    if errors:
        rest = f" ({count(len(errors) - 1, 'more error')})" if len(errors) > 1 else ""
        first = errors[0]["message"].partition(". ")[0].rstrip(".")
        return f"Not ready ({where}): {errors[0]['code']}. {first}{rest}."
    if warnings:
        return f"Usable ({where}), with {count(len(warnings), 'thing')} to look at, first: {warnings[0]['code']}."
    return f"Ready ({where}): nothing wrong was found, and {count(len(found['collectives']), 'all-reduce')} worked."


def _collective(each: Collective, others: list[LiveFinding]) -> LiveFinding:
    nodes = sorted(set(each["nodes"]))
    causes = dict.fromkeys(other["code"] for other in others if _may_cause(other, each["backend"], nodes))
    because = f" Most likely because of {some(causes)}, found beside it." if causes else ""
    return about(
        nodes,
        "collective-timeout" if each["status"] == "timeout" else "collective-failed",
        f"{STAGES[each['stage']]} ({some(nodes)}) could not do an all-reduce with {each['backend']}.{because}",
        each["reason"],
        [] if causes else _next_steps(each),
    )


def _may_cause(other: LiveFinding, backend: str, nodes: list[str]) -> bool:
    """Whether a finding explains that these nodes could not do an all-reduce; an interface counts for its library."""
    if other["code"].startswith("collective-") or not set(other["nodes"]) & set(nodes):
        return False
    if other["code"] in ("interface-not-found", "wrong-interface"):
        seen = str(other["evidence"])
        return f"{backend.upper()}_SOCKET_IFNAME" in seen or "_SOCKET_IFNAME" not in seen
    return other["severity"] == "error"


def _next_steps(each: Collective) -> list[str]:
    if each["backend"] == "gloo":
        return ["All TCP ports open between the nodes, and GLOO_SOCKET_IFNAME the interface that carries Ray, on each."]
    steps = ["raybench verify TRACK --nccl-env debugging, then raybench doctor nccl FILE on what every rank wrote."]
    return [*steps, _P2P] if each["stage"] == "within" else steps


def _from_log(each: Collective) -> list[LiveFinding]:
    """What the reader of NCCL's logs finds in what the rank wrote."""
    found = read_nccl(each["log"].splitlines())["findings"] if each["log"] else []
    return [from_reader(item, sorted(set(each["nodes"]))) for item in found if item["severity"] != "info"]
