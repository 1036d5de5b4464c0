"""What is there: this machine, and a Ray cluster whose nodes answer, are slow, or differ."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import ray

from raybench.errors import RequestError
from raybench.suite import cluster as module
from raybench.suite.cluster import probe_local, probe_ray
from raybench.suite.probe import gpus, interface_of, probe_node, usable_cpus

from .fakes import cluster, node


def test_this_machine():
    here = probe_local()
    (one,) = here.nodes
    assert one.num_cpus == one.free_cpus == usable_cpus() <= (os.cpu_count() or 1)
    assert one.memory_bytes > 2**28
    assert one.cpu_model
    assert one.versions["python"].startswith("3.")
    assert one.versions["torch"][0].isdigit()
    assert here.default_scale == ("full" if one.gpus else "smoke")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_gpus_as_nvidia_smi_tells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")

    def answer(text: str, code: int = 0) -> None:
        done = subprocess.CompletedProcess([], code, stdout=text, stderr="")
        monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)

    answer("NVIDIA A10, 23028\nNVIDIA A10, 23028\n")
    assert gpus() == [{"name": "NVIDIA A10", "memory_bytes": 23028 * 2**20}] * 2
    answer("NVIDIA Thor, [N/A]\n")
    assert gpus() == [{"name": "NVIDIA Thor", "memory_bytes": None}]
    answer("No devices were found\n")
    assert gpus() == []
    answer("Failed to initialize NVML", 9)
    assert gpus() == []


class FakeRay:
    """Nodes by name; each is a dictionary that `probe_node` would give, or what asking it raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], free: dict[str, Any] | None = None):
        self.answers = answers
        self.cancelled: list[str] = []
        listed = [
            {
                "NodeID": f"{name * 56}"[:56],
                "Alive": True,
                "NodeManagerAddress": name,
                "Resources": {"CPU": 4.0, "GPU": 2.0},
            }
            for name in answers
        ]
        gone = {"NodeID": "9" * 56, "Alive": False, "NodeManagerAddress": "9", "Resources": {}}
        monkeypatch.setattr(ray, "nodes", lambda: [*listed, gone])
        monkeypatch.setattr(ray, "remote", lambda function: self)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "cancel", lambda reference, force: self.cancelled.append(reference))
        known = {n["NodeID"]: n["Resources"] for n in listed} if free is None else free
        monkeypatch.setattr(module, "free_resources", lambda: known)

    def options(self, **options: Any) -> FakeRay:
        assert options["num_cpus"] == 0
        return self

    def remote(self, address: str) -> str:
        return address

    def get(self, reference: str, timeout: float) -> Any:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer


def told(address: str, **changes: Any) -> dict[str, Any]:
    gpu = {"name": "NVIDIA A10", "memory_bytes": 2**34}
    return {**probe_node(address), "gpus": [gpu, gpu], **changes}


def test_nodes_of_a_cluster(monkeypatch: pytest.MonkeyPatch):
    FakeRay(monkeypatch, {"a": told("a"), "b": told("b", gpus=[])}, {"a" * 56: {"CPU": 1.5}, "b" * 56: {"CPU": 4.0}})
    found = probe_ray()
    first, second = found.nodes
    assert (first.address, first.free_cpus, first.total_cpus) == ("b", 4.0, 4.0)
    assert (first.total_gpus, first.free_gpus) == (0, 0), "Ray's GPUs count only where the node has them"
    assert (second.address, second.free_cpus, second.free_gpus, second.total_gpus) == ("a", 1.5, 0, 2)
    assert found.num_gpus == 2
    assert found.default_scale == "full"


def test_a_node_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    slow = ray.exceptions.GetTimeoutError("late")
    broken = RuntimeError("task failed\nModuleNotFoundError: No module named 'raybench'")
    fake = FakeRay(monkeypatch, {"a": told("a"), "b": slow, "c": broken})
    with pytest.raises(RequestError) as error:
        probe_ray(timeout_s=3)
    assert str(error.value) == (
        "cluster: b gave no answer in 3 s; c failed (ModuleNotFoundError: No module named 'raybench')"
    )
    assert fake.cancelled == ["b"]
    assert [n.address for n in probe_ray(timeout_s=3, strict=False).nodes] == ["a"]


def test_versions_that_differ_are_named_with_their_nodes(monkeypatch: pytest.MonkeyPatch):
    versions = probe_node("a")["versions"]
    FakeRay(monkeypatch, {"a": told("a"), "b": told("b"), "c": told("c", versions={**versions, "torch": "2.9.0"})})
    with pytest.raises(RequestError) as error:
        probe_ray()
    assert str(error.value) == (
        f"cluster: torch differs between nodes: {versions['torch']} on a, b; 2.9.0 on c (install the same everywhere)"
    )


def test_a_cluster_in_one_line():
    assert cluster(node(cpus=1)).describe() == "1 node, 1 CPU, 16 GiB, no GPU"
    assert cluster(node("a", gpus=2), node("b", gpus=2)).describe() == "2 nodes, 4 CPUs, 32 GiB, 4 × A10"


@pytest.mark.slow
def test_a_real_cluster_of_one():
    from raybench.suite.embedded import connect

    with connect():
        (one,) = probe_ray().nodes
        assert one.address == ray.util.get_node_ip_address()
        assert one.free_cpus == one.total_cpus > 0
        assert one.node_id == ray.get_runtime_context().get_node_id()
        assert one.interface
