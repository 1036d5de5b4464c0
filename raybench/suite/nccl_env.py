"""Named sets of NCCL settings: data in `clusters/nccl.yaml`, read and resolved here.

`--nccl-env` takes a name or a file of `KEY=VALUE` lines; without it a cluster's own choice stands, which its start
commands leave in `RAYBENCH_NCCL_ENV`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from raybench.errors import RequestError, unknown

VARIABLE = "RAYBENCH_NCCL_ENV"
OPTION = "--nccl-env"
_NO_SUCH_VARIABLE = {
    "NCCL_TIMEOUT": "NCCL has no such variable; raybench's --timeout-s bounds every collective",
    "NCCL_BLOCKING_WAIT": "torch reads TORCH_NCCL_BLOCKING_WAIT, and has since 2.2",
    "NCCL_ASYNC_ERROR_HANDLING": "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING, and has since 2.2",
}


class Setting(BaseModel):
    """One environment variable and the reason for its value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    value: str
    why: str
    since: str
    """The NCCL version that first read it, or the library's name and version."""


class Environment(BaseModel):
    """Settings for one kind of network."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    when: str
    extends: str | None = None
    settings: tuple[Setting, ...]


@cache
def load_environments() -> dict[str, Environment]:
    """All named environments as the file has them; `settings_of` adds what they extend."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "_data" / "clusters", package.parent / "clusters"]
    file = next(place / "nccl.yaml" for place in places if (place / "nccl.yaml").exists())
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: Environment.model_validate(value) for name, value in content["environments"].items()}


def settings_of(name: str, field: str = OPTION) -> dict[str, Setting]:
    """The settings in force under a name, by variable: its own over those that it extends."""
    environments = load_environments()
    if name not in environments:
        raise unknown(field, name, environments)
    environment = environments[name]
    inherited = settings_of(environment.extends, field) if environment.extends else {}
    return {**inherited, **{setting.name: setting for setting in environment.settings}}


def resolve(name_or_file: str, field: str = OPTION) -> dict[str, str]:
    """Environment variables of a name or a file; anything else is refused with the nearest name."""
    if name_or_file in load_environments():
        return {name: setting.value for name, setting in settings_of(name_or_file, field).items()}
    path = Path(name_or_file).expanduser()
    if path.is_file():
        return _read_file(path, field)
    if os.sep in name_or_file:
        raise RequestError(f"{field}: there is no file {name_or_file!r}")
    raise unknown(field, name_or_file, load_environments())


def selected(environment: Mapping[str, str] | None = None) -> str | None:
    """The name that this node's cluster file chose, if any."""
    return (os.environ if environment is None else environment).get(VARIABLE) or None


def _read_file(path: Path, field: str) -> dict[str, str]:
    """Lines of KEY=VALUE; blank lines, comments, `export` and quotes around the value are taken as a shell would."""
    variables: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{field}: {path} cannot be read ({error})") from None
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", line)
        if match is None:
            raise RequestError(f"{field}: {path}, line {number}: {raw!r} is not KEY=VALUE")
        name, value = match[1], match[2].strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if name in _NO_SUCH_VARIABLE:
            raise RequestError(f"{field}: {path}, line {number}: {name}: {_NO_SUCH_VARIABLE[name]}")
        variables[name] = value
    return variables
