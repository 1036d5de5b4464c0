"""Peer: torch's DTensor tensor parallelism, `parallelize_module` with `loss_parallel`, as torchtitan plans it.

DTensor describes how a tensor is placed and derives communication from that. Here the model's parameters stay plain
tensors, this rank's part, and are seen as DTensors only while a module runs: the arrangement in which torch puts DDP
over DTensor. Optimizer, clipping and data strategies then cost what they cost the hand-written strategies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from raybench.data.batches import IGNORED_LABEL
from raybench.models.gpt import GPT
from raybench.parallel.parts import Cut
from raybench.parallel.parts import Shard as Part
from raybench.parallel.tensor.cut import sharing_of
from raybench.worker.communication import Axis
from raybench.worker.mesh import Mesh

STACKED = {"query_key_value": 3, "key_value": 2}
"""Linear layers whose outputs are several blocks, each of which is cut by itself."""


def parallelize(model: GPT, mesh: Mesh) -> Cut:
    """Tensor parallelism: activations between the matrices are the same on every rank."""
    plan: dict[str, ParallelStyle] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.projection": RowwiseParallel(),
        "blocks.*.feed_forward.projection": RowwiseParallel(),
        "head.projection": ColwiseParallel(),
    }
    return _apply(model, mesh, plan)


def parallelize_sequence(model: GPT, mesh: Mesh) -> Cut:
    """With sequence parallelism: norms and the residual stream on a part of the sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": gathered,
        "blocks.*.attention.projection": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": gathered,
        "blocks.*.feed_forward.projection": RowwiseParallel(output_layouts=Shard(1)),
        "head.norm": SequenceParallel(),
        "head.projection": ColwiseParallel(input_layouts=Shard(1)),
    }
    model.embedding = _SequenceEmbedding(model.embedding.token, model.embedding.position, mesh.tensor)
    partial = [name for name, _ in model.named_parameters() if "norm" in name or "position" in name]
    return _apply(model, mesh, plan, partial)


def _apply(model: GPT, mesh: Mesh, plan: dict[str, ParallelStyle], partial: list[str] | None = None) -> Cut:
    axis = mesh.tensor
    columns = [f"blocks.*.attention.{name}" for name in ("query", "key_value", "query_key_value")]
    plan.update({name: ColwiseParallel() for name in [*columns, "blocks.*.feed_forward.expansion"]})
    assert axis.group is not None
    device_mesh = DeviceMesh.from_group(axis.group, mesh.recorder.device.type)
    vocabulary_size = model.embedding.token.num_embeddings
    parallelize_module(model, device_mesh, plan, src_data_rank=None)
    shards: dict[str, Part] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                whole = f"{prefix}.{name}"
                _keep_local(module, name, parameter, axis, summed_later=whole in (partial or ()))
                (placement,) = parameter.placements
                if isinstance(placement, Shard):
                    blocks = STACKED.get(prefix.rpartition(".")[2], 1)
                    shards[whole] = Part(placement.dim, parameter.shape[placement.dim], blocks)
    model.tie_weights()
    model.loss = _ParallelLoss(vocabulary_size, device_mesh)
    return Cut(shards, sharing_of(model, mesh, shards, partial or ()), recorded=False)


def _keep_local(module: nn.Module, name: str, whole: DTensor, axis: Axis, *, summed_later: bool) -> None:
    """Keep this rank's part, in equal parts after padding, as the module's parameter `name`; a DTensor in forward.

    Args:
        summed_later: leave gradients that are a sum over the ranks as this rank's summand.
    """
    (placement,) = whole.placements
    own = whole.to_local().shape
    padded = list(own)
    if isinstance(placement, Shard):
        padded[placement.dim] = -(-whole.shape[placement.dim] // axis.size)
    module.register_parameter(name, nn.Parameter(torch.empty(padded, dtype=whole.dtype, device=whole.device)))
    device_mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
    gradient: list[Placement] = [Partial()] if summed_later else [placement]

    def as_dtensor(module: nn.Module, _: Any) -> None:
        local = cast(Tensor, module._parameters[name])
        if local.shape != own:
            local = local[: own[0]]
        module.__dict__[name] = DTensor.from_local(
            local, device_mesh, [placement], shape=shape, stride=stride, grad_placements=gradient
        )

    module.register_forward_pre_hook(as_dtensor)


class _SequenceEmbedding(nn.Module):
    """Adds the positions of this rank's part of the sequence: [batch, sequence / size, width]."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.token = token
        self.position = position
        self.axis = axis

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1] // self.axis.size
        embedded: Tensor = self.token(input_ids) + self.position.weight.narrow(0, self.axis.index * length, length)
        return embedded


class _ParallelLoss:
    """Summed cross-entropy of this rank's columns of the logits, with backward under `loss_parallel` too."""

    def __init__(self, vocabulary_size: int, device_mesh: DeviceMesh) -> None:
        self.vocabulary_size = vocabulary_size
        self.device_mesh = device_mesh

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.flatten(0, -2)
        shape = torch.Size((len(rows), self.vocabulary_size))
        whole = DTensor.from_local(rows, self.device_mesh, [Shard(1)], shape=shape, stride=(shape[1], 1))
        with loss_parallel():
            loss = F.cross_entropy(whole, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        backward = ExitStack()
        loss.register_hook(lambda _: backward.enter_context(loss_parallel()))
        whole.register_hook(lambda _: backward.close())
        return cast(DTensor, loss).to_local()
