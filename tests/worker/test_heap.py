"""The heap keeps what tensors give back until it is told to give it back itself."""

from __future__ import annotations

import os
import subprocess
import sys

STEPS = """
import os, resource, sys
import torch
from raybench.worker.heap import give_back_freed_memory, keep_freed_memory

def step():
    for size in (17, 25, 9, 3, 17, 17):
        tensors = [torch.ones(size << 18) for _ in range(8)]
        del tensors

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "kept":
    keep_freed_memory()
before = resident()
step(); step()
begun = faults()
step()
new = faults() - begun
held = resident() - before
give_back_freed_memory()
print(new, held, resident() - before)
"""


def run(how: str) -> list[int]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    said = subprocess.run(
        [sys.executable, "-c", STEPS, how], env=environment, text=True, check=True, capture_output=True, timeout=120
    )
    return [int(number) for number in said.stdout.split()]


def test_steps_alike_take_no_new_pages():
    new, held, left = run("kept")
    assert new < 50
    assert held > 150 << 20
    assert left < 20 << 20


def test_without_it_every_step_takes_new_ones():
    """What the setting is for: were this to pass some day, it would not be needed."""
    assert run("as it is")[0] > 1000
