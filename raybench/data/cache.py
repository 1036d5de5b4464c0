"""Where prepared text is kept, so that it is prepared once: folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from raybench.errors import RequestError


def cache_folder() -> Path:
    """`RAYBENCH_CACHE`, or `raybench` in the user's folder for caches."""
    named = os.environ.get("RAYBENCH_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raybench"


def prepared(key: str, make: Callable[[Path], None]) -> Path:
    """The folder kept under `key`; `make` fills a new one, once, whoever asks at the same time.

    The others wait for the one at work, as long as it takes; if that one dies, the next makes it anew.

    Raises:
        RequestError: the cache cannot be written, such as on a full disk. Nothing unfinished is left in it.
    """
    root = cache_folder()
    folder = root / key
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{key}.lock"):
            if not folder.is_dir():
                _fill(root, folder, make)
    except OSError as error:
        raise RequestError(
            f"RAYBENCH_CACHE: prepared text cannot be written to {root} ({error.strerror or error}); free space there, "
            f"or name another folder"
        ) from None
    return folder


def _fill(root: Path, folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    try:
        make(unfinished)
        for path in unfinished.iterdir():
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
