"""How many floating-point operations a token costs, under two conventions that are always named.

`6n`        6 × parameters that take part in a product, plus nothing: Kaplan et al. (2020).
`non_causal` the above plus attention's 12 · layers · width · sequence, as Korthikanti et al. (2022) and PaLM count it,
            the masked half of the scores included.
Both count forward and backward, never recomputation.
"""

from __future__ import annotations

from raybench.models import families
from raybench.suite.track import ModelConfig, Workload


def matrix_parameters(model: ModelConfig) -> int:
    """Parameters of the GPT that take part in a matrix product (the head once, the embeddings not)."""
    block = model.width * (2 * model.width + _kv_width(model)) + 2 * model.width * model.ffn_width
    return model.num_layers * block + model.vocabulary_size * model.width


def flops_per_token(workload: Workload) -> dict[str, float] | None:
    """Model FLOPs a token, forward and backward, by convention; None for a model of one's own."""
    model = workload.model
    if model.name != "gpt" and model.family is None:
        return None
    products = 6.0 * (matrix_parameters(model) if model.family is None else families.matrix_parameters(model))
    attention = 12.0 * model.num_layers * model.width * workload.sequence_length
    return {"6n": products, "non_causal": products + attention}


def num_parameters(workload: Workload) -> int | None:
    """Trainable parameters, tied ones once; None for a model of one's own."""
    model = workload.model
    if model.family is not None:
        return families.num_parameters(model)
    if model.name != "gpt":
        return None
    width, ffn = model.width, model.ffn_width
    attention = width * (2 * width + _kv_width(model)) + 2 * width + _kv_width(model)
    block = attention + 2 * width * ffn + ffn + width + 4 * width
    embeddings = (model.vocabulary_size * (1 if model.tied_head else 2) + workload.sequence_length) * width
    return model.num_layers * block + embeddings + 2 * width


def _kv_width(model: ModelConfig) -> int:
    """Width of a token's keys and values together."""
    return 2 * model.width // model.num_heads * model.kv_heads
