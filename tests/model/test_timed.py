"""The timed model: what it takes, and that its values are real."""

from __future__ import annotations

import time

import pytest
import torch

from raybench.models.build import build_model
from raybench.parallel.pipeline.backward import Pass, SplitPass, leaf
from raybench.suite.track import ModelConfig, Workload

CPU = torch.device("cpu")
TIMES = {"forward_ms": 30, "input_gradient_ms": 20, "weight_gradient_ms": 40}


def make(**options: float) -> Workload:
    model = ModelConfig(name="timed", num_layers=2, width=32, ffn_width=24, vocabulary_size=17, options=options)
    return Workload(model=model, sequence_length=8, micro_batch_size=2)


def timed(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


@pytest.mark.parametrize("rows", [2, 4])
def test_blocks_wait_as_long_as_they_are_told(rows):
    """Never less; in proportion to the sequences; whole and in two halves."""
    blocks = build_model(make(**TIMES), CPU, seed=0).blocks
    hidden = torch.randn(rows, 8, 32)
    share = rows / 2

    def forward(entry):
        for block in blocks:
            entry = block(entry)
        return entry

    whole = leaf(hidden)
    assert timed(lambda: forward(whole)) >= 0.060 * share
    output = forward(whole)
    assert timed(lambda: Pass(whole, output).backward(torch.ones_like(output))) >= 0.120 * share
    entry = leaf(hidden)
    split = SplitPass(entry, forward(entry))
    assert 0.040 * share <= timed(lambda: split.input_gradient(torch.ones_like(output)))
    assert 0.080 * share <= timed(split.weight_gradient)


def test_every_weight_has_a_gradient_of_its_size_that_depends_on_the_data():
    model = build_model(make(), CPU, seed=0)
    gradients = []
    for seed in (1, 2):
        model.zero_grad()
        ids = torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(seed))
        model(ids).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.blocks.parameters()])
        assert all(g.shape == p.shape for g, p in zip(gradients[-1], model.blocks.parameters(), strict=True))
        assert all(int((g == 0).sum()) == 0 for g in gradients[-1])
    assert all(not torch.equal(a, b) for a, b in zip(*gradients, strict=True))
