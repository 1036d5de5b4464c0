"""`clusters/node.sh` on a host as a cloud image boots it."""

from __future__ import annotations

import subprocess

import pytest

from tests.clusters.conftest import ROOT
from tests.testbed.bed import Testbed

SCRIPT = ROOT / "clusters" / "node.sh"


def test_syntax() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.netns
def test_on_a_host(bed: Testbed) -> None:
    host = bed.add_host("rack-1")
    peer = bed.add_host("rack-2")

    def sh(script: str) -> str:
        command = f". {SCRIPT}; {script}"
        env = {"HOME": f"/home/{host.user}"}
        as_user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
        return host.run(*as_user, "bash", "-c", command, env=env).stdout

    # The firewall lets the subnet in and nobody else, and is changed once.
    listener = host.namespace.listen("0.0.0.0", 7777)
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 7777), 2)"
    arguments = ("/opt/raybench/venv/bin/python", "-c", connect, host.internal_ip)
    assert peer.run(*arguments, check=False).returncode != 0
    sh("_raybench_firewall && _raybench_firewall")
    assert peer.run(*arguments, check=False).returncode == 0
    assert bed.laptop.run("python", "-c", connect, host.internal_ip, check=False).returncode != 0
    assert host.run("iptables", "-S", "INPUT").stdout.count("-s 10.77.0.0/24 -j ACCEPT") == 1
    listener.close()

    # What Ray starts with.
    shown = sh("OMP_NUM_THREADS=1; export OMP_NUM_THREADS; raybench_env oci-rdma; env")
    assert "GLOO_SOCKET_IFNAME=eth0" in shown
    assert "NCCL_SOCKET_IFNAME==eth0" in shown
    assert "RAYBENCH_NCCL_ENV=oci-rdma" in shown
    assert "RAY_AUTH_MODE=token" in shown
    assert "OMP_NUM_THREADS" not in shown
    assert "PATH=/opt/raybench/venv/bin:" in shown

    # Shells find it, once; the token is for its owner only.
    sh("mkdir -p ~/.ray; echo secret > ~/.ray/auth_token; chmod 644 ~/.ray/auth_token")
    sh("_raybench_shells; _raybench_shells")
    assert host.run("grep", "-c", "raybench_env", f"/home/{host.user}/.bashrc").stdout.strip() == "1"
    assert host.run("stat", "-c", "%a", f"/home/{host.user}/.ray/auth_token").stdout.strip() == "600"

    # No GPU, no driver to install; nothing runs, nothing to stop.
    assert sh("_raybench_driver && _raybench_clock && raybench_stop && echo fine").strip() == "fine"
