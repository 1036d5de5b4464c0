"""Ray on two hosts without a cluster file: `ray start` on each, and commands beside it on the head."""

from __future__ import annotations

import sys

from tests.testbed.bed import Testbed
from tests.testbed.host import REPOSITORY, Host

HOME = "/root"


def environment(**more: str) -> dict[str, str]:
    """Of Ray itself, whose workers inherit it, and of commands."""
    path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": HOME, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(REPOSITORY), **more}


def start_ray(host: Host, *arguments: str, **more: str) -> None:
    host.run("iptables", "-F", "INPUT")
    options = [f"--node-ip-address={host.internal_ip}", "--num-cpus=2", "--object-store-memory=100000000"]
    host.run("ray", "start", *options, *arguments, env=environment(**more), cwd=HOME, timeout=120)


def two_hosts(bed: Testbed, **more: str) -> tuple[Host, Host, str]:
    """Head and worker, both with Ray, whose workers have `more` in their environment; and the head's address."""
    head, worker = bed.add_host("rack-1"), bed.add_host("rack-2")
    address = f"{head.internal_ip}:6379"
    start_ray(head, "--head", "--port=6379", "--include-dashboard=false", **more)
    start_ray(worker, f"--address={address}", **more)
    return head, worker, address
