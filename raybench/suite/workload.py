"""What is trained: model, data, optimizer and sizes, as data that never changes after it was read."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from raybench.errors import unknown

Precision = Literal["fp32", "bf16"]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=2**20)]
TIMES_MS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
MAX_TIME_MS = 60_000
BUILT_IN_DATA = ("synthetic", "reviews", "python-docs")
MODEL_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` below and above `wanted`, in words."""
    below = next(d for d in range(min(wanted, total), 0, -1) if total % d == 0)
    above = next(d for d in range(max(wanted, 1), total + 1) if total % d == 0) if wanted < total else below
    return ", ".join(map(str, sorted({below, above})))


class Data(BaseModel):
    """Unknown keys are refused, values never change after they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Data):
    """A model: `gpt`, `timed` or a Hugging Face model by its sizes, or one's own as `module:function` (sizes are then
    its own business)."""

    name: str = "gpt"
    """`gpt`; `timed`, a GPT whose blocks take a set time by waiting, and have weights of `ffn_width` × `width`;
    `module:function`, a function that returns a torch module, called with `options`; or a Hugging Face model:
    `smollm2-360m` or `distilbert` as published, `llama` or `bert` by the sizes given, a name on the hub or a folder."""
    weights: Literal["auto", "pretrained", "local", "random"] = "auto"
    """Where a Hugging Face model's values come from: the hub, a folder, or the seed; `auto`: its source where that can
    be reached, else the seed."""
    task: Literal["classification", "language-modelling"] = "language-modelling"
    num_classes: Annotated[int, Field(ge=2, le=2**16)] = 5
    """Classes that a classification tells apart."""
    family: Literal["llama", "bert", "distilbert"] | None = None
    """Of a Hugging Face model: follows from its name, or from its source's configuration."""
    source: str | None = None
    """The hub's name, or the folder, that a Hugging Face model's weights are read from; follows from its name."""
    num_layers: Size = 12
    width: Size = 768
    num_heads: Size = 12
    num_kv_heads: Size | None = None
    """Heads of keys and values, each shared by equally many query heads (grouped-query attention); null: one each."""
    ffn_width: Size = 3072
    vocabulary_size: Size = 50257
    """Number of token ids; also of the synthetic data's."""
    tied_head: bool = False
    """Whether the output projection shares the token embedding's weight."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a model of one's own; further keys of a Hugging Face model's configuration; of `timed`, the
    milliseconds that a block takes for a micro-batch of the workload's size: `forward_ms`, `input_gradient_ms`,
    `weight_gradient_ms`, each 0 where it is not given."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        from raybench.models.families import is_source, with_preset

        if not isinstance(given, dict):
            return given
        name = str(given.get("name", "gpt"))
        if is_source(name):
            return {"task": "classification", "source": name, **given}
        return with_preset(given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        from raybench.models.families import FAMILIES, PRESETS, is_source

        if self.name not in ("gpt", "timed") and not re.match(MODEL_FUNCTION, self.name) and not is_source(self.name):
            known = unknown("name", self.name, ["gpt", "timed", *PRESETS])
            if self.name not in PRESETS:
                raise ValueError(f"{known}, module:function, a name on the hub or a folder")
        if self.family is not None and self.task not in FAMILIES[self.family].tasks:
            allowed = ", ".join(FAMILIES[self.family].tasks)
            raise ValueError(f"task: {self.task!r} is not for the {self.family} family (allowed: {allowed})")
        if self.family is not None and self.width % self.num_heads and not self.options.get("head_dim"):
            near = nearest_divisors(self.width, self.num_heads)
            raise ValueError(f"num_heads: {self.num_heads} does not divide width {self.width} (nearest: {near})")
        if self.family is not None and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            near = nearest_divisors(self.num_heads, self.num_kv_heads)
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads} (nearest: {near})"
            )
        if self.name in ("gpt", "timed") and self.task != "language-modelling":
            raise ValueError(f"task: {self.task!r} is not for {self.name} (allowed: language-modelling)")
        if self.name == "gpt" and self.width % self.num_heads:
            near = nearest_divisors(self.width, self.num_heads)
            raise ValueError(f"num_heads: {self.num_heads} does not divide width {self.width} (nearest: {near})")
        if self.name == "gpt" and self.num_heads % self.kv_heads:
            near = nearest_divisors(self.num_heads, self.kv_heads)
            raise ValueError(
                f"num_kv_heads: {self.kv_heads} does not divide num_heads {self.num_heads} (nearest: {near})"
            )
        if self.name == "gpt" and self.options:
            raise ValueError(f"options: {sorted(self.options)} are for timed or a model of one's own (module:function)")
        if self.name == "timed":
            self._check_times()
        return self

    def _check_times(self) -> None:
        for key, value in self.options.items():
            if key not in TIMES_MS:
                raise ValueError(str(unknown("options", key, TIMES_MS)))
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME_MS:
                raise ValueError(f"options.{key}: {value!r} is not allowed (a number from 0 to {MAX_TIME_MS})")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads


class OptimizerConfig(Data):
    """The optimizer of every case, peers included."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to zero over `schedule_steps`."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule_steps: PositiveInt = 1000
    """Steps at which `linear` and `cosine` reach zero."""


