"""NCCL settings: data that is complete, and names and files that resolve or are refused in words."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from raybench.errors import RequestError
from raybench.suite.listing import describe_nccl, nccl_text
from raybench.suite.nccl_env import VARIABLE, Environment, load_environments, resolve, selected, settings_of
from tests.clusters.conftest import ROOT

NAMES = ["universal", "oci-ethernet", "oci-rdma", "infiniband-roce", "nvlink", "debugging"]


def test_the_environments() -> None:
    assert list(load_environments()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_why_and_since_when(name: str) -> None:
    environment = load_environments()[name]
    assert environment.title
    assert environment.when
    for setting in environment.settings:
        assert re.fullmatch(r"(NCCL|TORCH)_[A-Z0-9_]+", setting.name)
        assert re.fullmatch(r"(torch )?\d+\.\d+(\.\d+)?", setting.since), setting.name
        assert len(setting.why) > 20, setting.name
        assert setting.name not in ("NCCL_TIMEOUT", "NCCL_SOCKET_IFNAME")
    names = [setting.name for setting in environment.settings]
    assert len(set(names)) == len(names)


def test_names_inherit_and_override() -> None:
    assert resolve("universal")["NCCL_DEBUG"] == "WARN"
    assert resolve("debugging")["NCCL_DEBUG"] == "INFO"
    assert resolve("oci-ethernet").items() > resolve("universal").items()
    assert settings_of("oci-rdma")["NCCL_IB_HCA"].value.startswith("=mlx5_0,")


def test_limit_of_sockets() -> None:
    values = resolve("oci-ethernet")
    assert int(values["NCCL_SOCKET_NTHREADS"]) * int(values["NCCL_NSOCKS_PERTHREAD"]) <= 64


def test_files_are_read_as_a_shell_would(tmp_path: Path) -> None:
    file = tmp_path / "mine.env"
    file.write_text("# mine\n\nexport NCCL_ALGO=Ring\nNCCL_PROTO='Simple'\nNCCL_IB_HCA==mlx5_0\nEMPTY=\n")
    assert resolve(str(file)) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_IB_HCA": "=mlx5_0", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NCCL_ALGO\n", "line 1: 'NCCL_ALGO' is not KEY=VALUE"),
        ("A=1\nNCCL_TIMEOUT=5\n", "line 2: NCCL_TIMEOUT: NCCL has no such variable"),
        ("1A=2\n", "line 1"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.env"
    file.write_text(text)
    with pytest.raises(RequestError, match=re.escape(words)):
        resolve(str(file))


def test_binary_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.env"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read"):
        resolve(str(file))


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(RequestError, match="--nccl-env: 'oci-ethernt' is not known; did you mean 'oci-ethernet'"):
        resolve("oci-ethernt")
    with pytest.raises(RequestError, match=r"there is no file 'no/such\.env'"):
        resolve("no/such.env")


def test_the_clusters_own_choice() -> None:
    assert selected({VARIABLE: "oci-rdma"}) == "oci-rdma"
    assert selected({VARIABLE: ""}) is None
    assert selected({}) is None


def test_unknown_keys_of_the_data_are_refused() -> None:
    content = yaml.safe_load((ROOT / "clusters" / "nccl.yaml").read_text())["environments"]["nvlink"]
    content["settings"][0]["sinse"] = content["settings"][0].pop("since")
    with pytest.raises(ValidationError):
        Environment.model_validate(content)


def test_the_clusters_choice_is_listed_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, "oci-ethernet")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")  # the cluster's own choice goes over it
    told = describe_nccl()
    assert (told["chosen"], told["inherited"], told["known"]) == (
        "oci-ethernet",
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        NAMES,
    )
    assert {one["name"]: one["value"] for one in told["settings"]} == resolve("oci-ethernet")
    first, *lines = nccl_text(told).splitlines()
    assert first.startswith("NCCL settings: oci-ethernet (Oracle Cloud, Ethernet between the nodes")
    assert all(name in first for name in NAMES)
    for setting, line in zip(settings_of("oci-ethernet").values(), lines, strict=False):
        assert line.startswith(f"  {setting.name}={setting.value} ")
        assert line.endswith(f"{setting.why} (since {setting.since})")
    assert lines[-1] == "  this node's environment has besides: NCCL_SOCKET_IFNAME==eth0"


def test_no_choice_and_a_wrong_one_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert describe_nccl()["settings"] == []
    assert nccl_text(describe_nccl()).startswith(
        "NCCL settings: none chosen by the cluster; --nccl-env knows universal"
    )
    monkeypatch.setenv(VARIABLE, "oci-rmda")
    with pytest.raises(RequestError, match=f"{VARIABLE}: 'oci-rmda' is not known; did you mean 'oci-rdma'"):
        describe_nccl()
    (tmp_path / "mine.env").write_text("NCCL_ALGO=Ring\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.env"))
    assert "NCCL_ALGO=Ring  line of " in nccl_text(describe_nccl())
