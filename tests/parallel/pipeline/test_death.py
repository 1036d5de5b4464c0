"""A stage that dies in the middle of a schedule ends its case on all ranks, and the row says which stage it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TRACK = """
title: A stage that dies
question: Which?
workload:
  model: {name: "tests.models:Doomed", vocabulary_size: 31}
  sequence_length: 9
  micro_batch_size: 2
  num_micro_batches: 4
measure: {num_steps: 2, num_warmup_steps: 1, num_rounds: 1, timeout_s: 60}
cases:
  - name: one-f-one-b
    layout: {pipeline: 3}
    strategy: {pipeline: one-f-one-b}
    options: {layers: [1, 1, 1]}
  - name: bucketed
    layout: {data: 2}
    strategy: {data: bucketed}
"""


@pytest.mark.slow
def test_the_row_names_the_stage_that_died(tmp_path):
    (tmp_path / "doomed.yaml").write_text(TRACK)
    command = [sys.executable, "-m", "raybench", "run", str(tmp_path / "doomed.yaml"), "--scale", "smoke", "--json"]
    command += ["--launcher", "torchrun", "--results", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert done.returncode == 1
    assert rows["one-f-one-b"]["status"] == "crashed"
    assert "rank 2" in rows["one-f-one-b"]["reason"]
    assert "stage 2: forward of micro-batch 2" in rows["one-f-one-b"]["reason"]
    assert rows["bucketed"]["status"] == "ok"
