"""The answer: tables, text, JSON, exit code and the file for --nccl-env; and what is refused before anything starts."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from raybench.cli import main
from raybench.doctor.live.command import answer
from raybench.doctor.live.environment import as_file, recommend, suited
from raybench.doctor.live.judge import judge
from raybench.suite.nccl_env import resolve
from tests.doctor.live.made import collective, examination, gpu, node, reach

TWO = "10.0.0.2"


def shown(table: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(table)
    return stream.getvalue()


def test_a_cluster_that_is_well(tmp_path: Path):
    file = tmp_path / "mine.env"
    told = answer(examination(), file)
    assert told.exit_code == 0
    assert "Ready (2 nodes)" in told.text
    table = shown(told.table)
    for words in (
        "10.0.0.2",
        "2 × A10",
        "22.5 GiB",
        "570.124.06",
        "2.27.3",
        "3 of 3",
        "23 Gbit/s",
        "50 Gbit/s",
        "1.68 GB/s",
    ):
        assert words in table
    body = json.loads(json.dumps(told.document))
    assert (body["schema"], body["exit_code"], body["kind"], body["findings"]) == (1, 0, "cluster", [])
    assert body["nodes"][1]["clock_offset_ns"] == 40_000
    assert body["nodes"][0]["topology"]["links"] == {"GPU0-GPU1": "PXB"}
    assert body["collectives"][0]["bus_bytes_per_s"] == pytest.approx(2**26 / 0.04)
    assert body["collectives"][-1]["bus_bytes_per_s"] == pytest.approx(1.5 * 2**26 / 0.04)
    assert resolve(str(file)) == body["environment"]


def test_an_error_is_exit_code_1_and_a_warning_is_not():
    assert answer(examination(silent={"10.0.0.3": "gave no answer in 60 s; x"}), None).exit_code == 1
    hot = examination(node(), node(TWO, gpus=[gpu(0, slowdowns=["hw_slowdown"]), gpu(1)]))
    assert answer(hot, None).exit_code == 0
    assert "gpu-throttled" in answer(hot, None).text
    assert "10.0.0.3" in shown(answer(examination(silent={"10.0.0.3": "x"}), None).table)


def test_every_finding_says_what_why_and_what_to_do():
    broken = node(
        TWO, environment={"NCCL_SOCKET_IFNAME": "ens", "GLOO_SOCKET_IFNAME": "eth0"}, shm_bytes=1, shm_free_bytes=1
    )
    told = answer(examination(node(), broken), None)
    for each in told.document["findings"]:
        assert {"code", "severity", "message", "evidence", "advice", "nodes", "environment"} == set(each)
        assert each["advice"]
    assert "ERROR interface-not-found" in told.text
    assert "| 10.0.0.2: NCCL_SOCKET_IFNAME=ens" in told.text


def test_with_no_gpu_it_says_what_it_skipped():
    plain = {"gpus": [], "ray_gpus": 0, "free_gpus": 0, "num_pci_gpus": 0, "topology": None,
             "versions": {"driver": None, "cuda": None, "nccl": None, "driver_cuda": None}}  # fmt: skip
    done = [collective("between", "10.0.0.1", TWO, backend="gloo")]
    found = examination(node(**plain), node(TWO, **plain), collectives=done, skipped=["topology: no node has a GPU"])
    told = answer(found, None)
    assert told.document["findings"] == []
    assert "not looked at: topology: no node has a GPU" in told.text
    assert set(told.document["environment"]) == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def test_the_environment_suits_the_cluster():
    chosen = {"RAYBENCH_NCCL_ENV": "oci-ethernet"}
    assert suited([node(environment=chosen), node(TWO, environment=chosen)]) == "oci-ethernet"
    assert suited([node(environment=chosen), node(TWO)]) == "universal"
    port = {"name": "mlx5_0:1", "is_active": True, "link_layer": "InfiniBand", "rate": "200 Gb/sec"}
    assert suited([node(rdma=[port])]) == "infiniband-roce"
    assert suited([node(topology="\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tSYS\nGPU1\tNV4\tX\tSYS\n")]) == "nvlink"


def test_the_file_is_read_back_by_nccl_env(tmp_path: Path):
    hung = collective("within", TWO, TWO, status="timeout", duration_ns=None, reason="late")
    found = examination(node(), node(TWO, acs_bridges=["0000:00:01.0"]), collectives=[hung])
    settings = recommend(found, judge(found))
    file = tmp_path / "mine.env"
    file.write_text(as_file(settings, found["nodes"]))
    read = resolve(str(file))
    assert read == {name: setting.value for name, setting in settings.items()}
    assert read["NCCL_P2P_DISABLE"] == "1"
    assert read["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert read["NCCL_DEBUG"] == "WARN"
    assert "acs-enabled on 10.0.0.2" in file.read_text()
    apart = examination(node(), node(TWO, ray_interface="ens3"))
    assert "NCCL_SOCKET_IFNAME" not in recommend(apart, []), "no value fits both"
    alone = examination(node(gpus=[], topology=None), collectives=[])
    assert as_file(recommend(alone, []), alone["nodes"]).endswith("# nothing has to be set\n")


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/1").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "-o", "/proc/1/x"], "-o: '/proc/1/x' cannot be written ("),
        (["doctor", "-o", "nowhere/mine.env"], "-o: 'nowhere/mine.env' cannot be written (No such file or directory)"),
        (["doctor", "-o", "."], "-o: '.' cannot be written (Is a directory)"),
        (["doctor", "-o", "mine.env", "nccl", "job.log"], "-o: 'mine.env' would be the environment for a cluster"),
    ],
)
def test_a_wrong_request_starts_nothing(
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_port_of_a_silent_pair_is_shown():
    ports = {40001: "timeout", 50001: "ok"}
    found = examination(reaches=[reach("10.0.0.1", TWO, ports=ports), reach(TWO, "10.0.0.1")])
    assert "1 of 2" in shown(answer(found, None).table)


@pytest.mark.slow
def test_this_machine_with_a_ray_of_its_own(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "mine.env"
    code = main(["doctor", "--json", "-o", str(file)])
    out, err = capfd.readouterr()
    body = json.loads(out)
    assert code == body["exit_code"] == (1 if any(each["severity"] == "error" for each in body["findings"]) else 0)
    (only,) = body["nodes"]
    assert "asking 1 node" in err
    assert [(each["stage"], each["status"]) for each in body["collectives"]][:1] == [("within", "ok")]
    assert body["reaches"] == body["streams"] == []
    assert "ports, clocks and bandwidth between nodes: there is one node" in body["skipped"]
    assert only["gpus"] or any("no node has a GPU" in each for each in body["skipped"])
    assert resolve(str(file)) == body["environment"]
