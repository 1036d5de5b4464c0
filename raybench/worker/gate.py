"""The gate: a case may be timed only if it computes what one process computes.

The bounds and their reasons are in docs/metrics.md. The first rank runs the control and compares; every other rank
takes part in the case's own steps and gathers. Norms are taken in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import SGD

from raybench.data.batches import Batch
from raybench.parallel.strategy import OptimizerFactory, Strategy
from raybench.worker.communication import Axis

GRADIENT_BOUND = 1e-5
NULL_FLOOR = 0.1
UPDATE_BOUND = 1e-3
LOSS_BOUND = 1e-5
ROUNDING_SHARE = 1e-4
"""Largest part of an SGD update that the rounding of the parameter may be."""
NUM_STEPS = 3
"""Steps of the workload's optimizer."""
BF16_FACTOR = 1.5

Build = Callable[[OptimizerFactory | None], Strategy]
"""Makes the strategy anew: with the optimizer given, or with the workload's own."""
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What the control computed on the global batches; CPU tensors by parameter name."""

    loss: float
    gradient_norm: float
    gradients: Tensors
    initial: Tensors
    sgd_rate: float
    sgd_updates: Tensors
    losses: Sequence[float]
    """Of the steps with the workload's optimizer."""
    updates: Tensors
    """After all of those steps."""

    @cached_property
    def floors(self) -> dict[str, float]:
        """Gradient norm under which each parameter counts as null."""
        return _floors(self.gradients)

    @cached_property
    def null_parameters(self) -> list[str]:
        """Parameters without a true gradient, such as a key's bias."""
        return [name for name, g in self.gradients.items() if norm(g) < self.floors[name]]

    def determined(self, name: str) -> Tensor:
        """Where a gradient is zero, or larger than the error that it may have: elsewhere AdamW steps by noise.

        A key's bias is such a place within a bias that queries, keys and values share.
        """
        gradient = self.gradients[name].abs()
        allowed = GRADIENT_BOUND * max(norm(gradient), self.floors[name]) / math.sqrt(gradient.numel())
        return (gradient == 0) | (gradient >= allowed)

    def gradient_error(self, name: str, gradient: Tensor) -> float:
        """‖Δg‖ / max(‖g‖, floor): infinite for a gradient of another shape or with NaNs."""
        expected = self.gradients[name]
        if gradient.shape != expected.shape:
            return math.inf
        difference = norm(gradient.detach().cpu().double() - expected.double())
        scale = max(norm(expected), self.floors[name])
        error = difference / scale if scale else (0.0 if difference == 0 else math.inf)
        return error if math.isfinite(error) else math.inf


@dataclass
class GateResult:
    """Whether a case passed, and how near it came to failing."""

    passed: bool = True
    worst_parameter: str | None = None
    worst_error: float | None = None
    """Largest gradient error in fp32; the bound is 1e-5."""
    null_parameters: list[str] = field(default_factory=list)
    reason: str | None = None
    """What failed first, in words."""

    def fail(self, reason: str, parameter: str | None = None, error: float | None = None) -> None:
        """Keep the first failure."""
        if self.passed:
            self.passed, self.reason = False, reason
            self.worst_parameter = parameter or self.worst_parameter
            self.worst_error = error if error is not None else self.worst_error


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _floors(gradients: Tensors) -> dict[str, float]:
    """0.1 · ‖G‖ · √(n/N), with G and N the whole model's gradient and size."""
    total = sum(g.numel() for g in gradients.values())
    whole = math.sqrt(sum(norm(g) ** 2 for g in gradients.values()))
    return {name: NULL_FLOOR * whole * math.sqrt(g.numel() / total) for name, g in gradients.items()}


def sgd(rate: float) -> OptimizerFactory:
    return lambda parameters: SGD(parameters, lr=rate)


