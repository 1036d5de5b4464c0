"""Clusters for real: `ray up` on hosts in namespaces, a job over both, `ray down` and nothing left."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clusters.bring_up import TOKEN, Up, oci, oci_down, on_prem, on_prem_down
from tests.clusters.leaks import assert_no_secret_leaked
from tests.testbed.bed import ENDPOINT, OCI_FILL_IN, Testbed
from tests.testbed.cloud import ApiError
from tests.testbed.host import Host

JOB = ["ray", "job", "submit", "--working-dir", "tests/clusters/data", "--", "python", "gloo_job.py"]


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


def run_job(up: Up) -> None:
    """From the laptop: tunnel, submit with the token, read what the ranks said."""
    tunnel = up.bed.tunnel(up.file)
    try:
        refused = up.bed.laptop.run("ray", "job", "list", env={**TOKEN, "RAY_AUTH_MODE": "disabled"}, check=False)
        assert refused.returncode != 0
        assert "Unauthorized" in refused.stdout + refused.stderr
        said = up.bed.laptop.run(*JOB, env=TOKEN, timeout=280).stdout
    finally:
        tunnel.close()
    assert "JOB DONE" in said
    line = next(line for line in said.splitlines() if "ROWS " in line)
    rows: list[dict[str, Any]] = json.loads(line[line.index("ROWS ") + 5 : line.rindex("]") + 1])
    assert sorted(row["node_rank"] for row in rows) == [0, 0, 1, 1]
    assert len({row["host"] for row in rows}) == 2
    assert {row["interface"] for row in rows} == {"eth0"}
    assert {row["nccl_env"] for row in rows} == {up.nccl_env}


@pytest.mark.netns
@pytest.mark.timeout(900)
def test_oci_a10(bed: Testbed) -> None:
    up = oci(bed)
    assert {instance.details["availabilityDomain"] for instance in bed.cloud.alive()} == {bed.cloud.domains[0]}
    run_job(up)
    bed.laptop.run("ray", "rsync-down", up.file, "~/raybench/results/", "/home/person/results/")
    assert "finished" in bed.laptop.namespace.path("/home/person/results/job.json").read_text()
    assert open_ports(bed, up.head, [22, 6379, 8265, 8076, 10001]) == [22]
    assert_no_secret_leaked(bed, up.hosts, {}, "")
    oci_down(up)
    assert len(bed.cloud.instances) == 2


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_prem(bed: Testbed) -> None:
    up = on_prem(bed)
    run_job(up)
    assert open_ports(bed, up.head, [22, 6379, 8265]) == [22]
    on_prem_down(up)


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
