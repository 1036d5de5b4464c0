"""Makes the model that a workload names, with values that depend on the seed alone."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raybench.data.batches import IGNORED_LABEL
from raybench.errors import RequestError
from raybench.models.gpt import GPT
from raybench.models.timed import TimedGPT
from raybench.parallel.execution import LossSum
from raybench.parallel.parts import Parts
from raybench.suite.track import Precision, Workload


def build_model(workload: Workload, device: torch.device, seed: int) -> nn.Module:
    """The workload's whole model on `device`, trained from values that `seed` determines.

    Raises:
        RequestError: a model of one's own cannot be imported, or does not return a torch module.
    """
    return materialize(outline(workload, seed), workload, device, seed)


def outline(workload: Workload, seed: int) -> nn.Module:
    """The model before it takes memory, to be cut: a GPT on the meta device; one's own model whole, on the CPU."""
    config = workload.model
    if config.name in ("gpt", "timed"):
        recompute = workload.recompute == "full"
        with torch.device("meta"):
            if config.name == "gpt":
                return GPT(config, workload.sequence_length, recompute=recompute)
            size = workload.micro_batch_size
            return TimedGPT(config, workload.sequence_length, micro_batch_size=size, recompute=recompute)
    torch.manual_seed(seed)
    return _own_model(config.name, config.options)


def materialize(
    model: nn.Module, workload: Workload, device: torch.device, seed: int, parts: Parts | None = None
) -> nn.Module:
    """Give an outlined model, or what cutting left of it as `parts` tells, its memory and its initial values."""
    if isinstance(model, GPT):
        model.to_empty(device=device)
        model.tie_weights()
        initialize(model, seed, parts)
    else:
        model.to(device)
    if workload.compile:
        for block in blocks.children() if isinstance(blocks := getattr(model, "blocks", None), nn.Module) else [model]:
            block.compile()
    return model


@torch.no_grad()
def initialize(model: GPT, seed: int, parts: Parts | None = None) -> None:
    """Fill every parameter from a generator of its own, seeded by `seed` and the parameter's name.

    What has been cut is this rank's part of the whole parameter's values.
    """
    for local_name, parameter in model.named_parameters():
        name = local_name if parts is None else parts.whole_name(local_name)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        shape = parameter.shape if parts is None else parts.whole_shape(local_name, parameter)
        value = torch.empty(shape, dtype=parameter.dtype)
        model.initialize_parameter(name, value, generator)
        parameter.copy_(value if parts is None else parts.cut(local_name, value))


def _own_model(name: str, options: dict[str, object]) -> nn.Module:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"workload.model.name: {name!r} cannot be imported ({error})") from None
    try:
        model = function(**options)
    except TypeError as error:
        raise RequestError(f"workload.model.name: {name!r} cannot be called with options {options} ({error})") from None
    if not isinstance(model, nn.Module):
        raise RequestError(f"workload.model.name: {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def cross_entropy_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [..., vocabulary], summed over the labels that are not -100."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def make_loss_sum(model: nn.Module, precision: Precision) -> LossSum:
    """How the workload turns one micro-batch into a summed loss: cross-entropy over the labels that are not -100.

    A model of one's own, or one whose logits are spread over ranks, brings its own `loss(outputs, labels)`, which must
    be a sum too. With `bf16`, forward and loss run under autocast.
    """
    own = getattr(model, "loss", None)
    loss = own if callable(own) else cross_entropy_sum

    def loss_sum(forward: Callable[..., Tensor], inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=precision == "bf16"):
            summed: Tensor = loss(forward(**inputs), labels)
            return summed

    return loss_sum
