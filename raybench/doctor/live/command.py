"""`raybench doctor` without a file: examine the cluster, say what is wrong with it, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raybench.doctor.live.environment import as_file, recommend, suited
from raybench.doctor.live.facts import Examination, bits_per_s, bus_bytes_per_s
from raybench.doctor.live.judge import judge, verdict
from raybench.doctor.live.judge_network import clock_offsets
from raybench.doctor.nccl import read_nccl
from raybench.doctor.topo import read_topo
from raybench.suite.answer import Answer, document


def live_command(out: Path | None) -> Answer:
    """Examine the cluster of RAY_ADDRESS, or this machine with a Ray of its own. Exit code 1 where there is an error.

    Args:
        out: file for the environment to use.

    Raises:
        RequestError: `out` cannot be written, or there is no such cluster.
    """
    from raybench.doctor.live.gather import examine_cluster
    from raybench.suite.commands import check_file_writable
    from raybench.suite.embedded import connect
    from raybench.suite.interrupts import orderly
    from raybench.suite.nccl_env import VARIABLE, resolve, selected
    from raybench.suite.progress import Progress

    if out is not None:
        check_file_writable("-o", out)
    chosen = selected()
    settings = {} if chosen is None else resolve(chosen, VARIABLE)
    with orderly(), connect(), orderly():
        found = examine_cluster(Progress().note, settings)
    return answer(found, out)


def answer(found: Examination, out: Path | None) -> Answer:
    """The examination as tables, text and JSON; writes `out`."""
    from raybench.doctor.live.render import tables, text

    findings = judge(found)
    settings = recommend(found, findings)
    told = verdict(found, findings)
    code = 1 if any(each["severity"] == "error" for each in findings) else 0
    lines = text(found, findings, [f"{each.name}={each.value}" for each in settings.values()], told)
    if out is not None:
        out.write_text(as_file(settings, found["nodes"]))
        lines += f"\nwrote {out}"
    body = {
        "kind": "cluster",
        "verdict": told,
        "findings": findings,
        "environment": {each.name: each.value for each in settings.values()},
        "environment_file": None if out is None else str(out),
        "nccl_env": suited(found["nodes"]),
        **_facts(found),
    }
    return Answer(exit_code=code, table=tables(found, findings), text=lines, document=document(code, **body))


def _facts(found: Examination) -> Mapping[str, Any]:
    """What was seen, for programs: topologies and logs as their readers read them, derived numbers beside."""
    offsets = clock_offsets(found)
    nodes = []
    for node in found["nodes"]:
        offset, error = offsets.get(node["address"], (None, None))
        topology = read_topo(node["topology"]) if node["topology"] else None
        nodes.append({**node, "topology": topology, "clock_offset_ns": offset, "clock_error_ns": error})
    return {
        "nodes": nodes,
        "silent": found["silent"],
        "lost": found["lost"],
        "reaches": found["reaches"],
        "streams": [{**each, "bits_per_s": bits_per_s(each)} for each in found["streams"]],
        "collectives": [
            {
                **each,
                "bus_bytes_per_s": bus_bytes_per_s(each),
                "log": read_nccl(each["log"].splitlines()) if each["log"] else None,
            }
            for each in found["collectives"]
        ],
        "skipped": found["skipped"],
    }
