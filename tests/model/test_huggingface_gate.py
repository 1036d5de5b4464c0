"""Hugging Face models under every axis compute what transformers computes on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel
from transformers.models.bert.modeling_bert import BertPooler

from raybench.data.batches import IGNORED_LABEL, Batches
from raybench.models.sources import resolve
from raybench.parallel.fit import check_fit
from raybench.parallel.registry import REGISTRY
from raybench.suite.track import Case, DataConfig, Layout, ModelConfig, Workload
from raybench.worker.build import build_strategy, make_context, optimizer_factory
from raybench.worker.gate import GateResult
from tests.gating import gate
from tests.hub import BERT, CLASSIFIER, DISTILBERT, FAMILIES, LLAMA, classified, minilm_folder
from tests.pool import Rank

SHARDED = [name for name in ("zero1", "zero2", "zero3") if name in REGISTRY["data"]]
DATA = ["accumulated", "bucketed", *SHARDED, "torch-ddp"]
PIPELINES = [("llama", "gpipe", 3), ("llama-classifier", "zero-bubble", 2), ("distilbert", "one-f-one-b", 3)]
PIPELINES += [(name, "one-f-one-b", 2) for name in FAMILIES]


def passed(results: list[GateResult | None]) -> None:
    assert results[0] is not None
    assert results[0].passed, results[0].reason


RAGGED = DataConfig(min_length=1)
"""Sequences of which anything from one token on counts."""


@pytest.mark.parametrize("strategy", DATA)
@pytest.mark.parametrize("name", ["llama", "distilbert"])
def test_data_strategies(pools, name, strategy):
    """Three micro-batches a rank, with padded sequences."""
    work = classified(FAMILIES[name], num_micro_batches=3, clip_gradient_norm=0.5)
    one = Case(name=strategy, layout=Layout(data=2), strategy={"data": strategy})
    passed(pools(2).run(gate, work, one))


@pytest.mark.parametrize(("name", "schedule", "stages"), PIPELINES)
def test_pipelines(pools, name, schedule, stages):
    """Every stage makes masks, positions and rotary tables for itself; the Llama's two ends share their embedding."""
    work = classified(FAMILIES[name], num_micro_batches=4, clip_gradient_norm=0.5)
    one = Case(name=schedule, layout=Layout(pipeline=stages), strategy={"pipeline": schedule})
    passed(pools(4).run(gate, work, one))


@pytest.mark.parametrize("name", [*FAMILIES, "one-kv-head"])
def test_tensor_groups(pools, name):
    model = LLAMA.model_copy(update={"num_kv_heads": 1}) if name == "one-kv-head" else FAMILIES[name]
    work = classified(model, num_micro_batches=2, clip_gradient_norm=0.5)
    one = Case(name="megatron", layout=Layout(tensor=2), strategy={"tensor": "megatron"})
    passed(pools(2).run(gate, work, one))


HYBRIDS = [
    (DISTILBERT, Layout(pipeline=2, tensor=2), {"pipeline": "one-f-one-b", "tensor": "megatron"}),
    (LLAMA, Layout(data=2, pipeline=2), {"data": "bucketed", "pipeline": "one-f-one-b"}),
    (LLAMA, Layout(pipeline=2, tensor=2), {"pipeline": "gpipe", "tensor": "megatron"}),
    (CLASSIFIER, Layout(data=2, tensor=2), {"data": "bucketed", "tensor": "megatron"}),
]


@pytest.mark.parametrize(("model", "layout", "strategy"), HYBRIDS)
def test_axes_together(pools, model, layout, strategy):
    work = classified(model, num_micro_batches=2, clip_gradient_norm=0.5)
    passed(pools(4).run(gate, work, Case(name="hybrid", layout=layout, strategy=strategy)))


@pytest.mark.parametrize("changes", [{"recompute": "full"}, {"data": "longest"}])
@pytest.mark.parametrize("one", ["bucketed", "one-f-one-b", "megatron"])
def test_recomputation_and_uneven_batches(pools, one, changes):
    if "data" in changes:
        changes = {"data": DataConfig(name="reviews", num_samples=60, padding="longest"), "sequence_length": 64}
    work = classified(DISTILBERT, num_micro_batches=2, **changes)
    axis = {"bucketed": "data", "one-f-one-b": "pipeline", "megatron": "tensor"}[one]
    passed(pools(2).run(gate, work, Case(name=one, layout=Layout(**{axis: 2}), strategy={axis: one})))


@pytest.mark.parametrize("one", ["bucketed", "one-f-one-b", "megatron"])
def test_a_loss_is_weighted_by_its_tokens(pools, one):
    """Where micro-batches and ranks hold different numbers of them, a mean of means would be another loss."""
    work = classified(LLAMA, num_micro_batches=3, data=RAGGED)
    counts = [int((m.labels != IGNORED_LABEL).sum()) for m in Batches(work, 2).global_batch(0).micro_batches]
    assert len(set(counts)) > 1
    axis = {"bucketed": "data", "one-f-one-b": "pipeline", "megatron": "tensor"}[one]
    passed(pools(2).run(gate, work, Case(name=one, layout=Layout(**{axis: 2}), strategy={axis: one})))


