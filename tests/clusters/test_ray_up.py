"""Clusters for real: `ray up` on hosts in namespaces, a job over both, `ray down` and nothing left."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml

from tests.clusters.conftest import ROOT
from tests.testbed.bed import ENDPOINT, OCI_FILL_IN, Testbed
from tests.testbed.cloud import ApiError
from tests.testbed.host import Host, Laptop

JOB = ["ray", "job", "submit", "--working-dir", "tests/clusters/data", "--", "python", "gloo_job.py"]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "http://127.0.0.1:8265"}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a cluster file by its place."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {
            key: leaf for number, item in enumerate(value) for key, leaf in leaves(item, f"{path}/{number}").items()
        }
    return {path: value}


def differences(bed: Testbed, name: str, used: str) -> set[str]:
    """Places where the file that was used differs from the shipped one."""
    shipped = leaves(yaml.safe_load((ROOT / "clusters" / f"{name}.yaml").read_text()))
    mine = leaves(yaml.safe_load(bed.laptop.namespace.path(used).read_text()))
    return {place for place in shipped.keys() | mine.keys() if shipped.get(place) != mine.get(place)}


def wait(what: str, condition: Any, timeout: float = 240) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout, f"timed out waiting for {what}"
        time.sleep(1)
    print(f"{what}: waited {time.monotonic() - begin:.0f} s")


def runs_ray(host: Host) -> bool:
    """Whether the node's Ray is up."""
    return any("/raylet/raylet" in line for line in host.processes())


def of_ray(host: Host) -> list[str]:
    """Whatever Ray has running."""
    return [line for line in host.processes() if "ray::" in line or "/ray/" in line]


