"""Data parallelism with static buckets: Li et al., "PyTorch Distributed" (VLDB 2020), laid out flat.

The parameters and gradients of a bucket are views of two flat buffers, in reverse parameter order, so that a bucket
fills while backward runs, is all-reduced in place, and is updated by one fused optimizer call while later buckets are
still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raybench.parallel.data.order import FixedOrder
from raybench.parallel.data.reduction import GradientSum
from raybench.parallel.data.replicated import Replicated, sum_shared
from raybench.parallel.norm import global_norm
from raybench.parallel.parts import ALONE, Sharing

DEFAULT_BUCKET_MIB = 25.0
NOT_SHARED: Mapping[nn.Parameter, Sharing] = {}


class Bucket:
    """Consecutive parameters of one dtype, device and sharing, flat."""

    def __init__(self, label: str, parameters: Sequence[nn.Parameter], sharing: Sharing) -> None:
        self.label = label
        self.sharing = sharing
        sizes = [p.numel() for p in parameters]
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        self.gradient = torch.zeros_like(self.flat)
        self.flat.grad = self.gradient
        self.views: dict[Tensor, Tensor] = {}
        """Each parameter's part of the flat gradient."""
        for parameter, value, part in zip(
            parameters, self.flat.detach().split(sizes), self.gradient.split(sizes), strict=True
        ):
            parameter.data = value.view(parameter.shape)
            self.views[parameter] = part.view(parameter.shape)
        self.num_missing = 0
        """Parameters whose gradient is not complete yet in this step."""
        self.pending: GradientSum | None = None

    def take(self, parameter: Tensor) -> None:
        """Have a parameter's gradient in its view, where later micro-batches accumulate; zeros if there is none."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def wait(self) -> None:
        """Return once the gradient is the sum over all ranks."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class Bucketed(Replicated):
    """All-reduces each bucket, asynchronously, as soon as backward has filled it and all buckets before it."""

    def lay_out(self) -> None:
        limit_bytes = int(float(self.context.options.get("bucket_mib", DEFAULT_BUCKET_MIB)) * 2**20)
        sharing = {parameter: self.parts.sharing(name) for name, parameter in self.parameters.items()}
        groups = assign(list(self.parameters.values()), limit_bytes, sharing)
        self.buckets = [Bucket(f"bucket {index}", g, sharing[g[0]]) for index, g in enumerate(groups)]
        self.order = FixedOrder(self.buckets, self._send)
        self._sending = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index, bucket))
            for index, bucket in enumerate(self.buckets)
            for parameter in bucket.views
        ]

    def make_optimizers(self) -> list[Optimizer]:
        return [self.context.make_optimizer([bucket.flat]) for bucket in self.buckets]

    def before_step(self) -> None:
        self.order.start()
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.views)

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
        for parameter in bucket.views:
            bucket.take(parameter)
        bucket.pending = GradientSum(self.axis, bucket.gradient, label=bucket.label)

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

    def close(self) -> None:
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
