"""The communication of tensor parallelism as autograd functions: what forward gathers, backward reduces.

Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053) surrounds each pair of matrices with two conjugate operations: `f`,
nothing forward and an all-reduce backward, and `g`, the reverse. With sequence parallelism (Korthikanti et al., 2022,
arXiv:2205.05198) they become an all-gather and a reduce-scatter along the sequence, which moves the same bytes; the
sequence is then the first dimension, so that no collective needs a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raybench.parallel.autograd import applied
from raybench.worker.communication import Axis, Pending


def column_products(
    hidden: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    axis: Axis,
    *,
    sequence: bool,
    label: str,
) -> tuple[Tensor, ...]:
    """`f`, then this rank's columns of one or more linear layers that read the same input.

    Args:
        hidden: [batch, sequence, width], the same on every rank; with `sequence` this rank's part
            [sequence / size, batch, width] of it.
        weights: [columns / size, width] each.
        biases: [columns / size] each.

    Returns:
        The columns of each layer over the whole sequence.
    """
    hidden, *parameters = in_precision(hidden, *weights, *biases)
    products: tuple[Tensor, ...] = applied(_ColumnProducts, hidden, axis, sequence, label, *parameters)
    return products


def row_product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *, sequence: bool, label: str
) -> Tensor:
    """A linear layer whose input's columns are spread over the axis, then `g`.

    Args:
        hidden: [..., rows / size].
        weight: [width, rows / size].
        bias: [width] or None, the same on every rank; each adds its share of it.

    Returns:
        The sum over the ranks; with `sequence` this rank's part of it along the first dimension.
    """
    hidden, weight, bias = in_precision(hidden, weight, bias)
    if sequence:
        part: Tensor = applied(_ScatteredRowProduct, hidden, weight, bias, axis, label)
        return part
    return reduce_output(applied(_RowProduct, hidden, weight, bias, axis.size), axis, sequence=False, label=label)


def copy_input(hidden: Tensor, axis: Axis, label: str) -> Tensor:
    """`f` alone, for layers that are not this module's: `hidden` as it is; its gradient is summed over the ranks."""
    copied: Tensor = applied(_CopyInput, hidden, axis, label)
    return copied


def reduce_output(partial: Tensor, axis: Axis, *, sequence: bool, label: str) -> Tensor:
    """`g`: the sum of `partial`, whose content is lost, or this rank's part of the sum along the first dimension."""
    reduced: Tensor = applied(_ReduceScatter if sequence else _AllReduce, partial, axis, label)
    return reduced


class _ColumnProducts(Function):
    """The input gradient's collective is under way while the weight gradients are computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, axis: Axis, sequence: bool, label: str, *parameters: Tensor) -> Any:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.axis, ctx.sequence, ctx.label = axis, sequence, label
        ctx.save_for_backward(hidden, *weights)
        if sequence:
            hidden, gathered = begin_gather(hidden, axis, f"{label} input")
            gathered.wait()
        return tuple(F.linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, *weights = ctx.saved_tensors
        axis: Axis = ctx.axis
        if ctx.sequence:  # only the part was kept: gathered anew while the input gradient is computed
            hidden, gathered = begin_gather(hidden, axis, f"{ctx.label} input again")
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        whole = rows[0] @ weights[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            whole.addmm_(row, weight)
        input_gradient, reduced = begin_input_gradient(
            whole.view(hidden.shape), axis, sequence=ctx.sequence, label=ctx.label
        )
        if ctx.sequence:
            gathered.wait()
        columns = hidden.flatten(0, -2)
        weight_gradients = [row.t() @ columns for row in rows]
        bias_gradients = [
            row.sum(0) if needed else None
            for row, needed in zip(rows, ctx.needs_input_grad[4 + len(weights) :], strict=True)
        ]
        reduced.wait()
        return input_gradient, None, None, None, *weight_gradients, *bias_gradients


class _CopyInput(Function):
    """Nothing forward; backward sums what each rank's part of the layers says of their common input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(gradient, label=f"{ctx.label} input gradient").wait()
        return gradient, None, None


