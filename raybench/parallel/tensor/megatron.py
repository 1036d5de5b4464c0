"""Tensor parallelism: Shoeybi et al., "Megatron-LM" (2019, arXiv:1909.08053).

In every block the first matrix of a pair is cut by columns and the second by rows, so that what is between them needs
no communication: one all-reduce forward and one backward for attention, and the same for the feed-forward layers.
Norms, residual stream and dropout outside attention are the same on every rank.
"""

from __future__ import annotations

from torch import nn

from raybench.models.gpt import GPT
from raybench.parallel.parts import Cut
from raybench.parallel.tensor.cut import collect, cut_matrices
from raybench.worker.mesh import Mesh


def parallelize(model: nn.Module, mesh: Mesh) -> Cut:
    """Put this rank's part of every matrix in its place in an outlined model, a GPT or a Hugging Face model."""
    if isinstance(model, GPT):
        cut_matrices(model, mesh.tensor, sequence=False)
    else:
        from raybench.models.huggingface import TransformersModel
        from raybench.parallel.tensor.huggingface import cut_blocks

        assert isinstance(model, TransformersModel)
        cut_blocks(model, mesh.tensor)
    return collect(model, mesh)
