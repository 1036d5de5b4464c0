"""Data parallelism with static buckets: Li et al., "PyTorch Distributed" (VLDB 2020), laid out flat.

The parameters and gradients of a bucket are views of two flat buffers, in reverse parameter order, so that a bucket
fills while backward runs, is all-reduced in place, and is updated by one fused optimizer call while later buckets are
still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raybench.parallel.data.direct import make_in_place, restore
from raybench.parallel.data.order import FixedOrder
from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import Replicated, sum_shared
from raybench.parallel.norm import global_norm
from raybench.parallel.parts import ALONE, Sharing
from raybench.parallel.strategy import Held
from raybench.worker.communication import Axis, Pending

DEFAULT_BUCKET_MIB = 25.0
IN_PLACE_BYTES = 2**19
"""The gradient of a smaller weight is moved: that costs less than an autograd function written in Python."""
NOT_SHARED: Mapping[nn.Parameter, Sharing] = {}


class Bucket:
    """Consecutive parameters of one dtype, device and sharing, flat, padded with zeros to a `multiple` of elements."""

    def __init__(
        self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing, axis: Axis, *, multiple: int = 1
    ) -> None:
        self.label = label
        self.axis = axis
        self.sharing = sharing
        self.parameters = tuple(parameters)
        self.shapes = [p.shape for p in parameters]
        self.num_elements = sum(p.numel() for p in parameters)
        padding = parameters[0].new_zeros(-self.num_elements % multiple)
        self.flat = nn.Parameter(torch.cat([*(p.detach().flatten() for p in parameters), padding]))
        for parameter, value in zip(parameters, self.split(self.flat.detach()), strict=True):
            parameter.data = value
        self.views: dict[Tensor, Tensor] = {}
        """Each parameter's part of the flat gradient."""
        self.placed: set[Tensor] = set()
        """Parameters whose gradient is being made in its view."""
        self.num_missing = 0
        """Parameters whose gradient is not complete yet in this step."""
        self.pending: GradientSum | Pending | None = None
        self.lay_out_gradient()

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor, in their shapes."""
        parts = flat[: self.num_elements].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def sizes(self) -> list[tuple[nn.Parameter, int]]:
        """The parameters, and their bytes when they are whole."""
        return [(p, s.numel() * p.element_size()) for p, s in zip(self.parameters, self.shapes, strict=True)]

    def lay_out_gradient(self) -> None:
        self.gradient = torch.zeros_like(self.flat)
        self.flat.grad = self.gradient
        self.views = dict(zip(self.parameters, self.split(self.gradient), strict=True))

    def place_for(self, parameter: Tensor) -> Tensor | None:
        """The view in which a parameter's gradient may be made, instead of being moved there; None if it is in use."""
        if parameter.grad is not None or parameter in self.placed:
            return None
        self.placed.add(parameter)
        return self.views[parameter]

    def take(self, parameter: Tensor) -> None:
        """Have a parameter's gradient in its view, where later micro-batches accumulate; zeros if there is none."""
        view, gradient = self.views[parameter], parameter.grad
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
        else:
            self.move(gradient, view)
        self.placed.discard(parameter)
        parameter.grad = view

    @staticmethod
    def move(gradient: Tensor, view: Tensor) -> None:
        """Copy a gradient to its view, unless it was made there."""
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)

    def fill(self) -> None:
        """Have every gradient in its view."""
        for parameter in self.parameters:
            self.take(parameter)

    def reduce(self) -> None:
        """Begin to sum the filled gradient over the axis."""
        self.pending = GradientSum(self.axis, self.gradient, label=self.label)

    def wait(self) -> None:
        """Return once the gradient is the sum over all ranks."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class Bucketed(Replicated):
    """All-reduces each bucket, asynchronously, as soon as backward has filled it and all buckets before it."""

    buckets: Sequence[Bucket]

    def lay_out(self) -> None:
        sharing = {parameter: self.parts.sharing(name) for name, parameter in self.parameters.items()}
        groups = self.assign_buckets(sharing)
        self.buckets = [self.make_bucket(f"bucket {index}", g, sharing[g[0]]) for index, g in enumerate(groups)]
        self.order = FixedOrder(self.buckets, self._send)
        self._sending = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index, bucket))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.parameters
        ]
        is_whole = self.context.mesh.model.size == 1
        large = {p: bucket for bucket in self.buckets for p, size in bucket.sizes() if size >= IN_PLACE_BYTES}
        self._in_place = make_in_place(self.model, large) if is_whole else []

    def assign_buckets(self, sharing: Mapping[nn.Parameter, Sharing]) -> list[list[nn.Parameter]]:
        """The parameters of each bucket, in the order in which backward fills them."""
        limit_bytes = int(float(self.context.options.get("bucket_mib", DEFAULT_BUCKET_MIB)) * 2**20)
        return assign(list(self.parameters.values()), limit_bytes, sharing)

    def make_bucket(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing) -> Bucket:
        return Bucket(label, parameters, sharing, self.axis)

    def make_optimizers(self) -> list[Optimizer]:
        return [self.context.make_optimizer([bucket.flat]) for bucket in self.buckets]

    def before_step(self) -> None:
        self.start_order()

    def start_order(self) -> None:
        """No gradient is complete, no bucket sent."""
        self.order.start()
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.parameters)

    def before_backward(self, last: bool) -> None:
        self._sending = last and self.may_send

    def _make_hook(self, index: int, bucket: Bucket) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            bucket.take(parameter)
            if self._sending:
                bucket.num_missing -= 1
                if bucket.num_missing == 0:
                    self.order.ready(index)

        return hook

    def _send(self, bucket: Bucket) -> None:
        bucket.fill()
        bucket.reduce()

    def reduce_gradients(self) -> None:
        """What no hook has sent: buckets with parameters that this rank did not use, and all of the first step."""
        self.order.flush()

    def update(self) -> None:
        """Without clipping, a bucket is updated as it arrives; with it, all have to be there first."""
        if self.context.clip_gradient_norm is not None:
            for bucket in self.buckets:
                bucket.wait()
            super().update()
            return
        norms: dict[Sharing, list[Tensor]] = {}
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            bucket.wait()
            sum_shared(bucket.sharing, [bucket.gradient])
            norms.setdefault(bucket.sharing, []).append(global_norm([bucket.gradient]))
            optimizer.step()
        self.gradient_norm = self.parts.norm(norms)

    def gradients(self) -> dict[Sharing, list[Tensor]]:
        by_sharing: dict[Sharing, list[Tensor]] = {}
        for bucket in self.buckets:
            by_sharing.setdefault(bucket.sharing, []).append(bucket.gradient)
        return by_sharing

    def held_states(self) -> Iterator[Held]:
        self.refuse_cut_model()
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            yield Held(optimizer, bucket.flat, self.named_sizes(bucket), 0, self.axis.index == 0)

    def named_sizes(self, bucket: Bucket) -> list[tuple[str, int]]:
        """Names and numbers of elements of a bucket's parameters, in its order."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        return [(names[p], shape.numel()) for p, shape in zip(bucket.parameters, bucket.shapes, strict=True)]

    def close(self) -> None:
        restore(self._in_place)
        for hook in self._hooks:
            hook.remove()


def assign(
    parameters: Sequence[nn.Parameter], limit_bytes: int, sharing: Mapping[nn.Parameter, Sharing] = NOT_SHARED
) -> list[list[nn.Parameter]]:
    """Buckets of at most `limit_bytes` (a larger parameter alone), in reverse order: one dtype, device, sharing each.

    The order is that in which backward fills them: by each bucket's last parameter in the reversed list.
    """
    finished: list[tuple[int, list[nn.Parameter]]] = []
    filling: dict[tuple[torch.dtype, torch.device, Sharing], tuple[int, list[nn.Parameter]]] = {}
    for position, parameter in enumerate(reversed(parameters)):
        key = (parameter.dtype, parameter.device, sharing.get(parameter, ALONE))
        _, bucket = filling.get(key, (0, []))
        size = sum(p.numel() * p.element_size() for p in bucket)
        if bucket and size + parameter.numel() * parameter.element_size() > limit_bytes:
            finished.append(filling[key])
            bucket = []
        bucket.append(parameter)
        filling[key] = (position, bucket)
    return [bucket for _, bucket in sorted([*finished, *filling.values()], key=lambda item: item[0])]