class _RowProduct(Function):
    """hidden · weightᵀ + bias / size: summed over the ranks, the bias is there once, and costs no pass of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _row_product(hidden, weight, bias, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        return (rows @ weight).view(hidden.shape), rows.t() @ hidden.flatten(0, -2), bias_gradient, None


class _ScatteredRowProduct(Function):
    """The same and a reduce-scatter; backward begins with this rank's part while those of the others arrive."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        ctx.save_for_backward(hidden, weight)
        return _scatter_sum(_row_product(hidden, weight, bias, axis.size), axis, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        whole, gathered = begin_gather(gradient, ctx.axis, f"{ctx.label} output gradient")
        inputs, rows = hidden.flatten(0, -2), whole.flatten(0, -2)
        length = len(rows) // ctx.axis.size
        own = slice(ctx.axis.index * length, (ctx.axis.index + 1) * length)
        others = [part for part in (slice(0, own.start), slice(own.stop, None)) if len(rows[part])]
        own_rows = gradient.flatten(0, -2)
        input_gradient = inputs.new_empty(inputs.shape)
        torch.mm(own_rows, weight, out=input_gradient[own])
        weight_gradient = own_rows.t() @ inputs[own]
        gathered.wait()
        for part in others:
            torch.mm(rows[part], weight, out=input_gradient[part])
            weight_gradient.addmm_(rows[part].t(), inputs[part])
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        return input_gradient.view(hidden.shape), weight_gradient, bias_gradient, None, None


def _row_product(hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
    product = hidden.new_empty(*hidden.shape[:-1], len(weight))
    rows, flat = hidden.flatten(0, -2), product.view(-1, len(weight))
    if bias is None:
        torch.mm(rows, weight.t(), out=flat)
    else:
        torch.addmm(bias, rows, weight.t(), beta=1 / size, out=flat)
    return product


class _AllReduce(Function):
    """The sum over the ranks, in place; its gradient is on every rank already."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, label: str) -> Tensor:
        axis.all_reduce(partial, label=f"{label} output").wait()
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _ReduceScatter(Function):
    """This rank's part of the sum over the ranks; backward gathers the parts of its gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return _scatter_sum(partial, axis, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole, gathered = begin_gather(gradient, ctx.axis, f"{ctx.label} output gradient")
        gathered.wait()
        return whole, None, None


def _scatter_sum(partial: Tensor, axis: Axis, label: str) -> Tensor:
    """This rank's part of the sum of `partial` over the ranks."""
    part = partial.new_empty(partial.shape[0] // axis.size, *partial.shape[1:])
    axis.reduce_scatter(part, partial, label=f"{label} output", in_order=True).wait()
    return part


def begin_gather(part: Tensor, axis: Axis, label: str) -> tuple[Tensor, Pending]:
    """The parts of all ranks along the first dimension, complete once the operation has been waited for."""
    whole = part.new_empty(part.shape[0] * axis.size, *part.shape[1:])
    return whole, axis.all_gather(whole, part.contiguous(), label=label, in_order=True)


def begin_input_gradient(partial: Tensor, axis: Axis, *, sequence: bool, label: str) -> tuple[Tensor, Pending]:
    """`f` in backward: the sum of all ranks' `partial`, which is lost, or this rank's part of it, once waited for."""
    label = f"{label} input gradient"
    if not sequence:
        return partial, axis.all_reduce(partial, label=label)
    part = partial.new_empty(partial.shape[0] // axis.size, *partial.shape[1:])
    return part, axis.reduce_scatter(part, partial, label=label, in_order=True)


def in_precision(*tensors: Tensor | None) -> list[Any]:
    """The tensors in autocast's precision where it is on: custom functions are unknown to it."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None else t.to(dtype) for t in tensors]


@contextmanager
def drawn_apart(axis: Axis, device: torch.device) -> Iterator[None]:
    """Inside, random numbers differ between the ranks of `axis`; outside they stay alike.

    The ranks' common generator yields the seed, so that recomputation, which sets it back, draws the same again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + axis.index)
        yield
