"""A track's YAML file: read, laid over by scale and `--set`, checked, and refused in one sentence with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raybench.errors import RequestError, unknown
from raybench.suite.track import Case, ResolvedTrack, Scale

SCALES = ("smoke", "full")
GIVEN = ("track", "scale")
"""Fields of a resolved track that its file does not hold."""
WORDS = {
    "model_type": "must be a mapping of its keys",
    "model_attributes_type": "must be a mapping of its keys",
    "dict_type": "must be a mapping",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "too_short": "must hold at least one",
    "string_pattern_mismatch": "must be of small letters, digits, '.', '_' and '-'",
}
"""What pydantic says in words of Python, in words of YAML."""


class Track:
    """A track's file. `scales` in it says what changes at a scale."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            RequestError: it cannot be read, or is no mapping.
        """
        self.path = path
        self.stem = path.stem
        self._raw = _read_yaml(path)
        self._scales = self._raw.pop("scales", {})
        if not isinstance(self._scales, dict) or not all(isinstance(v, dict) for v in self._scales.values()):
            raise RequestError(f"{path}: scales: must map `smoke` or `full` to the keys that change there")
        for name in self._scales:
            if name not in SCALES:
                raise unknown(f"{path}: scales", name, SCALES)
        for part in (self._raw, *self._scales.values()):
            for name in GIVEN:
                if name in part:
                    raise unknown(f"{path}: key", name, _fields_at(()))

    def resolve(self, scale: Scale, settings: Sequence[str] = ()) -> ResolvedTrack:
        """The track at `scale`, with `key=value` settings applied on top.

        Raises:
            RequestError: an unknown key or a value that is not allowed, named with its place.
        """
        raw = _merge(self._raw, self._scales.get(scale, {}))
        for setting in settings:
            raw = _apply(raw, setting)
        try:
            return ResolvedTrack.model_validate({**raw, "track": self.stem, "scale": scale})
        except ValidationError as error:
            place = _place(_first(error)[0]["loc"], raw)
            laid = next((s for s in settings if f"{place}.".startswith(f"{s.partition('=')[0]}.")), None)
            where = str(self.path) if laid is None else f"{self.path} with {laid}"
            raise RequestError(f"{where}: {_describe(error, raw)}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, which YAML would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                message = f"the key {key.value!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RequestError(f"track {path}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise RequestError(f"track {path}: {line}{error.problem or 'is not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RequestError(f"track {path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise RequestError(f"track {path}: must be a mapping of {', '.join(_fields_at(()))} and scales")
    return raw


def _merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, mappings key by key."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _apply(raw: dict[str, Any], setting: str) -> dict[str, Any]:
    """Lay one `dotted.key=value` over a track; `cases.NAME.…` reaches into the case of that name."""
    key, separator, text = setting.partition("=")
    if not separator or not all(key.split(".")):
        raise RequestError(f"--set: {setting!r} is not key=value (such as workload.micro_batch_size=4)")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise RequestError(f"--set {key}: {text!r} is not a YAML value") from None
    parts = key.split(".")
    if parts[0] in GIVEN:
        raise unknown("--set", parts[0], _fields_at(()))
    if parts[0] != "cases" or len(parts) == 1:
        return _merge(raw, _nest(parts, value))
    listed = raw.get("cases")
    cases = [case for case in listed if isinstance(case, dict)] if isinstance(listed, list) else []
    names = [str(case.get("name", "")) for case in cases]
    name = next((n for n in sorted(names, key=len, reverse=True) if key.startswith(f"cases.{n}.")), None)
    if name is None:
        raise unknown("--set cases", ".".join(parts[1:]), [f"{n}.…" for n in names])
    change = _nest(key.removeprefix(f"cases.{name}.").split("."), value)
    changed = [_merge(case, change) if case.get("name") == name else case for case in cases]
    return {**raw, "cases": changed}


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    return nested  # type: ignore[no-any-return]


def _describe(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The first thing that is wrong: key, value, what is allowed."""
    first, *others = _first(error)
    location = first["loc"]
    place = _place(location, raw)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1])
        return f"{unknown(_place(location[:-1], raw) or 'key', location[-1], fields)}{more}"
    if first["type"] == "missing":
        return f"{place}: is missing{more}"
    message = WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    value = first["input"]
    if isinstance(value, dict | list | tuple | BaseModel):
        return f"{place}: {message}{more}".removeprefix(": ")
    return f"{place}: {json.dumps(value, default=str)}: {message[0].lower()}{message[1:]}{more}"


def _first(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong, the first to be told first: that nothing valid is left in a list follows from another."""
    return [e for e in error.errors() if e["type"] != "too_short"] or error.errors()


def _place(location: Sequence[int | str], raw: Mapping[str, Any]) -> str:
    """A dotted key; a case is called by its name where it has one."""
    parts = [str(part) for part in location]
    if len(location) > 1 and location[0] == "cases" and isinstance(index := location[1], int):
        case = raw["cases"][index]
        if isinstance(case, dict) and isinstance(name := case.get("name"), str) and name:
            parts[1] = name
    return ".".join(parts)


def _fields_at(location: Sequence[int | str]) -> list[str]:
    """Names of the keys allowed at a place in a track."""
    model: Any = ResolvedTrack
    for part in location:
        if isinstance(part, str):
            annotation = Case if part == "cases" else model.model_fields[part].annotation
            model = next((choice for choice in get_args(annotation) if choice is not NoneType), annotation)
    hidden = GIVEN if model is ResolvedTrack else ()
    return [name for name in model.model_fields if name not in hidden]
