"""The GPT: sizes, values, and how much arithmetic it does."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raybench.errors import RequestError
from raybench.models.build import build_model, make_loss_sum
from raybench.models.flops import flops_per_token, matrix_parameters, num_parameters
from raybench.models.gpt import GPT
from raybench.suite.track import ModelConfig, Workload
from tests.gating import TINY, workload

CPU = torch.device("cpu")


def test_the_published_model_has_162_million_parameters():
    published = Workload()
    with torch.device("meta"):
        model = GPT(published.model, published.sequence_length)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == num_parameters(published) == 162_349_056


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_once(tied):
    work = workload(TINY.model_copy(update={"tied_head": tied}))
    model = build_model(work, CPU, seed=1)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(work)
    assert (model.head.projection.weight is model.embedding.token.weight) == tied


def test_values_depend_on_the_seed_alone():
    one, other, third = (build_model(workload(), CPU, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.embedding.token.weight, third.embedding.token.weight)


def test_initial_values_are_gpt2s():
    work = workload(ModelConfig(num_layers=2, width=128, num_heads=4, ffn_width=512, vocabulary_size=500))
    model = build_model(work, CPU, seed=0)
    block = model.blocks[1]
    assert float(block.attention.query_key_value.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.projection.weight.std()) == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))
    assert torch.equal(block.attention.projection.bias, torch.zeros(128))
    loss = make_loss_sum(model, "fp32")
    ids = torch.randint(500, (4, 9))
    assert float(loss(model, {"input_ids": ids}, ids)) / 36 == pytest.approx(math.log(500), rel=0.02)


def test_attention_looks_only_back():
    model = build_model(workload(), CPU, seed=0)
    ids = torch.randint(61, (1, 9))
    changed = ids.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 61
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_recomputation_changes_nothing_but_memory():
    ids = torch.randint(61, (2, 9))
    gradients = []
    for recompute in ("none", "full"):
        work = workload(recompute=recompute)
        model = build_model(work, CPU, seed=0)
        make_loss_sum(model, "fp32")(model, {"input_ids": ids}, ids).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_flops_are_what_torch_counts():
    """Attention once, the head once, no embedding: MFU above 100 % has come from each of these."""
    work = workload(
        ModelConfig(num_layers=3, width=32, num_heads=4, ffn_width=48, vocabulary_size=77),
        sequence_length=16,
        micro_batch_size=2,
    )
    model = build_model(work, CPU, seed=0)
    ids = torch.randint(77, (2, 16))
    with FlopCounterMode(display=False) as counter:
        make_loss_sum(model, "fp32")(model, {"input_ids": ids}, ids).backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in by_operation.items() if "attention" in str(op))
    products = counter.get_total_flops() - attention
    conventions = flops_per_token(work)
    assert products == conventions["6n"] * 32 == 6 * matrix_parameters(work.model) * 32
    assert conventions["non_causal"] - conventions["6n"] == 12 * 3 * 32 * 16


def test_own_models_are_found_or_named():
    assert type(build_model(workload("Small"), CPU, 0)).__name__ == "Small"
    with pytest.raises(RequestError, match=r"workload.model.name: 'tests.models:Smal' cannot be imported"):
        build_model(workload("Smal"), CPU, 0)
    wrong = Workload(model=ModelConfig(name="tests.models:torch"))
    with pytest.raises(RequestError, match=r"'tests\.models:torch' cannot be called with options"):
        build_model(wrong, CPU, 0)
    number = Workload(model=ModelConfig(name="builtins:dict"))
    with pytest.raises(RequestError, match=r"returned dict, not a torch.nn.Module"):
        build_model(number, CPU, 0)
