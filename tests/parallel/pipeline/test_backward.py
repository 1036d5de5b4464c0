"""Backward in two halves: together one backward pass, to the bit, and none of it twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raybench.errors import RequestError
from raybench.models.build import build_model
from raybench.parallel.pipeline.backward import Pass, SplitPass, leaf
from tests.gating import workload


class Counted(torch.autograd.Function):
    """A product whose backward, in Python, computes all that it can each time that it is called."""

    calls = 0

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        Counted.calls += 1
        hidden, weight = ctx.saved_tensors
        return gradient @ weight.t(), hidden.flatten(0, -2).t() @ gradient.flatten(0, -2)


class InPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6))
        self.second = nn.Parameter(torch.randn(6, 6))

    def forward(self, hidden: Tensor) -> Tensor:
        return Counted.apply(torch.tanh(Counted.apply(hidden, self.first)), self.second * 2)


def gpt(precision):
    model = build_model(workload(), torch.device("cpu"), seed=1)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            for block in model.blocks:
                hidden = block(hidden)
            return model.head(hidden).float().square().mean()

    return nn.ModuleList([*model.blocks, model.head]), forward, torch.randn(2, 9, 16)


def in_python():
    model = InPython()
    return model, lambda hidden: model(hidden).square().mean(), torch.randn(2, 3, 6)


def frozen():
    model, forward, hidden = gpt("fp32")
    model[0].requires_grad_(False)
    return model, forward, hidden


@pytest.mark.parametrize("make", [lambda: gpt("fp32"), lambda: gpt("bf16"), in_python, frozen])
def test_the_halves_are_one_backward_pass(make):
    model, forward, hidden = make()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fired: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))

    entry = leaf(hidden)
    expected_input = Pass(entry, forward(entry)).backward(torch.ones(()))
    expected = {name: p.grad.clone() for name, p in parameters.items()}
    model.zero_grad(set_to_none=True)
    fired.clear()

    entry = leaf(hidden)
    split = SplitPass(entry, forward(entry))
    assert torch.equal(split.input_gradient(torch.ones(())), expected_input)
    assert fired == []
    assert all(p.grad is None for p in parameters.values())
    split.weight_gradient()
    assert sorted(fired) == sorted(parameters)
    for name, parameter in parameters.items():
        assert torch.equal(parameter.grad, expected[name]), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_function_in_python_is_called_once():
    _model, forward, hidden = in_python()
    entry = leaf(hidden)
    split = SplitPass(entry, forward(entry))
    Counted.calls = 0
    split.input_gradient(torch.ones(()))
    split.weight_gradient()
    assert Counted.calls == 2  # the model has two of them


def test_matrix_products_are_not_computed_twice():
    from torch.utils.flop_counter import FlopCounterMode

    _, forward, hidden = gpt("fp32")

    def flops(split: bool) -> int:
        entry = leaf(hidden)
        output = forward(entry)
        with FlopCounterMode(display=False) as counter:
            if split:
                halves = SplitPass(entry, output)
                halves.input_gradient(torch.ones(()))
                halves.weight_gradient()
            else:
                Pass(entry, output).backward(torch.ones(()))
        return counter.get_total_flops()

    assert flops(split=True) == flops(split=False) > 0


def test_recomputation_runs_forward_once_more_and_not_twice():
    model, forward, hidden = gpt("fp32")
    calls = 0

    def again() -> Tensor:
        nonlocal calls
        calls += 1
        return forward(entry)

    entry = leaf(hidden)
    split = SplitPass(entry, None, forward=again)
    split.input_gradient(torch.ones(()))
    split.weight_gradient()
    assert calls == 1
    assert all(p.grad is not None for p in model.parameters())


def test_a_parameter_used_twice_in_a_stage_is_refused():
    shared = nn.Linear(4, 4)
    entry = leaf(torch.randn(2, 4))
    split = SplitPass(entry, shared(torch.tanh(shared(entry))).sum())
    with pytest.raises(RequestError, match="used twice in one stage"):
        split.input_gradient(torch.ones(()))
