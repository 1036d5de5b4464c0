"""Makes the model that a workload names, with values that depend on the seed alone."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

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

NO_WEIGHTS: Mapping[str, Tensor] = {}


def build_model(workload: Workload, device: torch.device, seed: int) -> nn.Module:
    """The workload's whole model on `device`, trained from values that `seed` determines.

    Raises:
        RequestError: a model of one's own cannot be imported, or does not return a torch module.
    """
    return materialize(outline(workload, seed), workload, device, seed)


def outline(workload: Workload, seed: int, *, untouched: bool = False) -> nn.Module:
    """The model before it takes memory, to be cut: on the meta device; one's own model whole, on the CPU.

    Args:
        untouched: a Hugging Face model runs transformers' own forward pass, and cannot be cut.
    """
    config = workload.model
    if config.family is not None:
        from raybench.models import huggingface

        return huggingface.outline(config, recompute=workload.recompute == "full", untouched=untouched)
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
    """Give an outlined model, or what cutting left of it as `parts` tells, its memory and its initial values.

    Where the weights are read from a hub or a folder, the workload's own seed gives those; any other seed gives values
    of its own, as for a model without weights.
    """
    if isinstance(model, MadeByName):
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        model.tie_weights()
        initialize(model, seed, parts, _read_weights(workload) if seed == workload.seed else NO_WEIGHTS)
    else:
        model.to(device)
    if workload.compile:
        for block in blocks.children() if isinstance(blocks := getattr(model, "blocks", None), nn.Module) else [model]:
            block.compile()
    return model


def _read_weights(workload: Workload) -> Mapping[str, Tensor]:
    if workload.model.family is None or workload.model.weights not in ("pretrained", "local"):
        return {}
    from raybench.models.weights import read_weights

    return read_weights(workload.model)


@runtime_checkable
class MadeByName(Protocol):
    """A module whose parameters are on the meta device until each is given its initial value by its name."""

    def tie_weights(self) -> None:
        """Let parameters that are one be one again, after they got their memory."""

    def initialize_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill a parameter, in its whole shape, with its initial value."""


@torch.no_grad()
def initialize(
    model: nn.Module, seed: int, parts: Parts | None = None, weights: Mapping[str, Tensor] = NO_WEIGHTS
) -> None:
    """Fill every parameter: from `weights`, or from a generator of its own, seeded by `seed` and the parameter's name.

    What has been cut is this rank's part of the whole parameter's values.
    """
    assert isinstance(model, MadeByName)
    for local_name, parameter in model.named_parameters():
        name = local_name if parts is None else parts.whole_name(local_name)
        value = weights.get(name)
        if value is None:
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
