"""Peer: DeepSpeed's engine at stage 0, which is plain data parallelism."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from raybench.data.batches import Batch
from raybench.errors import RequestError
from raybench.parallel.data.replicated import Replicated, gradient
from raybench.parallel.norm import global_norm
from raybench.parallel.strategy import Held, StateBytes, Strategy, distinct_bytes, optimizer_tensors
from raybench.worker.mesh import Mesh

ZERO_SETTINGS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 10_000_000,
    "allgather_bucket_size": 10_000_000,
    "stage3_param_persistence_threshold": 0,
}
"""Elements of a bucket; parameters of every size in parts, as in all other cases of stage 3."""


class DeepSpeed0(Replicated):
    """The engine all-reduces after the last micro-batch, averaging: the loss is multiplied by the number of ranks.

    It clears the gradients with its step; norm and clipping are taken just before, as in every other case.
    """

    def lay_out(self) -> None:
        self._kept: dict[str, Tensor] = {}
        """The gradients of the last step."""

    def make_optimizers(self) -> list[Optimizer]:
        optimizer = self.context.make_optimizer(self.parameters.values())
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        self.engine: Any = None
        return [optimizer]

    def step(self, batch: Batch) -> Tensor:
        if not self.may_send:
            self.execution.run(batch, self)
            self.refuse_unused_parameters()
            self.may_send = True
            self.engine = self.make_engine(len(batch.micro_batches))
            self.engine.zero_grad()
        share = torch.zeros((), device=batch.micro_batches[0].labels.device)
        for micro_batch in batch.micro_batches:
            loss = self.context.loss_sum(self.engine, micro_batch.inputs, micro_batch.labels) / batch.num_tokens
            share += loss.detach()
            self.engine.backward(loss * self.axis.size, scale_wrt_gas=False)
            self.engine.step()  # the optimizer's step after the last one alone
        self.axis.all_reduce(share, label="loss").wait()
        for scheduler in self.schedulers:
            scheduler.step()
        return share

    def make_engine(self, num_micro_batches: int) -> Any:
        return make_engine(self.model, self.optimizers[0], self.context.mesh, num_micro_batches)

    def reduce_gradients(self) -> None:
        """The engine's business."""

    def _before_update(self) -> None:
        self._kept = {name: gradient(parameter) for name, parameter in self.parameters.items()}
        gradients = list(self._kept.values())
        self.gradient_norm = global_norm(gradients)
        limit = self.context.clip_gradient_norm
        if limit is not None:
            self.scale = (limit / (self.gradient_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, self.scale)

    def full_gradients(self) -> Any:
        for name, whole in self._kept.items():
            yield name, whole if self.scale is None else whole / self.scale

    def held_states(self) -> Iterator[Held]:
        return Strategy.held_states(self)

    def state_bytes(self) -> StateBytes:
        return StateBytes(
            parameters=distinct_bytes(self.model.parameters()),
            gradients=distinct_bytes(self._kept.values()),
            optimizer=distinct_bytes(optimizer_tensors(self.optimizers)),
        )

    def instrument(self) -> bool:
        """The engine talks past the recorder."""
        return False

    def close(self) -> None:
        self._kept = {}
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None


class _Groups:
    """The mesh, in the words in which DeepSpeed asks for it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.data.group

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data.size

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data.index

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.tensor.group

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tensor.size

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tensor.index


def make_engine(
    model: torch.nn.Module,
    optimizer: Optimizer,
    mesh: Mesh,
    num_micro_batches: int,
    *,
    stage: int = 0,
    clip_gradient_norm: float | None = None,
) -> Any:
    """DeepSpeed's engine around `model`, with the optimizer that every case uses.

    Raises:
        RequestError: the case leaves out ranks of its job; DeepSpeed speaks to all of them while it starts.
    """
    if mesh.all.size != dist.get_world_size():
        raise RequestError(
            f"DeepSpeed: a case of {mesh.all.size} ranks in a job of {dist.get_world_size()} is not possible "
            "(allowed: the largest layout of a track)"
        )
    device = next(model.parameters()).device
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory operation serves inference alone, and takes a compiler and a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        mpu=_Groups(mesh),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "zero_optimization": {"stage": stage, **ZERO_SETTINGS} if stage else {"stage": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,  # torch's own fused one
            "gradient_clipping": clip_gradient_norm or 0.0,  # its own default is 1.0
            "steps_per_print": 10**9,
        },
    )
    return engine
