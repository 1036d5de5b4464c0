"""Hugging Face models as an embedding, blocks and a head: what pipelines cut and sharded strategies gather.

All modules are transformers' own, with its weights and its code; only the order in which they are called is written
here, after the forward pass of `LlamaModel`, `DistilBertModel` and `BertModel` (transformers 5). The control of the
gate is the model in one piece, `untouched`: there transformers' own forward pass runs instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raybench.data.batches import IGNORED_LABEL
from raybench.models.families import FAMILIES, Family, Task
from raybench.suite.track import ModelConfig

CLASSES: dict[tuple[Family, Task], type[PreTrainedModel]] = {
    ("llama", "classification"): LlamaForSequenceClassification,
    ("llama", "language-modelling"): LlamaForCausalLM,
    ("distilbert", "classification"): DistilBertForSequenceClassification,
    ("bert", "classification"): BertForSequenceClassification,
}
CONFIGS: dict[Family, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "distilbert": DistilBertConfig,
    "bert": BertConfig,
}


def model_class(model: ModelConfig) -> type[PreTrainedModel]:
    """transformers' class of a Hugging Face model for its task."""
    assert model.family is not None
    return CLASSES[model.family, model.task]


def transformers_config(model: ModelConfig) -> PreTrainedConfig:
    """transformers' configuration of a model's sizes."""
    assert model.family is not None
    keys = FAMILIES[model.family]
    values = {theirs: getattr(model, ours) for theirs, ours in keys.sizes().items()}
    values |= dict.fromkeys(keys.dropouts, model.dropout)
    if model.family == "bert":
        values["classifier_dropout"] = model.dropout
    if model.family == "llama":
        values["use_cache"] = False
    config = CONFIGS[model.family](**{**model.options, **values}, num_labels=model.num_classes)
    config._attn_implementation = "sdpa"
    return config


def outline(model: ModelConfig, *, recompute: bool, untouched: bool) -> TransformersModel:
    """The model with its parameters on the meta device, and the few buffers that it has already made."""
    config = transformers_config(model)
    with torch.device("meta"), no_init_weights():
        whole = model_class(model)(config)
    _restore_buffers(whole)
    return TransformersModel(whole, recompute=recompute, untouched=untouched)


def _restore_buffers(whole: PreTrainedModel) -> None:
    """Make anew, in memory, what a model made on the meta device computes once from its configuration."""
    if isinstance(whole, LlamaForCausalLM | LlamaForSequenceClassification):
        whole.model.rotary_emb = LlamaRotaryEmbedding(whole.config)
        return
    embeddings = whole.base_model.embeddings
    embeddings.position_ids = torch.arange(whole.config.max_position_embeddings).expand((1, -1))
    if isinstance(whole, BertForSequenceClassification):
        embeddings.token_type_ids = torch.zeros_like(embeddings.position_ids)


class TransformersModel(nn.Module):
    """Ids [batch, sequence], and a mask of the valid ones, to scores.

    A language model scores every token, [batch, sequence, vocabulary]. A Llama that classifies scores every token too,
    [batch, sequence, classes], as transformers' does before it picks the last valid one: here the labels pick it, -100
    everywhere else. A BERT scores its first token, [batch, 1, classes].
    """

    def __init__(self, whole: PreTrainedModel, *, recompute: bool = False, untouched: bool = False) -> None:
        super().__init__()
        self.config = whole.config
        self.recompute = recompute
        self._untouched = [whole] if untouched else []  # a list: its modules are ours already
        if isinstance(whole, LlamaForCausalLM | LlamaForSequenceClassification):
            base = whole.model
            self.embedding = Embedding(base.embed_tokens)
            self.blocks = base.layers
            scores = whole.score if isinstance(whole, LlamaForSequenceClassification) else whole.lm_head
            self.head: nn.Module = LlamaHead(base.norm, scores)
            self.rotary: LlamaRotaryEmbedding | None = base.rotary_emb
        else:
            self.embedding = Embedding(whole.base_model.embeddings)
            self.rotary = None
            if isinstance(whole, DistilBertForSequenceClassification):
                self.blocks = whole.distilbert.transformer.layer
                self.head = DistilBertHead(whole.pre_classifier, whole.dropout, whole.classifier)
            else:
                assert isinstance(whole, BertForSequenceClassification)
                self.blocks = whole.bert.encoder.layer
                self.head = BertHead(whole.bert.pooler, whole.dropout, whole.classifier)
        self.tied = isinstance(whole, LlamaForCausalLM) and bool(whole.config.tie_word_embeddings)
        self.tie_weights()
        if untouched and recompute:
            whole.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    def tie_weights(self) -> None:
        """Let the head share the token embedding's weight where the configuration asks for it."""
        if self.tied and {"embedding", "head"} <= self._modules.keys():
            assert isinstance(self.head, LlamaHead)
            self.head.scores.weight = self.embedding.tokens.weight

    def block_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """What every block takes beside the hidden states: made by whoever has the inputs, on any stage."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        like = torch.empty(*ids.shape, 0, device=ids.device)  # transformers reads shape, type and device from it
        if self.rotary is None:
            return {"attention_mask": create_bidirectional_mask(self.config, like, mask)}
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return {
            "attention_mask": create_causal_mask(self.config, like, mask, None, positions),
            "position_ids": positions,
            "position_embeddings": self.rotary(like, position_ids=positions),
        }

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        inputs = {"input_ids": input_ids}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if self._untouched:
            whole = self._untouched[0]
            logits: Tensor = whole(**inputs).logits
            return logits if logits.dim() == 3 else logits.unsqueeze(1)
        others = self.block_inputs(inputs)
        hidden = self.embedding(**inputs)
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, use_reentrant=False, **others)
            else:
                hidden = block(hidden, **others)
        scores: Tensor = self.head(hidden)
        return scores

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy summed over the labels that are not -100; of a sequence's only score, over its only label."""
        if outputs.shape[1] != labels.shape[1]:
            labels = labels.amax(1, keepdim=True)
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")

    def initialize_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """transformers' initial values: N(0, initializer_range), no padding row, norms of one, biases of zero."""
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            return
        parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        padding = self.config.pad_token_id
        if padding is not None and name.endswith(("embedding.tokens.weight", "word_embeddings.weight")):
            parameter[padding].zero_()


class Embedding(nn.Module):
    """Token ids to hidden states; the mask is for the blocks."""

    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.tokens(input_ids)
        return hidden


class LlamaHead(nn.Module):
    """Final norm, and the scores of every token: [batch, sequence, classes or vocabulary]."""

    def __init__(self, norm: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scores = scores

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


class DistilBertHead(nn.Module):
    """Scores of the first token, [batch, 1, classes], as in `DistilBertForSequenceClassification`."""

    def __init__(self, pre_classifier: nn.Module, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pre_classifier = pre_classifier
        self.dropout = dropout
        self.classifier = classifier

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(F.relu(self.pre_classifier(hidden[:, :1]))))
        return scores


class BertHead(nn.Module):
    """Scores of the first token, [batch, 1, classes], as in `BertForSequenceClassification`."""

    def __init__(self, pooler: nn.Module, dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.dropout = dropout
        self.classifier = classifier

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(self.pooler(hidden)).unsqueeze(1))
        return scores
