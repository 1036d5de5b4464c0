"""Megatron-LM's cut of the Hugging Face families: which linear layer is cut by columns, which by rows.

transformers' attention and feed-forward modules stay as they are, with fewer heads and a narrower middle. Their input
goes through `f` once, before all matrices that read it. Embeddings, norms and heads are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raybench.models.huggingface import TransformersModel
from raybench.parallel.parts import Shard
from raybench.parallel.tensor.functions import copy_input, drawn_apart
from raybench.parallel.tensor.layers import RowParallelLinear
from raybench.worker.communication import Axis


class Columns(nn.Linear):
    """This rank's part of the outputs of a linear layer whose input has gone through `f`.

    Args:
        copies: ranks that hold the same part, where there are fewer heads than ranks.
    """

    def __init__(self, whole: nn.Linear, axis: Axis, *, copies: int = 1) -> None:
        columns = whole.out_features * copies // axis.size
        super().__init__(whole.in_features, columns, bias=whole.bias is not None, device=whole.weight.device)
        shard = Shard(0, whole.out_features, copies=copies)
        self.shards = {name: shard for name, _ in self.named_parameters()}


def cut_blocks(model: TransformersModel, axis: Axis) -> None:
    """Replace the matrices of every block by this rank's part of them."""
    for index, block in enumerate(model.blocks):
        _CUTS[model.config.model_type](block, axis, f"blocks.{index}")


def _cut_llama(block: Any, axis: Axis, label: str) -> None:
    attention, feed_forward = block.self_attn, block.mlp
    num_heads, num_kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    copies = max(1, axis.size // num_kv_heads)
    attention.q_proj = Columns(attention.q_proj, axis)
    attention.k_proj = Columns(attention.k_proj, axis, copies=copies)
    attention.v_proj = Columns(attention.v_proj, axis, copies=copies)
    attention.num_key_value_groups = num_heads // (num_kv_heads * copies)
    attention.o_proj = _rows(attention.o_proj, axis, f"{label}.self_attn.o_proj")
    _surround(attention, axis, f"{label}.self_attn", attention.attention_dropout)
    feed_forward.gate_proj = Columns(feed_forward.gate_proj, axis)
    feed_forward.up_proj = Columns(feed_forward.up_proj, axis)
    feed_forward.down_proj = _rows(feed_forward.down_proj, axis, f"{label}.mlp.down_proj")
    _surround(feed_forward, axis, f"{label}.mlp")


def _cut_distilbert(block: Any, axis: Axis, label: str) -> None:
    attention, feed_forward = block.attention, block.ffn
    for name in ("q_lin", "k_lin", "v_lin"):
        setattr(attention, name, Columns(getattr(attention, name), axis))
    attention.out_lin = _rows(attention.out_lin, axis, f"{label}.attention.out_lin")
    _surround(attention, axis, f"{label}.attention", attention.dropout.p)
    feed_forward.lin1 = Columns(feed_forward.lin1, axis)
    feed_forward.lin2 = _rows(feed_forward.lin2, axis, f"{label}.ffn.lin2")
    _surround(feed_forward, axis, f"{label}.ffn")


def _cut_bert(block: Any, axis: Axis, label: str) -> None:
    attention, output = block.attention.self, block.attention.output
    for name in ("query", "key", "value"):
        setattr(attention, name, Columns(getattr(attention, name), axis))
    output.dense = _rows(output.dense, axis, f"{label}.attention.output.dense")
    _surround(attention, axis, f"{label}.attention.self", attention.dropout.p)
    block.intermediate.dense = Columns(block.intermediate.dense, axis)
    block.output.dense = _rows(block.output.dense, axis, f"{label}.output.dense")
    _surround(block.intermediate, axis, f"{label}.intermediate")


_CUTS: dict[str, Callable[[Any, Axis, str], None]] = {
    "llama": _cut_llama,
    "distilbert": _cut_distilbert,
    "bert": _cut_bert,
}


def _rows(whole: nn.Linear, axis: Axis, label: str) -> RowParallelLinear:
    return RowParallelLinear(whole, axis, sequence=False, label=label)


def _surround(module: nn.Module, axis: Axis, label: str, dropout: float = 0.0) -> None:
    """Let a module's first argument go through `f`, and its dropout differ between the ranks."""
    inner = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = copy_input(hidden_states, axis, label)
        if not (module.training and dropout):
            return inner(hidden_states, *args, **kwargs)
        with drawn_apart(axis, torch.device(hidden_states.device)):
            return inner(hidden_states, *args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
