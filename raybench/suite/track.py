"""What a track is: one question of the suite, as data.

A workload, how it is measured, and the cases that answer the question. `track_file.py` reads one from its YAML file;
the `ResolvedTrack` that comes of it is all that the driver and the workers ever see.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from raybench.errors import RequestError, unknown
from raybench.suite.workload import (
    BUILT_IN_DATA,
    TIMES_MS,
    Data,
    DataConfig,
    ModelConfig,
    NonNegative,
    OptimizerConfig,
    PositiveFloat,
    Precision,
    Workload,
    nearest_divisors,
)

__all__ = [
    "BUILT_IN_DATA",
    "TIMES_MS",
    "Case",
    "DataConfig",
    "Evaluate",
    "Layout",
    "Measure",
    "ModelConfig",
    "OptimizerConfig",
    "Precision",
    "ResolvedTrack",
    "Scale",
    "Scaling",
    "StrategyNames",
    "Workload",
    "nearest_divisors",
]

Scale = Literal["smoke", "full"]
Scaling = Literal["weak", "strong"]
Axis = Annotated[int, Field(gt=0, le=2**16)]


class Measure(Data):
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


class Evaluate(Data):
    """When a track's cases are evaluated on held-out data: the clock of the window stands still meanwhile."""

    every_steps: PositiveInt
    """Steps of the window from one evaluation to the next; the window's end is always one."""
    num_samples: PositiveInt = 64
    """Held-out sequences of each evaluation."""


class Layout(Data):
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


class StrategyNames(Data):
    """The implementation chosen on each axis; null where the axis has size one."""

    data: str | None = None
    pipeline: str | None = None
    tensor: str | None = None


class Case(Data):
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


class ResolvedTrack(Data):
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
