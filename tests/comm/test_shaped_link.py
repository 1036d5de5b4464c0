"""On two hosts with a shaped link between them: the fitted bandwidth is what a plain TCP stream gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.clusters.conftest import bed
from tests.testbed.bed import Testbed
from tests.testbed.host import REPOSITORY, Host
from tests.testbed.test_testbed import stream

__all__ = ["bed"]

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(540)]
PORT = 6379
RAY = Path(sys.executable).with_name("ray")


def environment(host: Host) -> dict[str, str]:
    return {
        "HOME": f"/home/{host.user}",
        "PATH": f"{RAY.parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }


def start_ray(head: Host, worker: Host) -> None:
    """A cluster of both hosts, with two CPUs each."""
    for host in (head, worker):
        host.run("iptables", "-F", "INPUT")
    usual = ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=100000000"]
    at_head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--node-ip-address={head.internal_ip}"]
    at_worker = [f"--address={head.internal_ip}:{PORT}", f"--node-ip-address={worker.internal_ip}"]
    head.run(str(RAY), "start", *at_head, *usual, env=environment(head), timeout=120)
    worker.run(str(RAY), "start", *at_worker, *usual, env=environment(worker), timeout=120)


def test_fitted_bandwidth_is_a_stream_s_goodput(bed: Testbed) -> None:
    one, two = bed.add_host("one"), bed.add_host("two")
    start_ray(one, two)
    for host in (one, two):
        host.shape("400mbit")
    goodput = [stream(one, two, 150), stream(two, one, 150)]
    command = ["-m", "raybench", "comm", "--groups", "across", "--dtypes", "fp32", "--ranks-per-node", "1", "--json"]
    command += ["--operations", "send,all-reduce,all-gather,reduce-scatter", "--sizes", "4K:16M:2", "--repeats", "1"]
    command += ["--budget-s", "160", "--no-overlap", "--link-gbps", "0.4", "--results", "/tmp/results"]
    address = {"RAY_ADDRESS": f"{one.internal_ip}:{PORT}"}
    done = one.run(sys.executable, *command, env={**environment(one), **address}, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    goodput += [stream(one, two, 150), stream(two, one, 150)]
    body = json.loads(done.stdout)
    plain = sum(goodput) / len(goodput) * 1e6 / 8

    fitted = pd.DataFrame(body["links"]).groupby("kind").last()
    rows = pd.DataFrame(body["rows"])
    largest = rows[rows.payload_bytes == rows.payload_bytes.max()].set_index("kind")
    for kind in ("send", "all_reduce", "all_gather"):
        print(f"{kind}: fitted {fitted.bus_bandwidth_bytes_per_s[kind] / plain:.3f} of {plain / 1e6:.2f} MB/s")
    print(largest[["network_bytes", "loopback_bytes", "fraction_of_link"]])
    assert (rows.num_wrong == 0).all()
    assert set(rows.interface) == {"eth0"}
    bandwidth = fitted.bus_bandwidth_bytes_per_s / plain
    assert bandwidth["send"] == pytest.approx(1, abs=0.03)
    assert 0.9 < bandwidth["all_reduce"] < 1.03  # gloo's two phases have a gap between them
    # gloo's reduce-scatter is an all-reduce: half of its bus bandwidth, and the interface shows twice the bytes.
    assert bandwidth["reduce_scatter"] == pytest.approx(bandwidth["all_reduce"] / 2, rel=0.08)
    sent = largest.network_bytes / largest.payload_bytes
    assert sent["all_gather"] == pytest.approx(1, abs=0.05)
    assert sent["all_reduce"] == pytest.approx(2, abs=0.1)
    assert sent["reduce_scatter"] == pytest.approx(2, abs=0.1)
    assert 0.9 < largest.fraction_of_link["send"] < 1.05  # the shaper lets 1 MB through at once
