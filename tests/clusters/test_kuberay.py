"""The KubeRay objects against the schema of their kinds; data/kuberay-schema.json says where that is from."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from raybench.suite.nccl_env import resolve
from tests.clusters.conftest import ROOT

FOLDER = ROOT / "clusters" / "kuberay"
SCHEMA = json.loads((ROOT / "tests" / "clusters" / "data" / "kuberay-schema.json").read_text())
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


def problems(content: dict[str, Any]) -> list[str]:
    validator = Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{content['kind']}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("name", FILES)
def test_valid(name: str) -> None:
    assert problems(load(name)) == []


def test_the_schema_finds_mistakes() -> None:
    content = load("raycluster.yaml")
    for path, value in (("headGroupSpec.templat", {}), ("workerGroupSpecs", [{}]), ("authOptions", {"mode": "open"})):
        wrong = copy.deepcopy(content)
        *parents, last = path.split(".")
        place = wrong["spec"]
        for parent in parents:
            place = place[parent]
        place[last] = value
        assert problems(wrong)
    wrong = copy.deepcopy(content)
    wrong["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert any("volumeMount" in problem for problem in problems(wrong))


def test_job_and_cluster_are_the_same_cluster() -> None:
    assert load("rayjob.yaml")["spec"]["rayClusterSpec"] == load("raycluster.yaml")["spec"]


def test_settings_are_those_of_the_environment() -> None:
    data = load("nccl.yaml")["data"]
    name = data.pop("RAYBENCH_NCCL_ENV")
    assert data == resolve(name)


def test_what_pods_must_have() -> None:
    spec = load("raycluster.yaml")["spec"]
    for pod in pods(spec):
        (container,) = pod["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/results"}
        assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
        assert container["envFrom"] == [{"configMapRef": {"name": load("nccl.yaml")["metadata"]["name"]}}]
    head, worker = pods(spec)
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert worker["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["authOptions"]["mode"] == "token"
    claim = load("storage.yaml")["metadata"]["name"]
    assert {"name": "results", "persistentVolumeClaim": {"claimName": claim}} in worker["volumes"]


def test_versions_agree() -> None:
    import ray

    assert load("raycluster.yaml")["spec"]["rayVersion"] == ray.__version__
    assert f"rayproject/ray:{ray.__version__}-py311-gpu" in (FOLDER / "Dockerfile").read_text()
