"""The values that a Hugging Face model's weights are read from, by the names that the parameters have here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.utils import logging

from raybench.errors import RequestError
from raybench.models.huggingface import TransformersModel, model_class, transformers_config
from raybench.models.sources import find
from raybench.suite.track import ModelConfig

HEADS = ("score.", "classifier.", "pre_classifier.", "pooler.")
"""Parts of parameters' names that only a trained classifier's weights hold."""


def read_weights(model: ModelConfig) -> dict[str, Tensor]:
    """The whole value of every parameter that the source holds, in fp32 on the CPU; a new head's are not among them.

    Raises:
        RequestError: the source's weights are not those of its configuration.
    """
    assert model.source is not None
    folder, _ = find(model.source, "workload.model.name")
    with _quiet():
        try:
            whole, report = model_class(model).from_pretrained(
                folder,
                config=transformers_config(model),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[:1]
            raise RequestError(
                f"workload.model.name: {model.source}: its weights cannot be read ({''.join(first)})"
            ) from None
    absent = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    names = {parameter: name for name, parameter in whole.named_parameters()}
    wrong = sorted(name for name in names.values() if name in absent and not any(part in name for part in HEADS))
    if wrong:
        raise RequestError(
            f"workload.model.name: {model.source} does not hold {len(wrong)} of the parameters of its configuration "
            f"(first: {wrong[0]})"
        )
    own = TransformersModel(whole).named_parameters()
    return {name: parameter.detach() for name, parameter in own if names[parameter] not in absent}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers says nothing of a head that is new, and draws no progress bar."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
