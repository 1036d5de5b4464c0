"""Weight gradients made where they are reduced, without a copy and without memory of their own.

After Megatron-LM's fused accumulation of gradients: the product that gives a weight's gradient is written straight to
the weight's view of its bucket. Autograd adopts that view as the gradient, so that hooks and accumulation go on as
ever; a gradient that has a second part (a tied weight, a layer used twice) is summed by autograd and moved as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raybench.parallel.autograd import applied

Place = Callable[[], Tensor | None]
"""Where a weight's gradient is to be made; None where something is there already."""


class HasPlaces(Protocol):
    """A bucket."""

    def place_for(self, parameter: Tensor) -> Tensor | None: ...


def make_in_place(model: nn.Module, bucket_of: Mapping[nn.Parameter, HasPlaces]) -> list[nn.Module]:
    """Let the linear layers and embeddings of `model` make their weights' gradients in the buckets.

    Compiled modules stay as they are, and everything does under autocast, where a gradient changes its dtype first.

    Returns:
        The modules whose forward pass was replaced, for `restore`.
    """
    replaced: list[nn.Module] = []
    for module in _not_compiled(model):
        forward = _forward_of(module)
        weight = module.weight if forward is not None else None
        if forward is not None and isinstance(weight, nn.Parameter) and weight in bucket_of:
            vars(module)["forward"] = partial(forward, module, partial(bucket_of[weight].place_for, weight))
            replaced.append(module)
    return replaced


def restore(modules: Sequence[nn.Module]) -> None:
    """Undo `make_in_place`."""
    for module in modules:
        del vars(module)["forward"]


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    if module._compiled_call_impl is None:
        yield module
        for child in module.children():
            yield from _not_compiled(child)


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """For layers of these types themselves, whose forward pass nobody replaced."""
    if "forward" in vars(module):
        return None
    if type(module) is nn.Embedding:
        is_plain = module.padding_idx is None and module.max_norm is None
        return _embedding if is_plain and not (module.sparse or module.scale_grad_by_freq) else None
    return _linear if type(module) is nn.Linear else None


def _linear(module: nn.Linear, place: Place, hidden: Tensor) -> Tensor:
    if torch.is_autocast_enabled(hidden.device.type) or hidden.dtype != module.weight.dtype:
        return F.linear(hidden, module.weight, module.bias)
    product: Tensor = applied(_Linear, hidden, module.weight, module.bias, place)
    return product


def _embedding(module: nn.Embedding, place: Place, ids: Tensor) -> Tensor:
    rows: Tensor = applied(_Embedding, ids, module.weight, place)
    return rows


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, place: Place) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.place = place
        return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        to_hidden, to_weight, to_bias = (need for need in ctx.needs_input_grad[:3])
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_hidden = gradient @ weight if to_hidden else None
        of_weight = _product(rows, hidden.reshape(-1, hidden.shape[-1]), ctx.place) if to_weight else None
        return of_hidden, of_weight, rows.sum(0) if to_bias else None, None


def _product(rows: Tensor, hidden: Tensor, place: Place) -> Tensor:
    view = place()
    if view is None:
        return rows.t() @ hidden
    torch.mm(rows.t(), hidden, out=view)
    return view.detach()


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, place: Place) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.like, ctx.place = (weight.shape, weight.dtype), place
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        shape, dtype = ctx.like
        view = ctx.place()
        target = gradient.new_zeros(shape, dtype=dtype) if view is None else view.zero_()
        target.index_add_(0, ids.flatten(), gradient.reshape(-1, shape[1]))
        return None, target if view is None else target.detach(), None
