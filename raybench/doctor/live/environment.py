"""The environment to use on a cluster: named settings that suit it, and what its findings ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raybench.doctor.live.facts import Examination, Node
from raybench.doctor.live.finding import LiveFinding
from raybench.doctor.live.judge_network import interface_environment
from raybench.doctor.topo import is_nvlink, read_topo
from raybench.suite.nccl_env import VARIABLE, Setting, load_environments, settings_of

_DOCTOR = "this examination"


def suited(nodes: Sequence[Node]) -> str:
    """The name of the settings for a cluster: those that its cluster file chose, else by its network and topology."""
    chosen = {node["environment"].get(VARIABLE, "") for node in nodes}
    if len(chosen) == 1 and (name := chosen.pop()) in load_environments():
        return name
    if nodes and all(any(port["is_active"] for port in node["rdma"]) for node in nodes):
        return "infiniband-roce"
    return "nvlink" if any(_is_mixed(node) for node in nodes) else "universal"


def recommend(found: Examination, findings: Iterable[LiveFinding]) -> dict[str, Setting]:
    """Variables with their values and reasons; empty where there is nothing to set."""
    nodes = found["nodes"]
    settings: dict[str, Setting] = {}
    if any(node["gpus"] for node in nodes):
        settings |= settings_of(suited(nodes))
    if len(nodes) > 1:
        for name, value in interface_environment(nodes).items():
            settings[name] = _setting(name, value, "the interface that carries Ray on every node")
    for each in findings:
        for name, value in each["environment"].items():
            settings[name] = _setting(name, value, f"{each['code']} on {', '.join(each['nodes'])}")
    return settings


def as_file(settings: dict[str, Setting], nodes: Sequence[Node]) -> str:
    """Lines of KEY=VALUE with reasons, as `--nccl-env` and a shell read them."""
    where = ", ".join(node["address"] for node in nodes)
    lines = [f"# raybench doctor, for {where}. Use it: raybench run-all --nccl-env THIS-FILE"]
    for setting in settings.values():
        lines += [f"# {' '.join(setting.why.split())}", f"{setting.name}={setting.value}"]
    if not settings:
        lines.append("# nothing has to be set")
    return "\n".join(lines) + "\n"


def _setting(name: str, value: str, why: str) -> Setting:
    return Setting(name=name, value=value, why=why, since=_DOCTOR)


def _is_mixed(node: Node) -> bool:
    """Whether NVLink joins some pairs of GPUs and not others."""
    links = read_topo(node["topology"]).get("links", {}).values() if node["topology"] else ()
    return len({is_nvlink(link) for link in links}) == 2
