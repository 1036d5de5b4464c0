"""What both tensor strategies cut: every matrix of the model, and what of it each rank then holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from raybench.models.gpt import GPT, Block
from raybench.models.timed import TimedBlock
from raybench.parallel.parts import Cut, Shard, Sharing
from raybench.parallel.tensor.layers import ColumnParallelLinear, ParallelAttention, RowParallelLinear
from raybench.parallel.tensor.timed import ParallelTimedBlock
from raybench.parallel.tensor.vocabulary import VocabularyParallelEmbedding, VocabularyParallelLoss
from raybench.worker.communication import Axis
from raybench.worker.mesh import Mesh


def cut_matrices(model: GPT, axis: Axis, *, sequence: bool) -> None:
    """Replace the layers that hold matrices by this rank's part of them: first of a pair by columns, second by rows."""
    vocabulary_size = model.embedding.token.num_embeddings
    model.embedding.token = VocabularyParallelEmbedding(model.embedding.token, axis, sequence=sequence)
    for index, block in enumerate(model.blocks):
        name = f"blocks.{index}"
        if isinstance(block, TimedBlock):
            model.blocks[index] = ParallelTimedBlock(block, axis, sequence=sequence, label=name)
            continue
        assert isinstance(block, Block)
        block.attention = ParallelAttention(block.attention, axis, sequence=sequence, label=f"{name}.attention")
        feed_forward = block.feed_forward
        feed_forward.expansion = ColumnParallelLinear(
            feed_forward.expansion, axis, sequence=sequence, label=f"{name}.feed_forward.expansion"
        )
        feed_forward.projection = RowParallelLinear(
            feed_forward.projection, axis, sequence=sequence, label=f"{name}.feed_forward.projection"
        )
    model.head.projection = ColumnParallelLinear(model.head.projection, axis, sequence=sequence, label="head")
    model.tie_weights()
    model.loss = VocabularyParallelLoss(vocabulary_size, axis, sequence=sequence)


def collect(model: nn.Module, mesh: Mesh, partial: Collection[str] = ()) -> Cut:
    """How each parameter of a model whose layers have been replaced is held by this rank.

    Args:
        partial: parameters that every rank holds, with a gradient from its own part of the activations alone.
    """
    shards: dict[str, Shard] = {
        f"{prefix}.{name}": shard
        for prefix, module in model.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }
    return Cut(shards, sharing_of(model, mesh, shards, partial))


def sharing_of(
    model: nn.Module, mesh: Mesh, shards: Mapping[str, Shard], partial: Collection[str] = ()
) -> dict[str, Sharing]:
    """What the ranks of a tensor group share of a cut model; `partial` as in `collect`."""
    size = mesh.tensor.size
    whole, summed = Sharing(share=1 / size), Sharing(mesh.tensor, share=1 / size)
    copies = {shard.copies for shard in shards.values() if shard.copies > 1}
    copied = {n: Sharing(mesh.tensor_part(n), share=1 / n) for n in copies}
    sharing: dict[str, Sharing] = {}
    for name, _ in model.named_parameters():
        if name not in shards:
            sharing[name] = summed if name in partial else whole
        elif shards[name].copies > 1:
            sharing[name] = copied[shards[name].copies]
    return sharing
