"""Which tracks there are, and which one a name on the command line means."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raybench.errors import RequestError, unknown
from raybench.suite.track_file import Track

_PACKAGE = Path(__file__).resolve().parents[1]
_STEM = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Target:
    """A track that was asked for, whole or some of its cases."""

    track: Track
    cases: tuple[str, ...] | None = None
    """Names of the cases asked for one by one; None for the whole track."""


def tracks_folder() -> Path:
    """The folder of the suite's tracks: in an installed wheel's data, or beside the package in a checkout."""
    installed = _PACKAGE / "_data" / "tracks"
    return installed if installed.is_dir() else _PACKAGE.parent / "tracks"


def find_tracks() -> dict[str, Path]:
    """The files of the suite's tracks by stem, in their order."""
    return {path.stem: path for path in sorted(tracks_folder().glob("*.yaml"))}


def whole_suite() -> list[Target]:
    """Every track of the suite, as `run-all` takes them."""
    return [Target(Track(path)) for path in find_tracks().values()]


def parse_targets(texts: Sequence[str]) -> list[Target]:
    """The tracks that `TRACK[:CASE] …` names, each once, in the order in which they were first named.

    Raises:
        RequestError: a track that is not there, is not one track, or cannot be read.
    """
    paths: dict[str, Path] = {}
    cases: dict[str, list[str] | None] = {}
    for text in texts:
        path, case = _split(text)
        if paths.setdefault(path.stem, path).resolve() != path.resolve():
            raise RequestError(f"track {path}: has the same name as {paths[path.stem]} (each needs its own)")
        chosen = cases.setdefault(path.stem, [])
        if case is None:
            cases[path.stem] = None
        elif chosen is not None and case not in chosen:
            chosen.append(case)
    return [
        Target(Track(path), None if (names := cases[stem]) is None else tuple(names)) for stem, path in paths.items()
    ]


def _split(text: str) -> tuple[Path, str | None]:
    if Path(text).is_file() and _looks_like_path(text):
        return _own_track(text), None
    name, colon, case = text.rpartition(":")
    if not colon:
        name, case = text, ""
    elif not case:
        raise RequestError(f"TRACK:CASE: {text!r} names no case after the colon")
    path = _own_track(name) if _looks_like_path(name) else _track_of_suite(name)
    return path, case or None


def _looks_like_path(text: str) -> bool:
    return os.sep in text or text.endswith((".yaml", ".yml"))


def _own_track(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise RequestError(f"track {text}: there is no such file")
    if not _STEM.fullmatch(path.stem):
        raise RequestError(f"track {text}: the file's name may hold letters, digits, '.', '_' and '-' only")
    return path


def _track_of_suite(name: str) -> Path:
    tracks = find_tracks()
    wanted = name.lower()
    for stem, path in tracks.items():
        if wanted in (stem.lower(), stem.lower().split("-")[0]):
            return path
    begin = [stem for stem in tracks if wanted and stem.lower().startswith(wanted)]
    if len(begin) == 1:
        return tracks[begin[0]]
    if begin:
        raise RequestError(f"track: {name!r} is not one track (it begins {', '.join(begin)})")
    raise unknown("track", name, tracks)