def compute_reference(build: Build, batches: Sequence[Batch], clip_gradient_norm: float | None) -> Reference:
    """Run the control on global batches: one SGD step on the first, the workload's optimizer over `NUM_STEPS`."""
    probe = build(sgd(1.0))
    initial = _copies(probe.full_parameters())
    loss = float(probe.step(batches[0]))
    gradients = _copies(probe.full_gradients())
    gradient_norm = float(probe.gradient_norm)
    scale = 1.0
    if clip_gradient_norm is not None:
        scale = min(1.0, clip_gradient_norm / gradient_norm)
    probe.close()

    # The rounding of p is at most ε/2 · ‖p‖: the rate makes that a small part of every update.
    floors = _floors(gradients)
    ratios = [norm(initial[name]) / n for name, g in gradients.items() if (n := norm(g)) >= floors[name] > 0]
    rate = torch.finfo(torch.float32).eps / ROUNDING_SHARE * max(ratios, default=1.0) / scale
    stepped = build(sgd(rate))
    stepped.step(batches[0])
    sgd_updates = _updates(stepped.full_parameters(), initial)
    stepped.close()

    trained = build(None)
    losses = [float(trained.step(batch)) for batch in batches[:NUM_STEPS]]
    updates = _updates(trained.full_parameters(), initial)
    trained.close()
    return Reference(loss, gradient_norm, gradients, initial, rate, sgd_updates, losses, updates)


def check(build: Build, batches: Sequence[Batch], reference: Reference | None, axis: Axis) -> GateResult:
    """Hold a case against the control in fp32; the same result on every rank of `axis`.

    Args:
        build: makes this rank's part of the case.
        batches: this rank's part of each global batch.
        reference: the control's results, on the first rank alone.
        axis: all ranks of the case.
    """
    result = GateResult(null_parameters=reference.null_parameters if reference else [])
    rate = axis.gather_objects(reference.sgd_rate if reference else None)[0]

    strategy = build(sgd(rate))
    loss = float(strategy.step(batches[0]))
    _check_gradients(result, strategy.full_gradients(), reference)
    _check_scalar(result, "loss", axis.gather_objects(loss), reference.loss if reference else None)
    gradient_norms = axis.gather_objects(float(strategy.gradient_norm))
    _check_scalar(result, "gradient norm", gradient_norms, reference.gradient_norm if reference else None)
    _check_updates(
        result, "one SGD step", strategy.full_parameters(), reference, reference.sgd_updates if reference else None
    )
    _check_replicas(result, "one SGD step", strategy.full_parameters(), axis)
    strategy.close()
    del strategy

    strategy = build(None)
    losses = [float(strategy.step(batch)) for batch in batches[:NUM_STEPS]]
    when = f"{NUM_STEPS} steps of the optimizer"
    _check_updates(result, when, strategy.full_parameters(), reference, reference.updates if reference else None)
    _check_replicas(result, when, strategy.full_parameters(), axis)
    for index, loss in enumerate(losses):
        expected = reference.losses[index] if reference else None
        _check_scalar(result, f"loss of step {index}", axis.gather_objects(loss), expected)
    strategy.close()
    first: GateResult = axis.gather_objects(result)[0]
    return first


def bf16_errors(build: Build, batch: Batch, reference: Reference) -> dict[str, float]:
    """Gradient errors of single-process bf16 against the fp32 control, by parameter, and of all as ''."""
    control = build(sgd(0.0))
    control.step(batch)
    return _all_errors(control.full_gradients(), reference)


def check_bf16(
    result: GateResult,
    build: Build,
    batch: Batch,
    reference: Reference | None,
    allowed: Mapping[str, float] | None,
    axis: Axis,
) -> GateResult:
    """Hold a bf16 case to 1.5 × the error of single-process bf16, parameter by parameter.

    A parameter whose single-process error happens to be small is held to the whole model's.
    """
    strategy = build(sgd(0.0))
    strategy.step(batch)
    if reference is None or allowed is None:
        for _ in strategy.full_gradients():
            pass
    else:
        errors = _all_errors(strategy.full_gradients(), reference)
        for name, error in errors.items():
            bound = BF16_FACTOR * max(allowed[name], allowed[""])
            if not error <= bound:
                what = f"gradient of {name}" if name else "gradient"
                result.fail(f"bf16 {what} is off by {error:.1e}, allowed is {bound:.1e}", name or None, error)
    strategy.close()
    first: GateResult = axis.gather_objects(result)[0]
    return first


