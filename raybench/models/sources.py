"""Where a Hugging Face model comes from: the hub, a folder, or its sizes alone; decided before anything starts."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

from raybench.errors import RequestError
from raybench.models.families import FAMILIES, is_published
from raybench.suite.track import ModelConfig

PATIENCE_S = 6.0
"""How long the hub may take to answer at all."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
"""What is downloaded of a model: configuration, weights, tokenizer."""
NOT_OURS = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache")
"""Keys of a configuration that say nothing of the model's shape."""


class UnreachableError(RequestError):
    """What was asked for is on a hub that this machine cannot reach, and in no cache."""


def resolve(model: ModelConfig) -> ModelConfig:
    """The model with its weights' origin decided, `pretrained`, `local` or `random`, and its sizes read from there.

    Anything but a Hugging Face model stays as it is.

    Raises:
        UnreachableError: the hub's name of a model that is in no cache, without a network.
        RequestError: a folder that is not there, has no weights, or holds a model of another family.
    """
    if model.source is None:
        if model.weights in ("pretrained", "local"):
            raise RequestError(
                f"workload.model.weights: {model.weights!r} is not for {model.name!r}, which has no source (allowed: "
                f"auto, random)"
            )
        return model if model.family is None else _with(model, weights="random")
    if model.family is not None and model.weights == "random":
        return model
    if model.family is not None and not is_published(model):
        if model.weights != "auto":
            raise RequestError(
                f"workload.model.weights: {model.weights!r} needs the sizes of {model.source} (allowed with others: "
                f"auto, random)"
            )
        return _with(model, weights="random")
    is_preset = model.family is not None
    try:
        folder, origin = find(model.source, "workload.model.name")
    except UnreachableError:
        if is_preset and model.weights == "auto":
            return _with(model, weights="random")
        raise
    config = _read_config(folder, model.source)
    resolved = _with_sizes(model, config)
    if model.weights == "random":
        return resolved
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise RequestError(
            f"workload.model.name: {model.source} has no weights (needed: one of {', '.join(WEIGHTS)}; or "
            f"workload.model.weights=random for its configuration alone)"
        )
    if model.weights not in ("auto", origin):
        raise RequestError(f"workload.model.weights: {model.weights!r} is wrong, {model.source} is {origin}")
    return _with(resolved, weights=origin)


def find(source: str, field: str) -> tuple[Path, str]:
    """The folder that holds a model's files, downloaded if need be, and `local` or `pretrained`.

    Raises:
        UnreachableError: a name on the hub, not in the cache, and no way to the hub.
        RequestError: no such folder, or nothing of that name on the hub.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder, "local"
    if source.startswith((".", "/", "~")):
        raise RequestError(f"{field}: {source}: there is no such folder")
    return _from_hub(source, field), "pretrained"


def _from_hub(name: str, field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
        if (cached / "config.json").is_file():
            return cached
    except HFValidationError:
        raise RequestError(f"{field}: {name!r} is no name on the hub (owner/name) and no folder") from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        pass
    if not hub_answers():
        raise unreachable(field, name, "workload.model.name=smollm2-360m or distilbert, made here with random weights")
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RequestError(f"{field}: {name!r} cannot be loaded from the hub ({_first_line(error)})") from None


def unreachable(field: str, name: str, without: str) -> UnreachableError:
    """The message for something on a hub that cannot be reached, with the three ways on.

    Args:
        without: what needs no download, as a setting.
    """
    return UnreachableError(
        f"{field}: {name!r} is in no cache, and {endpoint()} cannot be reached (three ways on: connect this machine, "
        f"or set HF_ENDPOINT to a mirror; copy its folder here and name that; or take what needs no download, "
        f"{without})"
    )


def endpoint() -> str:
    """The hub's address."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached, found out once and within seconds; HF_HUB_OFFLINE is obeyed."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint(), method="HEAD"), timeout=PATIENCE_S).close()
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                return
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread of its own: looking up a name knows no time-out.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return answered.is_set()


def _read_config(folder: Path, source: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"workload.model.name: {source} is no model's folder (it has no config.json)") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"workload.model.name: {path} cannot be read ({_first_line(error)})") from None
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise RequestError(
            f"workload.model.name: {source} is of the family {kind!r}, which is not known (allowed: "
            f"{', '.join(FAMILIES)})"
        )
    return config


def _with_sizes(model: ModelConfig, config: dict[str, Any]) -> ModelConfig:
    """`model` with what it does not say itself taken from a transformers configuration."""
    family = config["model_type"]
    keys = FAMILIES[family].sizes()
    said = model.model_fields_set
    sizes = {ours: config[theirs] for theirs, ours in keys.items() if theirs in config and ours not in said}
    known = {*keys, *FAMILIES[family].dropouts, *NOT_OURS, "num_labels", "id2label", "label2id", "classifier_dropout"}
    options = {key: value for key, value in config.items() if key not in known}
    eos = options.get("eos_token_id")
    padding = options.get("pad_token_id")
    if padding is None:
        options["pad_token_id"] = eos if isinstance(eos, int) else 0
    task = model.task if model.task in FAMILIES[family].tasks else FAMILIES[family].tasks[0]
    return _with(model, family=family, task=task, **sizes, options={**options, **model.options})


def _with(model: ModelConfig, **changes: Any) -> ModelConfig:
    return model.model_copy(update=changes)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
