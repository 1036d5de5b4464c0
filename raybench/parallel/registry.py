"""Every strategy there is, by axis and name; adding one is a file and a line here.

Nothing is imported until it is used: `raybench list` knows all names without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raybench.errors import unknown

if TYPE_CHECKING:
    from raybench.suite.track import Layout, StrategyNames

AxisName = Literal["data", "pipeline", "tensor"]
AXES: tuple[AxisName, ...] = ("data", "pipeline", "tensor")


@dataclass(frozen=True)
class Entry:
    """Where a strategy lives (`module:Class`), whose it is, and the options it knows with their kinds."""

    target: str
    library: str | None = None
    options: Mapping[str, type] = field(default_factory=dict)
    requires: str | None = None
    """A package that must be installed, beyond raybench's own."""
    over: tuple[AxisName, ...] = ("pipeline", "tensor")
    """The other axes that a data strategy may be combined with."""
    pipelines: tuple[str, ...] | None = None
    """The only pipelines that a data strategy may be combined with; None: all of its own library, by hand all."""
    cuts_sequence: bool = False
    """Whether a tensor strategy needs a sequence that its ranks divide."""


RUNNER = "raybench.parallel.pipeline.runner:ScheduleRunner"
TORCH_PIPELINE = "raybench.parallel.peers.torch_pipeline:TorchPipeline"
STAGED: Mapping[str, type] = {"num_micro_batches": int, "layers": list}
"""Options of every pipeline: into how many micro-batches a step is cut (as the workload says), and how many layers
each stage holds (balanced)."""
ONE_STAGE = ("torch-gpipe", "torch-1f1b")
"""Pipelines of torch's with one stage a rank: its others ask FSDP for parameters before FSDP is ready for it."""
CHUNKED: Mapping[str, type] = {**STAGED, "num_chunks": int}

REGISTRY: dict[AxisName, dict[str, Entry]] = {
    "data": {
        "naive": Entry("raybench.parallel.data.naive:Naive"),
        "accumulated": Entry("raybench.parallel.data.accumulated:Accumulated"),
        "hooked": Entry("raybench.parallel.data.hooked:Hooked"),
        "overlapped": Entry("raybench.parallel.data.overlapped:Overlapped"),
        "bucketed": Entry("raybench.parallel.data.bucketed:Bucketed", options={"bucket_mib": float}),
        "zero1": Entry("raybench.parallel.sharded.zero1:Zero1", options={"bucket_mib": float}),
        "zero2": Entry("raybench.parallel.sharded.zero2:Zero2", options={"bucket_mib": float}, over=("tensor",)),
        "zero3": Entry("raybench.parallel.sharded.zero3:Zero3", over=("tensor",)),
        "hybrid-sharded": Entry(
            "raybench.parallel.sharded.hybrid:HybridSharded", options={"num_shards": int}, over=("tensor",)
        ),
        "torch-ddp": Entry("raybench.parallel.peers.torch_ddp:TorchDDP", "torch", {"bucket_mib": float}),
        "torch-zero1": Entry("raybench.parallel.peers.torch_zero1:TorchZero1", "torch", {"bucket_mib": float}, over=()),
        "torch-fsdp2": Entry("raybench.parallel.peers.torch_fsdp2:FSDP2", "torch", pipelines=ONE_STAGE),
        "torch-fsdp2-keep": Entry("raybench.parallel.peers.torch_fsdp2:FSDP2Keep", "torch", pipelines=ONE_STAGE),
        "deepspeed-0": Entry(
            "raybench.parallel.peers.deepspeed_ddp:DeepSpeed0", "deepspeed", requires="deepspeed", over=()
        ),
        **{
            f"deepspeed-{stage}": Entry(
                f"raybench.parallel.peers.deepspeed_zero:DeepSpeed{stage}", "deepspeed", requires="deepspeed", over=()
            )
            for stage in (1, 2, 3)
        },
    },
    "pipeline": {
        "naive": Entry(RUNNER, options=STAGED),
        "gpipe": Entry(RUNNER, options=STAGED),
        "one-f-one-b": Entry(RUNNER, options=STAGED),
        "interleaved": Entry(RUNNER, options=CHUNKED),
        "zero-bubble": Entry(RUNNER, options=STAGED),
        "zero-bubble-v": Entry(RUNNER, options=STAGED),
        "torch-gpipe": Entry(TORCH_PIPELINE, "torch", STAGED),
        "torch-1f1b": Entry(TORCH_PIPELINE, "torch", STAGED),
        "torch-interleaved": Entry(TORCH_PIPELINE, "torch", CHUNKED),
        "torch-interleaved-zero-bubble": Entry(TORCH_PIPELINE, "torch", CHUNKED),
        "torch-zero-bubble": Entry(TORCH_PIPELINE, "torch", STAGED),
        "torch-zbv": Entry(TORCH_PIPELINE, "torch", STAGED),
    },
    "tensor": {
        "megatron": Entry("raybench.parallel.tensor.megatron:parallelize"),
        "sequence": Entry("raybench.parallel.tensor.sequence:parallelize", cuts_sequence=True),
        "torch-dtensor": Entry("raybench.parallel.peers.dtensor:parallelize", "torch"),
        "torch-dtensor-sequence": Entry(
            "raybench.parallel.peers.dtensor:parallelize_sequence", "torch", cuts_sequence=True
        ),
    },
}