def _all_errors(gradients: Iterator[tuple[str, Tensor]], reference: Reference) -> dict[str, float]:
    errors: dict[str, float] = {}
    squares = 0.0
    for name, gradient in gradients:
        errors[name] = reference.gradient_error(name, gradient)
        squares += norm(gradient.detach().cpu().double() - reference.gradients[name].double()) ** 2
    errors[""] = math.sqrt(squares) / reference.gradient_norm
    return errors


def _copies(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def _updates(parameters: Iterator[tuple[str, Tensor]], initial: Tensors) -> dict[str, Tensor]:
    return {name: (p.detach().cpu().double() - initial[name].double()).float() for name, p in parameters}


def _check_scalar(result: GateResult, what: str, values: Sequence[float], expected: float | None) -> None:
    if len(set(values)) > 1 or any(not math.isfinite(v) for v in values):
        result.fail(f"{what} is not the same finite number on every rank: {', '.join(f'{v:.7g}' for v in values)}")
    elif expected is not None and not abs(values[0] - expected) <= LOSS_BOUND * abs(expected):
        result.fail(f"{what} is {values[0]:.7g}, the control's is {expected:.7g}")


def _check_gradients(result: GateResult, gradients: Iterator[tuple[str, Tensor]], reference: Reference | None) -> None:
    errors = {name: reference.gradient_error(name, g) if reference else 0.0 for name, g in gradients}
    if reference is None:
        return
    if missing := sorted(set(reference.gradients) - set(errors)):
        result.fail(f"no gradient of {', '.join(missing)}", missing[0], math.inf)
        return
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= GRADIENT_BOUND:
        wrong = sum(not e <= GRADIENT_BOUND for e in errors.values())
        result.fail(
            f"gradient of {worst} is off by {errors[worst]:.1e} of its norm, allowed is {GRADIENT_BOUND:.0e} "
            f"({wrong} of {len(errors)} parameters are off)",
            worst,
            errors[worst],
        )
    else:
        result.worst_parameter, result.worst_error = worst, errors[worst]


def _check_updates(
    result: GateResult,
    when: str,
    parameters: Iterator[tuple[str, Tensor]],
    reference: Reference | None,
    expected: Tensors | None,
) -> None:
    if reference is None or expected is None:
        for _ in parameters:
            pass
        return
    worst, worst_error = "", 0.0
    for name, update in _updates(parameters, reference.initial).items():
        if name in reference.null_parameters:
            continue
        wanted, found = expected[name].double(), update.double()
        if expected is reference.updates:
            where = reference.determined(name)
            wanted, found = wanted[where], found[where]
        size, difference = norm(wanted), norm(found - wanted)
        error = difference / size if size else (0.0 if difference == 0 else math.inf)
        if not error <= worst_error:
            worst, worst_error = name, error
    if not worst_error <= UPDATE_BOUND:
        result.fail(
            f"after {when} the update of {worst} is off by {worst_error:.1e} of its norm, allowed is "
            f"{UPDATE_BOUND:.0e}",
            worst,
            worst_error,
        )


def _check_replicas(result: GateResult, when: str, parameters: Iterator[tuple[str, Tensor]], axis: Axis) -> None:
    """Every rank must hold the same parameters to the last bit."""
    own = {name: _fingerprint(p) for name, p in parameters}
    for place, theirs in enumerate(axis.gather_objects(own)):
        for name, value in theirs.items():
            if value != own[name]:
                result.fail(f"after {when} {name} differs between the first rank and rank {axis.ranks[place]}", name)
                return


def _fingerprint(tensor: Tensor) -> int:
    """A number that two tensors share if they are equal to the bit, and hardly ever otherwise."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    padded = torch.nn.functional.pad(content, (0, -len(content) % 8)).view(torch.int64)
    weights = torch.arange(1, len(padded) + 1, dtype=torch.int64) * 2_654_435_761
    return int((padded * weights).sum())
