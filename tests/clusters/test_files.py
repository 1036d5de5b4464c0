"""The cluster files: valid for Ray, complete, alike where they should be, and open to nobody."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from raybench.oci.errors import OCIError
from raybench.oci.provider import OCINodeProvider
from raybench.suite.nccl_env import load_environments
from tests.clusters.conftest import ROOT

NAMES = sorted(path.stem for path in (ROOT / "clusters").glob("*.yaml") if path.stem != "nccl")
OCI = [name for name in NAMES if name.startswith("oci-")]


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "clusters" / f"{name}.yaml").read_text())
    return content


def fill_in(value: Any) -> Any:
    """As a user does."""
    if isinstance(value, dict):
        return {key: fill_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item) for item in value]
    return value.replace("FILL-IN", "mine") if isinstance(value, str) else value


def commands(config: dict[str, Any]) -> list[str]:
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def test_the_promised_files_are_there() -> None:
    assert set(NAMES) == {"oci-a10", "oci-a10-bm", "oci-a100", "oci-h100-rdma", "on-prem", "aws-a10g"}


@pytest.mark.parametrize("name", NAMES)
def test_ray_takes_it_at_home_and_again_on_the_head(name: str) -> None:
    config = prepare_config(fill_in(load(name)))
    validate_config(config)
    again = prepare_config(copy.deepcopy(config))
    validate_config(again)
    assert again["worker_setup_commands"] == config["worker_setup_commands"]  # not run twice


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mounted_is_there(name: str) -> None:
    mounts = load(name)["file_mounts"]
    for remote, local in mounts.items():
        assert local == "~/.ray/auth_token" or (ROOT / local).exists(), local
        assert remote == local or remote == f"~/raybench/{local}"


@pytest.mark.parametrize("name", NAMES)
def test_start_commands(name: str) -> None:
    config = load(name)
    (head,), (worker,) = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    for command in (head, worker):
        match = re.search(r"^\. ~/raybench/clusters/node\.sh && raybench_env (\S+) && raybench_stop && ", command)
        assert match, command
        assert match[1] in load_environments()
        assert "0.0.0.0" not in command
        assert "dashboard-host" not in command
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    assert not [command for command in commands(config) if "http" in command or "password" in command]


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_and_no_secrets(name: str) -> None:
    text = (ROOT / "clusters" / f"{name}.yaml").read_text()
    assert len(text.splitlines()) <= 70
    assert not re.search(r"BEGIN|AKIA|aaaa", text)


@pytest.mark.parametrize("name", OCI)
def test_oci_nodes_are_launchable_once_filled_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text("x")
    (tmp_path / ".ssh" / "id_ed25519.pub").write_text("ssh-ed25519 KEY")
    config = prepare_config(load(name))
    with pytest.raises(OCIError, match="fill in"):
        OCINodeProvider.bootstrap_config(config)
    done = OCINodeProvider.bootstrap_config(prepare_config(fill_in(load(name))))
    head, worker = (kind["node_config"] for kind in done["available_node_types"].values())
    assert head == worker
    assert head["metadata"] == {"ssh_authorized_keys": "ssh-ed25519 KEY"}


def test_oci_files_differ_in_little() -> None:
    own = (
        "cluster_name",
        "head_node_type",
        "available_node_types",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    )
    shared = [{key: value for key, value in load(name).items() if key not in own} for name in OCI]
    assert all(each == shared[0] for each in shared)


def test_gpus_of_the_shapes() -> None:
    gpus = {name: next(iter(load(name)["available_node_types"].values()))["resources"] for name in OCI}
    assert gpus == {
        "oci-a10": {"CPU": 60, "GPU": 2},
        "oci-a10-bm": {"CPU": 128, "GPU": 4},
        "oci-a100": {"CPU": 128, "GPU": 8},
        "oci-h100-rdma": {"CPU": 224, "GPU": 8},
    }


def test_the_pinned_ray_is_the_tested_one() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={ray.__version__}" in [line.split(";")[0].strip() for line in constraints]