def open_ports(bed: Testbed, host: Host, ports: list[int]) -> list[int]:
    """Which of a host's ports answer somebody outside its subnet."""
    probe = (
        "import socket, sys\n"
        "for port in map(int, sys.argv[2:]):\n"
        "    try:\n"
        "        socket.create_connection((sys.argv[1], port), 2).close()\n"
        "        print(port)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    address = host.external_ip or host.internal_ip
    said = bed.laptop.run("python", "-c", probe, address, *map(str, ports)).stdout
    return [int(line) for line in said.split()]


def readable_by_others(host: Host, secret: str) -> str:
    """Files of the host that hold the secret and that any user may read, or that are logs."""
    script = (
        'grep -rlsF -- "$1" /home /tmp /etc /var /run '
        "| while read -r file; do "
        'case $(stat -c %a "$file") in *00) ;; *) echo "$file";; esac; '
        'case $file in /tmp/ray/*) echo "$file";; esac; done'
    )
    return host.run("sh", "-c", script, "look", secret, check=False, timeout=120).stdout


def run_job(bed: Testbed, cluster_file: str, nccl_env: str) -> list[dict[str, Any]]:
    """From the laptop: tunnel, submit with the token, read what the ranks said."""
    tunnel = bed.tunnel(cluster_file)
    try:
        refused = bed.laptop.run("ray", "job", "list", env={**TOKEN, "RAY_AUTH_MODE": "disabled"}, check=False)
        assert refused.returncode != 0
        assert "Unauthorized" in refused.stdout + refused.stderr
        said = bed.laptop.run(*JOB, env=TOKEN, timeout=280).stdout
    finally:
        tunnel.close()
    assert "JOB DONE" in said
    line = next(line for line in said.splitlines() if "ROWS " in line)
    rows: list[dict[str, Any]] = json.loads(line[line.index("ROWS ") + 5 : line.rindex("]") + 1])
    assert sorted(row["node_rank"] for row in rows) == [0, 0, 1, 1]
    assert len({row["host"] for row in rows}) == 2
    assert {row["interface"] for row in rows} == {"eth0"}
    assert {row["nccl_env"] for row in rows} == {nccl_env}
    return rows


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -s, how long each step took."""
    run, begin = Laptop.run, time.monotonic()

    def timed(self: Laptop, *command: str, **options: Any) -> Any:
        started = time.monotonic()
        done = run(self, *command, **options)
        print(f"[{started - begin:5.0f} s] {' '.join(command)[:60]!r}: {time.monotonic() - started:.0f} s")
        return done

    monkeypatch.setattr(Laptop, "run", timed)


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_oci_a10(bed: Testbed) -> None:
    kinds = ("a10", "a10-worker")
    resources: dict[str, Any] = {f"available_node_types/{kind}/resources": {"CPU": 2} for kind in kinds}
    file = bed.cluster_file("oci-a10", {**OCI_FILL_IN, "provider/service_endpoint": ENDPOINT, **resources})
    resource_places = {f"/available_node_types/{kind}/resources/{name}" for kind in kinds for name in ("CPU", "GPU")}
    filled_in = {"/provider/compartment_id", "/provider/subnet_id"}
    assert differences(bed, "oci-a10", file) == {"/provider/service_endpoint"} | resource_places | filled_in

    bed.laptop.run("ray", "up", "--yes", file, timeout=400)
    wait("both instances", lambda: len(bed.instance_hosts()) == 2)
    head, worker = bed.instance_hosts()
    wait("Ray on the worker", lambda: runs_ray(worker), timeout=400)
    assert {instance.details["availabilityDomain"] for instance in bed.cloud.alive()} == {bed.cloud.domains[0]}

    run_job(bed, file, "oci-ethernet")
    bed.laptop.run("ray", "rsync-down", file, "~/raybench/results/", "/home/person/results/")
    assert "finished" in bed.laptop.namespace.path("/home/person/results/job.json").read_text()

    assert open_ports(bed, head, [22, 6379, 8265, 8076, 10001]) == [22]
    token = bed.laptop.namespace.path("/home/person/.ray/auth_token").read_text()
    key = bed.laptop.namespace.path("/home/person/.ssh/id_ed25519").read_text().splitlines()[2]
    for host in (head, worker):
        for secret in (token, key):
            assert readable_by_others(host, secret) == ""
        assert not any(token in line for line in host.processes())

    bed.laptop.run("ray", "down", "--yes", file)
    wait("the end of the instances", lambda: not bed.hosts, timeout=30)
    assert {instance.state for instance in bed.cloud.instances.values()} == {"TERMINATED"}
    assert len(bed.cloud.instances) == 2
    assert not bed.cloud.boot_volumes
    assert not head.alive
    assert not worker.alive


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_prem(bed: Testbed) -> None:
    head, worker = bed.add_host("rack-1"), bed.add_host("rack-2")
    addresses = {"provider/head_ip": head.internal_ip, "provider/worker_ips": [worker.internal_ip]}
    file = bed.cluster_file("on-prem", addresses)
    assert differences(bed, "on-prem", file) == {"/provider/head_ip", "/provider/worker_ips/0"}

    bed.laptop.run("sh", "-c", "ray get-auth-token --generate >/dev/null && chmod 600 ~/.ray/auth_token")
    bed.laptop.run("ray", "up", "--yes", file, timeout=400)
    wait("Ray on the worker", lambda: runs_ray(worker), timeout=400)
    run_job(bed, file, "universal")
    assert open_ports(bed, head, [22, 6379, 8265]) == [22]

    bed.laptop.run("ray", "down", "--yes", file)
    wait("the end of Ray on the head", lambda: not of_ray(head), timeout=60)
    wait("the end of Ray on the worker", lambda: not of_ray(worker), timeout=240)


def no_room(bed: Testbed) -> None:
    for domain in bed.cloud.domains:
        bed.cloud.capacity[(domain, "VM.GPU.A10.2")] = 0


def quota(bed: Testbed) -> None:
    bed.cloud.limits["VM.GPU.A10.2"] = 0


def expired_token(bed: Testbed) -> None:
    bed.cloud.fail("list", ApiError(401, "NotAuthenticated", "expired"), times=99)


def wrong_compartment(bed: Testbed) -> None:
    bed.cloud.compartments.clear()


def missing_image(bed: Testbed) -> None:
    bed.cloud.images.clear()


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (no_room, "no VM.GPU.A10.2 is free in"),
        (quota, "request an increase"),
        (expired_token, "OCI refused the credentials"),
        (wrong_compartment, "Check provider.compartment_id and the policies"),
        (missing_image, "there is no image of Oracle Linux 8 for VM.GPU.A10.2"),
    ],
)
def test_what_stops_ray_up_is_one_message_and_leaves_nothing(bed: Testbed, happens: Any, words: str) -> None:
    happens(bed)
    file = bed.cluster_file("oci-a10", {**OCI_FILL_IN, "provider/service_endpoint": ENDPOINT})
    failed = bed.laptop.run("ray", "up", "--yes", file, check=False)
    assert failed.returncode == 1
    (message,) = [line for line in failed.stderr.splitlines() if line.startswith("Error: ")]
    assert words in message
    assert "Traceback" not in failed.stdout + failed.stderr
    assert not bed.cloud.instances
