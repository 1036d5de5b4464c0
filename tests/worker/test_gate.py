"""What the gate compares, on made references."""

from __future__ import annotations

import torch

from raybench.worker.gate import UPDATE_BOUND, GateResult, Reference, _check_updates

KEYS = slice(4, 8)


def reference() -> Reference:
    """A bias that queries, keys and values share: the keys' third of its gradient is rounding noise; one is unused."""
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.0, 3e-9, -2e-9, 1e-9, 4e-9, 1.0, -1.0, 2.0, 2.0])
    update = -0.01 * gradient.sign()
    initial = torch.zeros(12)
    return Reference(
        loss=1.0,
        gradient_norm=5.0,
        gradients={"bias": gradient},
        initial={"bias": initial},
        sgd_rate=0.1,
        sgd_updates={"bias": -0.1 * gradient},
        losses=[1.0, 1.0, 1.0],
        updates={"bias": update},
    )


def checked(update: torch.Tensor, *, sgd: bool = False) -> GateResult:
    known = reference()
    result = GateResult()
    _check_updates(result, "a step", iter([("bias", update)]), known, known.sgd_updates if sgd else known.updates)
    return result


def test_an_element_is_determined_if_its_gradient_is_zero_or_above_its_error() -> None:
    assert reference().determined("bias").tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_steps_that_adamw_takes_by_noise_are_left_out() -> None:
    update = reference().updates["bias"].clone()
    update[KEYS] *= -1
    assert checked(update).passed
    update[0] *= 1 + 5 * UPDATE_BOUND
    result = checked(update)
    assert not result.passed
    assert result.worst_parameter == "bias"


def test_an_unused_element_that_moves_is_found() -> None:
    update = reference().updates["bias"].clone()
    update[3] = 0.001
    assert not checked(update).passed


def test_plain_steps_are_held_to_every_element() -> None:
    update = reference().sgd_updates["bias"].clone()
    update[KEYS] = 0.01
    assert not checked(update, sgd=True).passed
