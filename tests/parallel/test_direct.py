"""Weight gradients made in their buckets equal those that autograd makes and moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from raybench.data.batches import Batches
from raybench.parallel.data.bucketed import Bucket
from raybench.parallel.data.direct import make_in_place, restore
from raybench.parallel.parts import ALONE
from raybench.worker.build import build_strategy
from raybench.worker.communication import Axis
from tests.gating import data_case, workload
from tests.pool import Rank

NO_AXIS = cast(Axis, None)  # nothing is sent here


class Twice(nn.Module):
    """A layer used twice, and a weight that embedding and head share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.once = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.layer(self.embedding(ids))))
        logits: Tensor = self.head(torch.tanh(self.once(hidden)))
        return logits


def plain(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, **options), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def bucketed(model: nn.Module) -> tuple[Bucket, list[nn.Module]]:
    bucket = Bucket("bucket 0", list(model.parameters()), ALONE, NO_AXIS)
    for parameter in bucket.parameters:
        parameter.register_post_accumulate_grad_hook(bucket.take)
    return bucket, make_in_place(model, dict.fromkeys(bucket.parameters, bucket))


def steps(model: nn.Module, num_micro_batches: int) -> Iterator[list[Tensor]]:
    """Two steps on the same batches; the gradients of each."""
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        for seed in range(num_micro_batches):
            ids = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(seed))
            model(ids).square().sum().backward()
        yield [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def models(make: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("make", [Twice, plain])
def test_gradients_are_those_of_autograd(make: Any, num_micro_batches: int) -> None:
    ours, theirs = models(make)
    bucket, replaced = bucketed(ours)
    assert len(replaced) == (4 if make is Twice else 3)
    for found, expected in zip(steps(ours, num_micro_batches), steps(theirs, num_micro_batches), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for parameter, view in zip(bucket.parameters, bucket.split(bucket.gradient), strict=True):
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == view.data_ptr()
        assert not bucket.placed


def test_a_gradient_made_in_place_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(Bucket, "take", lambda self, p: taken.append(p.grad.data_ptr()))
    model = nn.Linear(6, 5)
    bucket, _ = bucketed(model)
    model(torch.ones(3, 6)).sum().backward()
    assert bucket.views[model.weight].data_ptr() in taken
    assert bucket.views[model.bias].data_ptr() not in taken


def test_what_cannot_be_made_in_place_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Embedding(11, 6, sparse=True), Own(6, 5))
    assert not make_in_place(model, {p: bucketed(nn.Linear(2, 2))[0] for p in model.parameters()})
    compiled = nn.Sequential(nn.Linear(6, 5))
    compiled.compile()
    assert not bucketed(compiled)[1]


def test_autocast_takes_the_usual_way() -> None:
    ours, theirs = models(plain)
    bucketed(ours)
    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip(steps(ours, 2), steps(theirs, 2), strict=True):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)


def test_restored_layers_are_as_they_were() -> None:
    model = plain()
    _, replaced = bucketed(model)
    restore(replaced)
    assert all("forward" not in vars(module) for module in model.modules())


def matrices_moved(rank: Rank, strategy: str) -> set[tuple[int, ...]]:
    """Shapes of the matrices whose gradient two steps copy to its view."""
    case = data_case(strategy, rank.world_size)
    mesh = rank.mesh(case.layout)
    assert mesh is not None
    built = build_strategy(workload(), case, mesh, rank.device)
    found: set[tuple[int, ...]] = set()

    def move(gradient: Tensor, view: Tensor) -> None:
        if gradient.data_ptr() != view.data_ptr():
            found.update({tuple(view.shape)} if view.dim() > 1 else ())
            view.copy_(gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "move", staticmethod(move))
        for step in range(2):
            built.step(Batches(workload(), rank.world_size).batch(step, rank.rank))
    built.close()
    return found


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "zero2", "zero3"])
def test_strategies_move_small_matrices_alone(pools: Any, strategy: str) -> None:
    """In the ranks of a pool the table of positions is small, and so is the projection behind the attention."""
    model = workload().model
    small = {(workload().sequence_length, model.width), (model.width, model.width)}
    assert pools(2).run(matrices_moved, strategy) == [small, small]
