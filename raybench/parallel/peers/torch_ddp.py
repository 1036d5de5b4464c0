"""Peer: torch.nn.parallel.DistributedDataParallel with the settings that torch recommends for speed."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from raybench.data.batches import Batch
from raybench.parallel.data.replicated import Replicated
from raybench.parallel.execution import BackwardObserver, Execution, LossSum
from raybench.parallel.peers.torch_pipeline import TorchPipeline
from raybench.worker.communication import Axis
from raybench.worker.recorder import Operation

DEFAULT_BUCKET_MIB = 25.0


class TorchDDP(Replicated):
    """torch's reducer sends the gradients during the last micro-batch's backward pass."""

    wrapped: _Wrapped | None = None
    """None over a pipeline, where torch's own schedules drive the wrappers of the stages."""

    def make_execution(self) -> Execution:
        if self.context.mesh.pipeline.size > 1:
            pipeline = self.context.make_execution()
            assert isinstance(pipeline, TorchPipeline)
            pipeline.wrap(self._wrap, loss_factor=self.axis.size)
            return pipeline
        self.wrapped = _Wrapped(self._wrap(self.model), self.context.loss_sum, self.axis)
        return self.wrapped

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            module,
            process_group=self.axis.group,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=float(self.context.options.get("bucket_mib", DEFAULT_BUCKET_MIB)),
        )

    def step(self, batch: Batch) -> Tensor:
        if (
            self.wrapped is not None and not self.may_send
        ):  # a parameter that nobody uses would leave torch's reducer waiting
            self.wrapped.run(batch, self, synchronize=False)
            self.refuse_unused_parameters()
            self.may_send = True
        return super().step(batch)

    def reduce_gradients(self) -> None:
        """Done by the time that the last backward pass returns."""

    def instrument(self) -> bool:
        """On a GPU the reducer's waiting cannot be told from here."""
        if self.wrapped is None or next(self.model.parameters()).device.type == "cuda":
            return False
        self.wrapped.instrument()
        return super().instrument()


class _Wrapped:
    """Accumulation through the wrapper, which averages: the loss is multiplied by the number of ranks."""

    recorded = True

    def __init__(self, wrapper: DistributedDataParallel, loss_sum: LossSum, axis: Axis) -> None:
        self.wrapper = wrapper
        self.loss_sum = loss_sum
        self.axis = axis
        self._operations: list[Operation] = []

    def run(self, batch: Batch, observer: BackwardObserver, *, synchronize: bool = True) -> Tensor:
        share = torch.zeros((), device=batch.micro_batches[0].labels.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            with nullcontext() if last and synchronize else self.wrapper.no_sync():
                loss = self.loss_sum(self.wrapper, micro_batch.inputs, micro_batch.labels) / batch.num_tokens
                share += loss.detach()
                (loss * self.axis.size).backward()
        self._attribute_exposed_time()
        return share

    def instrument(self) -> None:
        """Let the reducer's collectives go through the recorder, by a communication hook of the same arithmetic."""
        axis, operations = self.axis, self._operations  # not self: the reducer keeps the hook, and self the reducer
        # A lambda, since torch compares the annotation of a hook's argument, which is text here.
        self.wrapper.register_comm_hook(None, lambda _, bucket: _all_reduce(axis, operations, bucket))

    def _attribute_exposed_time(self) -> None:
        """The reducer waits for its buckets, in order, once the last one is filled and sent."""
        if not self._operations:
            return
        reached = self._operations[-1].begin_ns
        for operation in self._operations:
            operation.exposed_ns = max(0, operation.end_ns - reached)
            reached = max(reached, operation.end_ns)
        self._operations.clear()


def _all_reduce(axis: Axis, operations: list[Operation], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(axis.size)
    pending = axis.all_reduce(buffer, label=f"bucket {bucket.index()}")
    if pending.operation is not None:
        operations.append(pending.operation)
    return pending.future(buffer)