def entry(axis: AxisName, name: str) -> Entry:
    """The registered strategy `name` of an axis; an unknown one raises RequestError with the nearest."""
    if name not in REGISTRY[axis]:
        raise unknown(f"strategy.{axis}", name, REGISTRY[axis])
    return REGISTRY[axis][name]


def library_of(strategy: StrategyNames) -> str | None:
    """The library whose implementation is used on any axis, or None when all are hand-written."""
    for axis in AXES:
        name = getattr(strategy, axis)
        if name is not None and (library := entry(axis, name).library):
            return library
    return None


def check_case(layout: Layout, strategy: StrategyNames, options: Mapping[str, Any]) -> None:
    """Refuse axes without a strategy, strategies without an axis, and options that no strategy knows.

    Raises:
        ValueError: in words that follow the place of the case in its file.
    """
    from raybench.suite.track import nearest_divisors

    known: dict[str, type] = {}
    for axis in AXES:
        size, name = getattr(layout, axis), getattr(strategy, axis)
        if size > 1 and name is None:
            raise ValueError(
                f"strategy.{axis} is missing for layout.{axis} {size} (allowed: {', '.join(REGISTRY[axis])})"
            )
        if name is not None:
            try:
                known.update(entry(axis, name).options)
            except Exception as error:
                raise ValueError(str(error)) from None
            if size == 1:
                raise ValueError(f"strategy.{axis}: {name!r} needs layout.{axis} of at least 2, not 1")
    if strategy.data is not None:
        for axis in ("pipeline", "tensor"):
            if getattr(layout, axis) > 1 and axis not in entry("data", strategy.data).over:
                allowed = ", ".join(name for name, other in REGISTRY["data"].items() if axis in other.over)
                raise ValueError(
                    f"strategy.data: {strategy.data!r} does not run over a {axis} axis (allowed there: {allowed})"
                )
        pipelines = _pipelines_under(entry("data", strategy.data))
        if strategy.pipeline is not None and strategy.pipeline not in pipelines:
            raise ValueError(
                f"strategy.data: {strategy.data!r} does not run over the pipeline {strategy.pipeline!r} "
                f"(allowed: {', '.join(pipelines) or 'none'})"
            )
    if layout.nodes > layout.num_ranks:
        raise ValueError(f"layout.nodes: {layout.nodes} is more than the layout's {layout.num_ranks} ranks")
    if layout.num_ranks % layout.nodes:
        raise ValueError(
            f"layout.nodes: {layout.nodes} does not divide the layout's {layout.num_ranks} ranks "
            f"(nearest: {nearest_divisors(layout.num_ranks, layout.nodes)})"
        )
    for key, value in options.items():
        if key not in known:
            raise ValueError(str(unknown("options", key, known)))
        if known[key] is list:
            if not isinstance(value, list) or not all(type(part) is int and part >= 0 for part in value):
                raise ValueError(f"options.{key}: {value!r} is not allowed (a list of whole numbers, 0 or more)")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number or not isinstance(value, int | known[key]):
            raise ValueError(f"options.{key}: {value!r} is not allowed (a {known[key].__name__} above 0)")
    if strategy.data == "hybrid-sharded":
        _check_shards(layout, options.get("num_shards"))


def _pipelines_under(data: Entry) -> Sequence[str]:
    """The pipelines that a data strategy may be combined with."""
    if data.pipelines is not None:
        return data.pipelines
    return [name for name, other in REGISTRY["pipeline"].items() if data.library in (None, other.library)]


def _check_shards(layout: Layout, num_shards: int | None) -> None:
    """Refuse a hybrid that shards nothing."""
    if num_shards is None:
        if layout.nodes > 1 and layout.data < 2 * layout.nodes:
            raise ValueError(
                f"layout.nodes: {layout.nodes} leaves one of layout.data's {layout.data} ranks on a node, where "
                "hybrid-sharded shards nothing (allowed: fewer nodes, more data ranks, or options.num_shards)"
            )
    elif num_shards == 1 or layout.data % num_shards:
        allowed = ", ".join(str(n) for n in range(2, layout.data + 1) if layout.data % n == 0)
        what = "shards nothing" if num_shards == 1 else f"does not divide layout.data {layout.data}"
        raise ValueError(f"options.num_shards: {num_shards} {what} (allowed: {allowed})")