def test_the_gates_reviews_are_padded_and_have_a_label_each():
    micro_batches = Batches(classified(CLASSIFIER, num_micro_batches=3), 2).global_batch(0).micro_batches
    assert len({int(m.inputs["attention_mask"].sum()) for m in micro_batches}) > 1
    assert all(int((m.labels != IGNORED_LABEL).sum()) == 2 for m in micro_batches)


def _minilm(**changes: Any) -> Workload:
    return classified(ModelConfig(name=str(minilm_folder())), micro_batch_size=3, num_micro_batches=1, **changes)


def last_hidden_states(rank: Rank, work: Workload, one: Case) -> torch.Tensor | None:
    """What reaches the pooler in the first step of a case, on the ranks whose model has one."""
    mesh = rank.mesh(one.layout)
    assert mesh is not None
    seen: list[torch.Tensor] = []

    def look(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], _: object) -> None:
        if isinstance(module, BertPooler):
            seen.append(arguments[0].detach().clone())

    strategy = build_strategy(work, one, mesh, rank.device)
    hook = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        strategy.step(Batches(work, one.layout.data).batch(0, mesh.data.index))
    finally:
        hook.remove()
        strategy.close()
    return seen[0] if seen and mesh.data.index == 0 else None


MINILM_CASES = {
    "stages": Case(name="stages", layout=Layout(pipeline=2), strategy={"pipeline": "one-f-one-b"}),
    "tensor": Case(name="tensor", layout=Layout(tensor=2), strategy={"tensor": "megatron"}),
    **{name: Case(name=name, layout=Layout(data=2), strategy={"data": name}) for name in ("bucketed", *SHARDED[-1:])},
}


@pytest.mark.parametrize("name", MINILM_CASES)
def test_the_trained_minilm_gives_the_same_output_through_every_axis(pools, name):
    work = _minilm()
    one = MINILM_CASES[name]
    batch = Batches(work, one.layout.data).batch(0, 0).micro_batches[0]
    with torch.no_grad():
        expected = AutoModel.from_pretrained(minilm_folder()).eval()(**batch.inputs).last_hidden_state
    outputs = [output for output in pools(2).run(last_hidden_states, work, one) if output is not None]
    assert outputs
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def ends_after_steps(rank: Rank, work: Workload, num_steps: int) -> tuple[torch.Tensor, int] | None:
    """The token embedding as this rank's stage holds it after some steps, and how many copies it has."""
    one = Case(name="tied", layout=Layout(pipeline=2), strategy={"pipeline": "one-f-one-b"})
    mesh = rank.mesh(one.layout)
    if mesh is None:
        return None
    context = make_context(work, one, mesh, rank.device, optimizer_factory(work.optimizer))
    names = [name for name, p in context.model.named_parameters() if p.shape[0] == work.model.vocabulary_size]
    assert len(names) == 1
    strategy = build_strategy(work, one, mesh, rank.device)
    source = Batches(work, 1)
    for step in range(num_steps):
        strategy.step(source.batch(step, 0))
    weight = dict(strategy.model.named_parameters())[names[0]].detach().clone()
    strategy.close()
    return weight, mesh.pipeline.index


def test_a_tied_embedding_stays_equal_on_both_ends_of_a_pipeline(pools):
    """At the start and after twenty steps, to the last bit; SmolLM2's embedding is tied like this one."""
    work = classified(LLAMA, num_micro_batches=2)
    for num_steps in (0, 20):
        (first, _), (last, _) = pools(2).run(ends_after_steps, work, num_steps)
        assert torch.equal(first, last)


@pytest.mark.parametrize(
    ("model", "tensor", "said"),
    [
        (ModelConfig(name="smollm2-360m"), 2, "layout.tensor: 2 does not divide workload.model.num_heads 15"),
        (ModelConfig(name="smollm2-360m"), 3, "layout.tensor: 3 does not divide workload.model.ffn_width 2560"),
        (ModelConfig(name="distilbert"), 5, "layout.tensor: 5 does not divide workload.model.ffn_width 3072"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_by_name(model, tensor, said):
    work = Workload(model=resolve(model), data=DataConfig(name="reviews"))
    one = Case(name="tensor", layout=Layout(tensor=tensor), strategy={"tensor": "megatron"})
    with pytest.raises(ValueError, match="nearest that fit") as caught:
        check_fit(work, one)
    assert said in str(caught.value)


def test_smollm2_goes_over_five_ranks():
    work = Workload(model=resolve(ModelConfig(name="smollm2-360m")), data=DataConfig(name="reviews"))
    check_fit(work, Case(name="tensor", layout=Layout(tensor=5), strategy={"tensor": "megatron"}))


def test_sequence_parallelism_is_refused_by_name():
    work = Workload(model=resolve(BERT), sequence_length=48, data=DataConfig(name="reviews"))
    with pytest.raises(ValueError, match=r"'sequence' does not cut bert \(allowed: megatron\)"):
        check_fit(work, Case(name="tensor", layout=Layout(tensor=2), strategy={"tensor": "sequence"}))
