"""Tensor parallelism with sequence parallelism: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022, arXiv:2205.05198).

What Megatron-LM repeats on every rank, norms, dropout and the residual stream, is spread over the ranks along the
sequence. Each all-reduce becomes a reduce-scatter and an all-gather of the same bytes. Inputs of matrices are kept as
the rank's part and gathered anew in backward. Norms see a part of the tokens: their gradients, and the position
embedding's, are summed over the ranks once a step.
"""

from __future__ import annotations

from raybench.models.gpt import GPT, Block
from raybench.parallel.parts import Cut
from raybench.parallel.tensor.cut import collect, cut_matrices
from raybench.parallel.tensor.layers import SequenceEmbedding, ShardedDropout
from raybench.worker.mesh import Mesh


def parallelize(model: GPT, mesh: Mesh) -> Cut:
    """Put this rank's part of every matrix in its place in an outlined model, and its part of the sequence between."""
    axis = mesh.tensor
    cut_matrices(model, axis, sequence=True)
    model.embedding = SequenceEmbedding(model.embedding.token, model.embedding.position, axis)
    for block in model.blocks:
        if isinstance(block, Block):
            block.dropout = ShardedDropout(block.dropout.p, axis)
    partial = [name for name, _ in model.named_parameters() if "norm" in name or "position" in name]
    return collect(model, mesh, partial)