class DataConfig(Data):
    """What the model is trained on."""

    name: str = "synthetic"
    """`synthetic`: a seeded Markov chain over the vocabulary, so that the loss can fall; `reviews`: labelled reviews
    that a seeded grammar makes up; `python-docs`: the text of Python's own documentation; none of them needs a
    download. Else a data set's name on the hub, a folder of Parquet or CSV files, or one such file."""
    num_samples: PositiveInt | None = None
    """Size of the data set in sequences; null for all there is. The last, incomplete global batch of a pass is
    dropped."""
    min_length: PositiveInt | None = None
    """Shortest sequence of synthetic data in valid tokens; null for all of full length. Shorter ones are padded and not
    trained on."""
    split: str = "train"
    held_out_split: str = "test"
    """What is evaluated on; a source without it gives up every tenth of its samples."""
    text_column: str = "text"
    label_column: str = "label"
    tokenizer: str = "auto"
    """`model`: the model's own; `bpe`: a byte-level BPE of the model's vocabulary, trained on the text; a name on the
    hub or a folder; `auto`: `model` where the model's weights are read, else `bpe`."""
    padding: Literal["fixed", "longest"] = "fixed"
    """Of classified text: to the sequence length, or to the longest of each micro-batch, which gives ranks different
    work."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name not in BUILT_IN_DATA and not re.search(r"[/.~]", self.name):
            known = unknown("name", self.name, BUILT_IN_DATA)
            raise ValueError(f"{known}, a name on the hub (owner/name), a folder or a file")
        if self.min_length is not None and self.name != "synthetic":
            raise ValueError(f"min_length: {self.min_length} is for synthetic data alone")
        return self

    @property
    def described(self) -> str:
        """Name and what must be known beside it, as rows tell it."""
        made_up = " (made up by a seeded grammar)" if self.name == "reviews" else ""
        return f"{self.name}{made_up}" + (", padded to the longest" if self.padding == "longest" else "")


class Workload(Data):
    """What is trained: the same for every case of a track. Micro-batch size and number are per data rank (with
    `scaling: strong`, those of a single one)."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    sequence_length: Size = 128
    micro_batch_size: Size = 8
    """Sequences in one micro-batch."""
    num_micro_batches: Size = 1
    """Micro-batches a step on each data rank: accumulation where there is no pipeline."""
    precision: Precision = "fp32"
    """`bf16`: forward and backward under autocast, fp32 parameters, gradients and optimizer state."""
    tf32: bool = False
    """Whether fp32 matrix products may use TF32 on the GPUs that have it (never in the gate)."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    clip_gradient_norm: PositiveFloat | None = None
    """Largest global gradient norm; null: no clipping."""
    recompute: Literal["none", "full"] = "none"
    """`full`: activation checkpointing of every block."""
    compile: bool = False
    """Whether every block is compiled by torch.compile."""
    data: DataConfig = Field(default_factory=DataConfig)
    seed: NonNegative = 42

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.task == "classification" and self.data.name in ("synthetic", "python-docs"):
            raise ValueError(
                f"data.name: {self.data.name!r} has no labels to classify by (allowed: reviews, or one's own)"
            )
        return self

    @property
    def samples_per_rank(self) -> int:
        """Sequences that a data rank takes in a step."""
        return self.micro_batch_size * self.num_micro_batches

    def tokens_per_step(self, data_size: int) -> int:
        """Tokens of a global batch over `data_size` data ranks, padding included."""
        return self.samples_per_rank * data_size * self.sequence_length

    @property
    def hash(self) -> str:
        """Ten hexadecimal digits that are equal exactly for equal workloads."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:10]
