"""Two hosts whose link is held to a rate: track B's all-reduce fills it, and what stays on one host does not notice."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pandas as pd
import pytest

from tests.clusters.conftest import bed as bed
from tests.testbed.bed import Testbed
from tests.testbed.host import Host
from tests.testbed.ray_by_hand import HOME, environment, two_hosts
from tests.testbed.streams import streams

# 17 million parameters, so that a step has 68 MB to send, and few tokens, so that it has little to compute meanwhile.
MODEL = {"num_layers": 4, "width": 512, "num_heads": 8, "ffn_width": 2048, "vocabulary_size": 8192}
SETTINGS = [f"workload.model.{key}={value}" for key, value in MODEL.items()]
SETTINGS += ["workload.sequence_length=16", "workload.micro_batch_size=1", "measure.num_instrumented_steps=4"]
MEASURE = ["--scale", "smoke", "--steps", "3", "--warmup", "1", "--repeats", "2", "--json"]
RATE = "1gbit"
BURST_BYTES = 1 << 20
"""What the shaper lets through at once after a pause (`Host.shape`): it does not count for the rate."""


@dataclass
class Measured:
    """One case of track B."""

    bytes_per_s: float
    """What its all-reduces move, counted by their algorithm: median over steps, from where all ranks have begun."""
    payload_bytes: int
    """Of the recorded steps."""
    sent_bytes: int
    """That both hosts sent on their link, in all."""


def run(hosts: tuple[Host, Host], address: str, case: str) -> Measured:
    head = hosts[0]
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "raybench", "run", f"b:{case}", *MEASURE, *settings, "--results", f"{HOME}/{case}"]
    before = sum(host.bytes_sent() for host in hosts)
    done = head.run(*command, env=environment(RAY_ADDRESS=address), cwd=HOME, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["status"] for row in json.loads(done.stdout)["rows"]] == ["ok"]
    sent = sum(host.bytes_sent() for host in hosts) - before
    operations = pd.read_parquet(head.namespace.path(f"{HOME}/{case}/operations"))
    suite = operations.suite_id.max()
    reduced = operations[
        (operations.suite_id == suite) & (operations.kind == "all_reduce") & (operations.axis == "data")
    ]
    reduced = reduced[reduced.label.str.startswith("bucket")]
    steps = []
    for _, step in reduced.groupby(["round", "step"]):
        by_rank = step.groupby("rank")
        seconds = (step.end_ns.max() - by_rank.begin_ns.min().max()) / 1e9
        steps.append((by_rank.wire_bytes.sum().max() - BURST_BYTES) / seconds)
    payload = int(reduced[reduced["rank"] == 0].payload_bytes.sum())
    return Measured(float(pd.Series(steps).median()), payload, sent)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.flaky(reruns=2)
def test_all_reduce_over_two_hosts_fills_their_link(bed: Testbed) -> None:
    head, worker, address = two_hosts(bed)
    hosts = (head, worker)
    free = run(hosts, address, "bucketed-one-node")
    for host in hosts:
        host.shape(RATE)
    both_ways = ((head, worker), (worker, head))
    before = streams(*both_ways, megabytes=100, ahead=4)
    wide = run(hosts, address, "bucketed")
    narrow = run(hosts, address, "bucketed-one-node")
    after = streams(*both_ways, megabytes=100, ahead=4)
    link = max(*before, *after)
    print(
        f"{RATE}: TCP, both ways at once, up to {link / 1e6:.1f} MB/s; all-reduce over two hosts "
        f"{wide.bytes_per_s / 1e6:.1f} MB/s, {wide.bytes_per_s / link:.3f} of it; on one host "
        f"{narrow.bytes_per_s / 1e6:.0f} MB/s, with {narrow.sent_bytes / narrow.payload_bytes:.4f} of its bytes on the "
        f"link, and {free.bytes_per_s / 1e6:.0f} MB/s before"
    )
    assert wide.bytes_per_s >= 0.97 * link
    assert narrow.bytes_per_s > 2 * link
    assert narrow.sent_bytes < 0.05 * narrow.payload_bytes
