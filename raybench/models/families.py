"""The Hugging Face models that can be trained, known by their sizes alone: no torch, no download.

`smollm2-360m` and `distilbert` are the published models HuggingFaceTB/SmolLM2-360M-Instruct and
distilbert/distilbert-base-uncased: raybench carries their configurations, so that they can be made with random values
where no hub is reachable. `llama` and `bert` are made by whatever sizes a track gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from raybench.suite.track import ModelConfig

Family = Literal["llama", "bert", "distilbert"]
Task = Literal["classification", "language-modelling"]


@dataclass(frozen=True)
class Keys:
    """What a family's transformers configuration calls the sizes of a `ModelConfig`."""

    num_layers: str = "num_hidden_layers"
    width: str = "hidden_size"
    num_heads: str = "num_attention_heads"
    ffn_width: str = "intermediate_size"
    vocabulary_size: str = "vocab_size"
    num_kv_heads: str | None = None
    tied_head: str | None = None
    dropouts: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ("classification",)
    """What the family can be trained for."""

    def sizes(self) -> dict[str, str]:
        """Key of `ModelConfig` by key of the transformers configuration."""
        names = ("num_layers", "width", "num_heads", "ffn_width", "vocabulary_size", "num_kv_heads", "tied_head")
        return {getattr(self, name): name for name in names if getattr(self, name) is not None}


FAMILIES: dict[Family, Keys] = {
    "llama": Keys(
        num_kv_heads="num_key_value_heads",
        tied_head="tie_word_embeddings",
        dropouts=("attention_dropout",),
        tasks=("classification", "language-modelling"),
    ),
    "bert": Keys(dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "distilbert": Keys(
        num_layers="n_layers",
        width="dim",
        num_heads="n_heads",
        ffn_width="hidden_dim",
        dropouts=("dropout", "attention_dropout", "seq_classif_dropout"),
    ),
}


@dataclass(frozen=True)
class Preset:
    """A model that a track can name: what it is unless the track says otherwise."""

    family: Family
    task: Task
    source: str | None = None
    """Its name on the hub."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `ModelConfig`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of its transformers configuration."""


PRESETS: dict[str, Preset] = {
    "smollm2-360m": Preset(
        "llama",
        "classification",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        {
            "num_layers": 32,
            "width": 960,
            "num_heads": 15,
            "num_kv_heads": 5,
            "ffn_width": 2560,
            "vocabulary_size": 49152,
            "tied_head": True,
        },
        {
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
    ),
    "distilbert": Preset(
        "distilbert",
        "classification",
        "distilbert/distilbert-base-uncased",
        {"num_layers": 6, "width": 768, "num_heads": 12, "ffn_width": 3072, "vocabulary_size": 30522},
        {"max_position_embeddings": 512, "pad_token_id": 0},
    ),
    "llama": Preset("llama", "language-modelling", options={"pad_token_id": 0}),
    "bert": Preset("bert", "classification", options={"pad_token_id": 0}),
}


def is_source(name: str) -> bool:
    """Whether a model's name is a folder's or one on the hub, rather than a word that raybench knows."""
    return "/" in name or name.startswith((".", "~"))


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a track says of a model, laid over what its name means."""
    preset = PRESETS.get(str(given.get("name")))
    if preset is None:
        return dict(given)
    meant = {"family": preset.family, "task": preset.task, "source": preset.source, **preset.sizes}
    options = {**preset.options, **(given.get("options") or {})}
    return {**meant, **given, "options": options}


def is_published(model: ModelConfig) -> bool:
    """Whether a preset's sizes are those of the model on the hub, the number of layers apart."""
    preset = PRESETS.get(model.name)
    if preset is None or preset.source is None:
        return model.source is not None
    return all(getattr(model, key) == value for key, value in preset.sizes.items() if key != "num_layers")


def num_parameters(model: ModelConfig) -> int:
    """Trainable parameters, tied ones once, the head included."""
    width, ffn, vocabulary = model.width, model.ffn_width, model.vocabulary_size
    positions = int(model.options.get("max_position_embeddings", 512))
    classifier = width * model.num_classes
    if model.family == "llama":
        head = classifier if model.task == "classification" else vocabulary * width * (not model.tied_head)
        biases = _llama_biases(model)
        block = _block_matrices(model) + 2 * width + biases
        return vocabulary * width + model.num_layers * block + width + head
    block = _block_matrices(model) + 4 * width + ffn + width + 4 * width
    segments = int(model.options.get("type_vocab_size", 2)) if model.family == "bert" else 0
    embeddings = (vocabulary + positions + segments) * width + 2 * width
    pooler = width * width + width
    return embeddings + model.num_layers * block + pooler + classifier + model.num_classes


def matrix_parameters(model: ModelConfig) -> float:
    """Parameters that take part in a product, a token: what a classifier does once a sequence is not counted."""
    head = 0
    if model.family == "llama":
        head = model.width * (model.num_classes if model.task == "classification" else model.vocabulary_size)
    return model.num_layers * _block_matrices(model) + head


def _block_matrices(model: ModelConfig) -> int:
    """Parameters of one layer's matrices."""
    width, kv_width = model.width, _kv_width(model)
    attention = width * (2 * _head_width(model) * model.num_heads + 2 * kv_width)
    return attention + (3 if model.family == "llama" else 2) * width * model.ffn_width


def _llama_biases(model: ModelConfig) -> int:
    attention = _head_width(model) * model.num_heads + 2 * _kv_width(model) + model.width
    feed_forward = 2 * model.ffn_width + model.width
    return attention * bool(model.options.get("attention_bias")) + feed_forward * bool(model.options.get("mlp_bias"))


def _head_width(model: ModelConfig) -> int:
    return int(model.options.get("head_dim") or model.width // model.num_heads)


def _kv_width(model: ModelConfig) -> int:
    return (model.num_kv_heads or model.num_heads) * _head_width(model)
