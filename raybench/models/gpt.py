"""A GPT-2 style decoder (Radford et al., 2019): learned positions, pre-norm blocks, GELU, causal attention.

The model is made of the units that pipelines cut and shards gather: an embedding, blocks, a head. Its parameters are
initialised one by one from their own names, so that any rank can make any part of the model, equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raybench.suite.track import ModelConfig


class Embedding(nn.Module):
    """Token plus position embedding: [batch, sequence] of ids to [batch, sequence, width]."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary_size, config.width)
        self.position = nn.Embedding(sequence_length, config.width)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.token(input_ids) + self.position.weight[: input_ids.shape[1]]
        return embedded


class Attention(nn.Module):
    """Causal multi-head self-attention over [batch, sequence, width].

    With fewer key and value heads than query heads (Ainslie et al., "GQA", 2023) the two projections are apart, since
    a tensor group may have to share a key head that it need not share with queries.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.dropout = config.dropout
        self.grouped = config.kv_heads < config.num_heads
        if self.grouped:
            self.query = nn.Linear(config.width, config.width)
            self.key_value = nn.Linear(config.width, 2 * config.kv_heads * self.head_width)
        else:
            self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.mix(*self.project(hidden)))
        return projected

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [batch, sequence, heads · head width] each."""
        if self.grouped:
            return (self.query(hidden), *self.key_value(hidden).chunk(2, -1))
        projected: Tensor = self.query_key_value(hidden)
        return projected.chunk(3, -1)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What every head attends to, heads side by side as they came."""
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=self.grouped
        )
        return mixed.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.width, config.ffn_width)
        self.projection = nn.Linear(config.ffn_width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.projection(F.gelu(self.expansion(hidden)))
        return projected


class Block(nn.Module):
    """One transformer block, pre-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        output: Tensor = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return output


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.projection = nn.Linear(config.width, config.vocabulary_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


class GPT(nn.Module):
    """Ids [batch, sequence] to logits [batch, sequence, vocabulary]."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """Logits and labels to a summed loss, set where each rank has a part of the logits; else it is cross-entropy."""

    def __init__(self, config: ModelConfig, sequence_length: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.residual_std = 0.02 / math.sqrt(2 * config.num_layers)
        self.embedding = Embedding(config, sequence_length)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.tied_head = config.tied_head
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head share the token embedding's weight where the configuration asks for it and both are here."""
        if self.tied_head and hasattr(self, "embedding") and hasattr(self, "head"):
            self.head.projection.weight = self.embedding.token.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def initialize_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """GPT-2's initial values: N(0, 0.02), projections into the residual stream scaled by 1/√(2·layers)."""
        if "norm" in name or name.endswith(".bias"):
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            residual = name.startswith("blocks.") and name.endswith(".projection.weight")
            parameter.normal_(0.0, self.residual_std if residual else 0.02, generator=generator)
