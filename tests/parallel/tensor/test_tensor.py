"""What tensor parallelism promises beside right gradients: initial values, dropout masks, bytes, memory, refusals."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from raybench.data.batches import Batches
from raybench.models.build import build_model, cross_entropy_sum
from raybench.parallel.parts import Sharing
from raybench.parallel.single import Single
from raybench.parallel.strategy import Context
from raybench.parallel.tensor.theory import block_activation_bytes, block_traffic, step_traffic
from raybench.parallel.tensor.vocabulary import VocabularyParallelLoss, VocabularyPart
from raybench.suite.track import Case, Layout, ModelConfig, ResolvedTrack, Workload
from raybench.worker.build import build_strategy, make_context, optimizer_factory, seed_randomness
from raybench.worker.memory import ActivationMeter
from tests.gating import gate
from tests.parallel.tensor.test_gate import SIXTHS, STRATEGIES, case, work
from tests.pool import Rank


def context(rank: Rank, work: Workload, case: Case) -> Context | None:
    mesh = rank.mesh(case.layout)
    if mesh is None:
        return None
    seed_randomness(work, mesh)
    return make_context(work, case, mesh, rank.device, optimizer_factory(work.optimizer))


def differing_values(rank: Rank, work: Workload, case: Case) -> list[str] | None:
    """Parameters whose parts, put together, are not the unsharded model's to the bit."""
    own = context(rank, work, case)
    if own is None:
        return None
    whole = dict(build_model(work, rank.device, work.seed).named_parameters())
    parts = {name: value.clone() for name, value in Single(own).full_parameters()}
    assert list(parts) == list(whole)
    return [name for name, value in parts.items() if not torch.equal(value, whole[name])]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_initial_values_are_the_unsharded_models_to_the_bit(pools, size):
    model = SIXTHS.model_copy(update={"num_kv_heads": 2 if size != 3 else 3})
    results = pools(4).run(differing_values, work(model), case("megatron", size))
    assert results[:size] == [[]] * size


def masks(rank: Rank, work: Workload, case: Case) -> tuple[list[bool], torch.Tensor, torch.Tensor]:
    """The mask of a block's dropout, what attention mixes of equal inputs, and the state that randomness is left in."""
    own = context(rank, work, case)
    block = own.model.blocks[0]
    mask = (block.dropout(torch.ones(64)) > 0).tolist()
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 12, 24, generator=generator) for _ in range(3)]
    return mask, block.attention.mix(*heads).detach(), torch.get_rng_state()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_is_alike_where_activations_are_and_differs_elsewhere(pools, strategy):
    model = SIXTHS.model_copy(update={"dropout": 0.5})
    results = pools(4).run(masks, work(model), case(strategy, 2, "naive"))
    (first, second, other, _) = [mask for mask, _, _ in results]
    assert (first == second) == (strategy == "megatron")
    assert first != other
    assert not torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])
    assert not torch.equal(results[0][2], results[2][2])


