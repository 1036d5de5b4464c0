"""What a track is: one question of the suite, as data.

A workload, how it is measured, and the cases that answer the question. `track_file.py` reads one from its YAML file;
the `ResolvedTrack` that comes of it is all that the driver and the workers ever see.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from raybench.errors import RequestError, unknown

Scale = Literal["smoke", "full"]
Precision = Literal["fp32", "bf16"]
Scaling = Literal["weak", "strong"]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=2**20)]
Axis = Annotated[int, Field(gt=0, le=2**16)]
TIMES_MS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
MAX_TIME_MS = 60_000
MODEL_FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` below and above `wanted`, in words."""
    below = next(d for d in range(min(wanted, total), 0, -1) if total % d == 0)
    above = next(d for d in range(max(wanted, 1), total + 1) if total % d == 0) if wanted < total else below
    return ", ".join(map(str, sorted({below, above})))


class _Data(BaseModel):
    """Unknown keys are refused, values never change after they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Data):
    """A model: `gpt` or `timed` by its sizes, or one's own as `module:function` (sizes are then its own business)."""

    name: str = "gpt"
    """`gpt`; `timed`, a GPT whose blocks take a set time by waiting, and have weights of `ffn_width` × `width`; or
    `module:function`: a function that returns a torch module, called with `options`."""
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
    """Keyword arguments of a model of one's own; of `timed`, the milliseconds that a block takes for a micro-batch of
    the workload's size: `forward_ms`, `input_gradient_ms`, `weight_gradient_ms`, each 0 where it is not given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name not in ("gpt", "timed") and not re.match(MODEL_FUNCTION, self.name):
            raise ValueError(f"name: {self.name!r} is not known (allowed: gpt, timed, or module:function)")
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


class OptimizerConfig(_Data):
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


class DataConfig(_Data):
    """What the model is trained on."""

    name: Literal["synthetic"] = "synthetic"
    """`synthetic`: a seeded Markov chain over the vocabulary, so that the loss can fall; needs no download."""
    num_samples: PositiveInt | None = None
    """Size of the data set in sequences; null for endless. The last, incomplete global batch of a pass is dropped."""
    min_length: PositiveInt | None = None
    """Shortest sequence in valid tokens; null for all of full length. Shorter ones are padded and not trained on."""


class Workload(_Data):
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


class Measure(_Data):
    """How long each case is measured."""

    num_steps: PositiveInt = 50
    """Steps in the timed window of a round."""
    num_warmup_steps: NonNegative = 5
    """Steps before the window of each round, not timed."""
    num_rounds: PositiveInt = 5
    """Rounds a case; the cases alternate round by round."""
    num_instrumented_steps: NonNegative = 2
    """Steps after the window in which every operation is recorded."""
    timeout_s: PositiveInt = 600
    """Longest time of one round, gate included."""


class Evaluate(_Data):
    """When a track's cases are evaluated on held-out data: the clock of the window stands still meanwhile."""

    every_steps: PositiveInt
    """Steps of the window from one evaluation to the next; the window's end is always one."""
    num_samples: PositiveInt = 64
    """Held-out sequences of each evaluation."""


class Layout(_Data):
    """How ranks are arranged: data × pipeline × tensor, on how many nodes."""

    data: Axis = 1
    pipeline: Axis = 1
    tensor: Axis = 1
    nodes: Axis = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.pipeline}x{self.tensor}"


class StrategyNames(_Data):
    """The implementation chosen on each axis; null where the axis has size one."""

    data: str | None = None
    pipeline: str | None = None
    tensor: str | None = None


class Case(_Data):
    """One way of doing a track's workload: a layout and a strategy."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    layout: Layout = Field(default_factory=Layout)
    strategy: StrategyNames = Field(default_factory=StrategyNames)
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the strategy, such as a bucket's size; each strategy names those that it knows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        from raybench.parallel.registry import check_case

        check_case(self.layout, self.strategy, self.options)
        return self

    @property
    def peer(self) -> str | None:
        """The library whose implementation this is, or null for a hand-written one."""
        from raybench.parallel.registry import library_of

        return library_of(self.strategy)


class ResolvedTrack(_Data):
    """A track at one scale, with all overrides applied."""

    track: str
    """The stem of the track's file."""
    title: str
    question: str
    scale: Scale
    workload: Workload
    scaling: Scaling = "weak"
    """`weak`: each data rank takes the workload's batch, so the global batch grows with them. `strong`: the workload's
    batch is the global one, and the data ranks share it."""
    micro_batch: Literal["given", "largest"] = "given"
    """`largest`: each case is timed with the largest micro-batch that its ranks' memory allows, found in its first
    round. The gate takes the workload's."""
    memory_budget_mib: PositiveFloat | None = None
    """What a rank may take with `micro_batch: largest`; null: what its GPU has (without GPUs it must be given)."""
    evaluate: Evaluate | None = None
    """Null: no evaluation."""
    measure: Measure = Field(default_factory=Measure)
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        from raybench.parallel.pipeline.plan import check_sizes

        names = [case.name for case in self.cases]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"cases: the name {name!r} is used {names.count(name)} times, each must be its own")
        if self.micro_batch == "largest" and self.scaling == "strong":
            raise ValueError(
                "micro_batch: 'largest' changes the global batch, which scaling 'strong' keeps (allowed with it: given)"
            )
        from raybench.parallel.fit import check_fit

        samples = self.workload.data.num_samples
        for case in self.cases:
            work = self.workload_of(case)
            try:
                check_sizes(case, work)
                check_fit(work, case)
            except RequestError as error:
                raise ValueError(f"cases.{case.name}: {error}") from None
            batch = work.samples_per_rank * case.layout.data
            if samples is not None and samples < batch:
                raise ValueError(
                    f"workload.data.num_samples: {samples} is less than one global batch of case {case.name!r} "
                    f"({batch} sequences)"
                )
        return self

    def workload_of(self, case: Case, micro_batch_size: int | None = None) -> Workload:
        """The workload as each data rank of `case` takes it.

        Args:
            micro_batch_size: what was found for `micro_batch: largest`, in place of the workload's own.

        Raises:
            ValueError: with `scaling: strong`, a global batch that the data ranks cannot share evenly.
        """
        work = self.workload
        if micro_batch_size is not None:
            return work.model_copy(update={"micro_batch_size": micro_batch_size})
        if self.scaling == "weak":
            return work
        ranks, samples = case.layout.data, work.samples_per_rank
        if samples % ranks:
            raise ValueError(
                f"cases.{case.name}.layout.data: {ranks} ranks cannot share the global batch of {samples} sequences "
                f"evenly (scaling is strong; nearest: {nearest_divisors(samples, ranks)})"
            )
        fewer = math.gcd(work.num_micro_batches, ranks)
        sizes = {"num_micro_batches": work.num_micro_batches // fewer}
        return work.model_copy(update={**sizes, "micro_batch_size": work.micro_batch_size * fewer // ranks})

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        raise unknown(f"case of track {self.track}", name, [c.name for c in self.cases])
