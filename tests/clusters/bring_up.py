"""Clusters brought up for real on the testbed, as a person does it from a laptop, and taken down again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import yaml

from tests.clusters.conftest import ROOT
from tests.testbed.bed import ENDPOINT, OCI_FILL_IN, Testbed
from tests.testbed.host import Background, Host, Laptop

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "http://127.0.0.1:8265"}
"""What a person exports before `ray job submit`."""
GENERATE = "ray get-auth-token --generate >/dev/null && chmod 600 ~/.ray/auth_token"
COPY_DOWN = r"^copy them down: (ray rsync-down CLUSTER\.yaml .*)$"


@dataclass(frozen=True)
class Up:
    """A cluster of two hosts that is up."""

    bed: Testbed
    file: str
    """The cluster file on the laptop."""
    head: Host
    worker: Host
    nccl_env: str
    """The name that the shipped file chooses."""

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.head, self.worker

    def submit(self, *command: str, timeout: float = 300, check: bool = True) -> str:
        """From the laptop through the tunnel: `ray job submit -- COMMAND`; what the job said."""
        tunnel = self.bed.tunnel(self.file)
        try:
            submit = ["ray", "job", "submit", "--", *command]
            return self.bed.laptop.run(*submit, env=TOKEN, timeout=timeout, check=check).stdout
        finally:
            tunnel.close()

    @contextmanager
    def submitted(self, *command: str) -> Iterator[Background]:
        """The same, under way: its output grows while the job runs."""
        tunnel = self.bed.tunnel(self.file)
        try:
            submit = ["ray", "job", "submit", "--", *command]
            job = self.bed.laptop.start(*submit, env={**TOKEN, "PYTHONUNBUFFERED": "1"})
            try:
                yield job
            finally:
                job.close()
        finally:
            tunnel.close()

    def bring_home(self, said: str) -> pd.DataFrame:
        """Copy the rows down by the line that ends the job, typed on the laptop; its rows of `runs`."""
        (line,) = re.findall(COPY_DOWN, said, re.MULTILINE)
        typed = line.replace("CLUSTER.yaml", self.file)
        self.bed.laptop.run("sh", "-c", typed, cwd=Laptop.HOME)
        return self.table("runs")

    def table(self, name: str) -> pd.DataFrame:
        """A table of the results that came home."""
        return pd.read_parquet(self.bed.laptop.namespace.path(f"{Laptop.HOME}/results/{name}"))


def oci(bed: Testbed) -> Up:
    """`ray up clusters/oci-a10.yaml`. Only what a person fills in, the endpoint and the hosts' resources differ."""
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
    return Up(bed, file, head, worker, "oci-ethernet")


def oci_down(up: Up) -> None:
    """`ray down`: no instance, volume or process is left."""
    up.bed.laptop.run("ray", "down", "--yes", up.file)
    wait("the end of the instances", lambda: not up.bed.hosts, timeout=30)
    assert {instance.state for instance in up.bed.cloud.instances.values()} == {"TERMINATED"}
    assert not up.bed.cloud.boot_volumes
    assert not any(host.alive for host in up.hosts)


def on_prem(bed: Testbed) -> Up:
    """`ray up clusters/on-prem.yaml` over two machines. Only their addresses are filled in."""
    head, worker = bed.add_host("rack-1"), bed.add_host("rack-2")
    addresses = {"provider/head_ip": head.internal_ip, "provider/worker_ips": [worker.internal_ip]}
    file = bed.cluster_file("on-prem", addresses)
    assert differences(bed, "on-prem", file) == {"/provider/head_ip", "/provider/worker_ips/0"}

    bed.laptop.run("sh", "-c", GENERATE)
    bed.laptop.run("ray", "up", "--yes", file, timeout=400)
    wait("Ray on the worker", lambda: runs_ray(worker), timeout=400)
    return Up(bed, file, head, worker, "universal")


def on_prem_down(up: Up) -> None:
    """`ray down` ends Ray on the head; the worker follows when it misses it. The machines stay."""
    up.bed.laptop.run("ray", "down", "--yes", up.file)
    wait("the end of Ray on the head", lambda: not of_ray(up.head), timeout=60)
    wait("the end of Ray on the worker", lambda: not of_ray(up.worker), timeout=240)


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


def wait(what: str, condition: Callable[[], Any], timeout: float = 240) -> None:
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