def dropout_gradients(rank: Rank, strategy: str, recompute: str) -> list[torch.Tensor]:
    model = SIXTHS.model_copy(update={"dropout": 0.3})
    workload = work(model, recompute=recompute)
    single = Single(context(rank, workload, case(strategy, 2)))
    single.step(Batches(workload, 1).batch(0, 0))
    return [gradient.clone() for _, gradient in single.full_gradients()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputation_draws_the_same_masks(pools, strategy):
    kept = pools(2).run(dropout_gradients, strategy, "none")[0]
    again = pools(2).run(dropout_gradients, strategy, "full")[0]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def recorded(rank: Rank, workload: Workload, case: Case) -> tuple[Counter, Counter, Counter] | None:
    """Calls and payload of one step over the tensor axis by kind; and calls of the first block alone."""
    mesh = rank.mesh(case.layout)
    if mesh is None:
        return None
    strategy = build_strategy(workload, case, mesh, rank.device)
    rank.recorder.operations.clear()
    with rank.recorder.recording(step=0):
        strategy.step(Batches(workload, 1).batch(0, 0))
    calls, payload, block = Counter(), Counter(), Counter()
    for operation in rank.recorder.operations:
        if operation.axis == "tensor":
            calls[operation.kind] += 1
            payload[operation.kind] += operation.payload_bytes
            block[operation.kind] += operation.label.startswith("blocks.0.")
    return calls, payload, block


TIMED = ModelConfig(name="timed", num_layers=2, width=24, ffn_width=8, vocabulary_size=61)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("model", "size"), [(SIXTHS, 2), (SIXTHS, 4), (TIMED, 2)], ids=["2", "4", "timed"])
def test_what_is_sent_is_what_theory_says_to_the_byte(pools, strategy, model, size):
    workload = work(model, num_micro_batches=2)
    results = pools(4).run(recorded, workload, case(strategy, size))
    expected = step_traffic(strategy, workload, size)
    for calls, payload, block in results[:size]:
        assert calls == {kind: traffic.calls for kind, traffic in expected.items()}
        assert payload == {kind: traffic.payload_bytes for kind, traffic in expected.items()}
        per_micro_batch = {kind: count // 2 for kind, count in block.items() if count}
        assert per_micro_batch == {kind: traffic.calls for kind, traffic in block_traffic(strategy, workload).items()}


@pytest.mark.parametrize(
    ("strategy", "repeated"),
    [("megatron", {"all_reduce": 1}), ("sequence", {"all_gather": 2, "reduce_scatter": 2})],
)
def test_recomputation_repeats_what_forward_sends(pools, strategy, repeated):
    workload = work(recompute="full")
    _, _, block = pools(2).run(recorded, workload, case(strategy, 2))[0]
    once = {kind: traffic.calls for kind, traffic in block_traffic(strategy, workload).items()}
    assert +block == {kind: calls + repeated[kind] for kind, calls in once.items()}


def activations(rank: Rank, workload: Workload, case: Case) -> int:
    mesh = rank.mesh(case.layout)
    strategy = build_strategy(workload, case, mesh, rank.device)
    with ActivationMeter(list(strategy.held_parameters())) as meter:
        strategy.step(Batches(workload, 1).batch(0, 0))
    return meter.peak_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_block_keeps_what_theory_says(pools, strategy):
    """The difference between models of three blocks and of one, within what norms and attention keep of each row."""
    wide = ModelConfig(num_layers=1, width=96, num_heads=4, ffn_width=384, vocabulary_size=61)
    by_depth = {}
    for num_layers in (1, 3):
        workload = work(wide.model_copy(update={"num_layers": num_layers}), sequence_length=64)
        by_depth[num_layers] = pools(2).run(activations, workload, case(strategy, 2))[0]
    counted = (by_depth[3] - by_depth[1]) / 2
    expected = block_activation_bytes(strategy, workload, 2)
    rows = 4 * 2 * 64 * (4 + 2)  # mean and deviation of two norms; the softmax's sum of two heads
    assert expected <= counted <= expected + rows


def forgotten_sum(rank: Rank, workload: Workload) -> str | None:
    """The gate's verdict where nobody sums the gradients that each rank has of its part of the sequence."""

    def make(own: Context) -> Single:
        own.parts._sharing = {name: Sharing(share=s.share) for name, s in own.parts._sharing.items()}
        return Single(own)

    return gate(rank, workload, case("sequence", 2), make).reason


def test_norms_that_nobody_sums_are_found(pools):
    assert "norm" in pools(2).run(forgotten_sum, work())[0]


def loss_and_gradient(rank: Rank, size: int, sequence: bool) -> tuple[float, torch.Tensor]:
    """Of vocabulary-parallel cross-entropy on this rank's columns of logits that all ranks know."""
    axis = rank.mesh(Layout(tensor=rank.world_size)).tensor
    logits, labels = known_logits(size)
    part = VocabularyPart.of(size, axis)
    own = F.pad(logits, (0, part.length * axis.size - size)).narrow(-1, part.begin, part.length)
    own = (own.transpose(0, 1) if sequence else own).contiguous().requires_grad_()
    loss = VocabularyParallelLoss(size, axis, sequence=sequence)(own, labels)
    (loss / 3).backward()
    gradient = own.grad.transpose(0, 1) if sequence else own.grad
    return float(loss), gradient


def known_logits(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(3, 5, size, generator=generator) * 200  # exponentials of whole ranks underflow
    labels = torch.randint(size, (3, 5), generator=generator)
    labels[0, :2] = torch.tensor([-100, size - 1])
    return logits - 500, labels


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("size", "num_ranks"), [(50257, 2), (50257, 4), (61, 3), (5, 4)])
def test_cross_entropy_over_a_vocabulary_that_does_not_divide(pools, size, num_ranks, sequence):
    results = pools(num_ranks).run(loss_and_gradient, size, sequence)
    logits, labels = known_logits(size)
    logits.requires_grad_()
    expected = cross_entropy_sum(logits, labels)
    (expected / 3).backward()
    gradient = torch.cat([part for _, part in results], -1)
    assert [loss for loss, _ in results] == pytest.approx([float(expected)] * num_ranks, rel=1e-6)
    assert torch.allclose(gradient[..., :size], logits.grad, atol=1e-6)
    assert not gradient[..., size:].any()


@pytest.mark.parametrize(
    ("model", "strategy", "size", "changes", "message"),
    [
        ({"num_heads": 3}, "megatron", 2, {}, "does not divide workload.model.num_heads 3 (nearest that fit: 1, 3)"),
        (
            {"num_heads": 6, "num_kv_heads": 3},
            "megatron",
            2,
            {},
            "workload.model.num_kv_heads 3 (nearest that fit: 1, 3)",
        ),
        ({"num_kv_heads": 2}, "torch-dtensor", 4, {}, "workload.model.num_kv_heads 2 (nearest that fit: 2)"),
        ({"ffn_width": 30}, "megatron", 4, {}, "workload.model.ffn_width 30 (nearest that fit: 3, 6)"),
        ({}, "sequence", 4, {"sequence_length": 9}, "workload.sequence_length 9 (nearest that fit: 3)"),
        ({"name": "tests.models:Small"}, "megatron", 2, {}, "cannot cut tests.models:Small"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(model, strategy, size, changes, message):
    workload = work(SIXTHS.model_copy(update=model), **changes)
    with pytest.raises(ValidationError, match="layout") as refused:
        ResolvedTrack(track="t", title="", question="", scale="smoke", workload=workload, cases=(case(strategy, size),))
    assert message in str(refused.value)
