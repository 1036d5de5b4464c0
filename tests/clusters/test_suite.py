"""The real suite on clusters of two hosts: submitted from a laptop, rows copied home, a host that dies on the way."""

from __future__ import annotations

import time
from collections.abc import Callable

import pandas as pd
import pytest

from raybench.suite.catalog import whole_suite
from tests.clusters.bring_up import Up, oci, oci_down, on_prem, on_prem_down
from tests.clusters.leaks import assert_no_secret_leaked
from tests.testbed.bed import Testbed
from tests.testbed.host import Laptop

pytestmark = [pytest.mark.netns, pytest.mark.slow]
TABLES = ("runs", "ranks", "steps", "evaluations", "operations")
B = "b-ddp-two-nodes"
WIDE = ("naive", "bucketed", "torch-ddp")
"""Cases of B on two nodes."""
WHOLE = ["run-all", "--budget-s", "300"]
"""The budget costs rounds: one of every case remains, and every gate."""


def check(runs: pd.DataFrame) -> None:
    """Every case asked for has its row: B's are ok on two nodes, the others ok, or skipped with a reason."""
    tracks = [target.track.resolve("smoke") for target in whole_suite()]
    expected = {(track.track, case.name) for track in tracks for case in track.cases}
    assert {*zip(runs.track, runs.case, strict=True)} == expected
    ok, skipped = runs[runs.status == "ok"], runs[runs.status == "skipped"]
    assert len(ok) + len(skipped) == len(runs), runs[~runs.status.isin(["ok", "skipped"])][["track", "case", "reason"]]
    assert set(ok.gate) == {"passed"}
    assert skipped.reason.str.len().gt(0).all()
    b = runs[runs.track == B]
    assert set(b.status) == {"ok"}
    assert set(b[b.case.isin(WIDE)].num_nodes) == {2}
    assert set(b[~b.case.isin(WIDE)].num_nodes) == {1}


def try_by_hand(up: Up) -> None:
    """What docs/clusters.md has to type besides: a key to a bucket for the head, and whether a port is dropped."""
    bed = up.bed
    bed.laptop.write(".aws/credentials", "[default]\naws_secret_access_key = opens-the-bucket\n")
    bed.laptop.run("ray", "rsync-up", up.file, f"{Laptop.HOME}/.aws/", "~/.aws/")
    there = up.head.run("stat", "-c", "%a", f"/home/{up.head.user}/.aws/credentials").stdout
    assert there.strip() == "600"
    knock = f'timeout 5 bash -c "</dev/tcp/{up.worker.internal_ip}/12345"; echo $?'
    said = bed.laptop.run("ray", "exec", up.file, knock).stdout.splitlines()
    assert "1" in said


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("bring_up", "take_down"), [(oci, oci_down), (on_prem, on_prem_down)])
def test_from_a_laptop_and_home_again(
    bed: Testbed, bring_up: Callable[[Testbed], Up], take_down: Callable[[Up], None]
) -> None:
    up = bring_up(bed)
    listed = up.submit("raybench", "list", "--cluster")
    assert f"NCCL settings: {up.nccl_env} (" in listed
    for host in up.hosts:
        assert f"node {host.internal_ip} (" in listed

    try_by_hand(up)

    said = up.submit("raybench", *WHOLE, "--scale", "smoke", timeout=3000)
    print(said[-6000:])
    runs = up.bring_home(said)
    print(runs.groupby(["track", "status"], observed=True).size())
    check(runs)
    ranks = up.table("ranks").merge(runs[["track", "case", "round", "num_nodes"]], on=["track", "case", "round"])
    wide = ranks[(ranks.track == B) & (ranks.num_nodes == 2)]
    assert set(wide.node) == {host.internal_ip for host in up.hosts}
    assert set(zip(wide["rank"], wide.node_rank, strict=True)) == {(0, 0), (1, 0), (2, 1), (3, 1)}

    assert_no_secret_leaked(bed, up.hosts, {name: up.table(name) for name in TABLES}, listed + said)
    take_down(up)


@pytest.mark.timeout(1200)
def test_a_host_that_dies_in_mid_track_costs_its_case_and_what_needs_it(bed: Testbed) -> None:
    """The cloud goes on listing the dead instance, as it does for a crashed kernel."""
    up = oci(bed)
    with up.submitted("raybench", "run", "b", "a", "--scale", "smoke", "--repeats", "2") as job:
        job.wait_for(f"{B}:naive round 1:", 400)
        died = up.worker.internal_ip
        bed.pull(next(name for name, host in bed.hosts.items() if host is up.worker))
        begun = time.monotonic()
        job.wait_for("copy them down", 600)
        print(f"from the plug to the suite's end: {time.monotonic() - begun:.0f} s\n{job.output}")
        told = job.output
    assert f"cluster: {died} went away; going on with what remains" in told
    runs = up.bring_home(told)
    last = runs.sort_values("round").groupby(["track", "case"], observed=True).last()
    crashed = last[last.status == "crashed"]
    assert len(crashed) == 1
    assert set(crashed.index.get_level_values("case")) < set(WIDE)
    assert crashed.reason.str.contains(f" on {died} went away without a word", regex=False).all()
    rest = last.drop(crashed.index)
    assert set(rest.index.get_level_values("track")) == {B, "a-ddp-one-node"}
    assert (set(rest.status), set(rest.gate)) == ({"ok"}, {"passed"})
    # What was measured on both nodes stays so, and is not mixed with rounds on the one that is left.
    ok = runs[runs.status == "ok"].groupby(["track", "case"], observed=True).num_nodes.agg(["nunique", "max", "size"])
    assert set(ok["nunique"]) == {1}
    assert tuple(ok.loc[(B, "naive"), ["max", "size"]]) == (2, 1)
    assert f"{B}:naive: 1 of 2 rounds, whose nodes were 2 and would now be 1" in told
    oci_down(up)
