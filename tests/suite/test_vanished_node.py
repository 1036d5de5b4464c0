"""A node goes away in the middle of a track: real hosts, Ray over both, the plug of one pulled."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest

from tests.clusters.conftest import bed as bed
from tests.testbed.bed import Testbed
from tests.testbed.ray_by_hand import HOME, environment, two_hosts

TRACK = """
title: Two nodes
question: Which?
workload: {sequence_length: 16}
measure: {num_rounds: 3, timeout_s: 120}
cases:
  - {name: wide, layout: {data: 4, nodes: 2}, strategy: {data: naive}}
  - {name: narrow, layout: {data: 2}, strategy: {data: bucketed}}
  - {name: other, layout: {data: 2}, strategy: {data: bucketed}}
"""


class Said:
    """What a running command says on standard error, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.lines.extend(iter(self._process.stderr.readline, ""))

    def wait_for(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in list(self.lines)):
            assert self._process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.1)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_case_is_crashed_by_name_and_the_suite_goes_on_with_the_other_node(bed: Testbed) -> None:
    head, worker, address = two_hosts(bed, PLAY_ROUND_S="4")
    head.namespace.path(f"{HOME}/mine.yaml").write_text(TRACK)
    command = [sys.executable, "-m", "tests.suite.play", "run", "mine.yaml", "--scale", "smoke", "--json"]
    driver = subprocess.Popen(
        head.namespace.enter(command, environment(RAY_ADDRESS=address), HOME),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = Said(driver)
    try:
        said.wait_for("mine:other round 1:", 180)
        time.sleep(1)  # into the second round of the case that is on both
        pulled = time.monotonic()
        bed.pull("rack-2")
        assert driver.stdout is not None
        body = json.loads(driver.stdout.read())
        took = time.monotonic() - pulled
    finally:
        driver.kill()
        driver.wait()
    print(f"from the plug to the suite's end: {took:.0f} s\n{''.join(said.lines)}")
    rows = {row["case"]: row for row in body["rows"]}
    assert body["exit_code"] == 1
    assert (rows["wide"]["status"], rows["wide"]["rounds"]) == ("crashed", 1)
    assert f" on {worker.internal_ip} went away without a word" in rows["wide"]["reason"]
    for name in ("narrow", "other"):
        assert (rows[name]["status"], rows[name]["rounds"]) == ("ok", 3)
    told = "".join(said.lines)
    assert f"cluster: {worker.internal_ip} went away; going on with what remains" in told
    runs = pd.read_parquet(head.namespace.path(f"{HOME}/results/runs"))
    assert set(runs[runs.case.isin(["narrow", "other"])].attempt) == {1, 2}  # one new job, and no third
    ranks = pd.read_parquet(head.namespace.path(f"{HOME}/results/ranks"))
    broken = ranks[(ranks.case == "wide") & (ranks["round"] == 2)]
    assert sorted(broken["rank"]) == [0, 1, 2, 3]
    assert broken.last_operation.notna().all()
    assert broken[broken.node == head.internal_ip]["stack"].notna().all()
