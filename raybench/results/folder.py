"""A results folder on this machine or in an object store: files appear in it whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import fs

from raybench.errors import RequestError

_ADVICE = {
    "NO_SUCH_BUCKET": "there is no such bucket: make it, or check its name, region and endpoint",
    "ACCESS_DENIED": "access denied: give credentials that may list, read and write here (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials)",
    "NETWORK_CONNECTION": "no answer: check endpoint_override and the network",
}
"""What to do about an error of an object store, by the name that the AWS SDK has for it."""
_CHECKSUMS = ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")
"""Stores that only speak S3, Oracle's among them, refuse the AWS SDK's default: chunks with a checksum behind them."""


class StoreError(RequestError):
    """Results that cannot be written or read: one message naming the folder and what is wrong with it."""


class Staged:
    """A file that is written but not yet visible: `commit` makes it appear, `discard` takes it away."""

    def __init__(self, commit: Callable[[], None], discard: Callable[[], None]) -> None:
        self.commit = commit
        self.discard = discard


class Folder:
    """A folder of any pyarrow file system. An object appears only when its upload is complete."""

    def __init__(self, filesystem: Any, root: str, name: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/") or "/"
        self.name = name
        """What messages call it."""

    def __str__(self) -> str:
        return self.name

    def path(self, relative: str) -> str:
        return f"{self.root}/{relative}" if relative else self.root

    def exists(self, relative: str = "") -> bool:
        return bool(self._info(relative).type != fs.FileType.NotFound)

    def is_folder(self, relative: str = "") -> bool:
        return bool(self._info(relative).type == fs.FileType.Directory)

    def _info(self, relative: str) -> Any:
        try:
            return self.filesystem.get_file_info(self.path(relative))
        except (OSError, pa.ArrowException) as error:
            self._fail("read", error)

    def entries(self, relative: str) -> tuple[list[str], list[str]]:
        """Sorted names of the folders and of the files in `relative`, hidden ones left out."""
        selector = fs.FileSelector(self.path(relative), allow_not_found=True)
        try:
            found = self.filesystem.get_file_info(selector)
        except (OSError, pa.ArrowException) as error:
            self._fail("read", error)
        seen = [(i.base_name, i.type) for i in found if not i.base_name.startswith((".", "_"))]
        folders = sorted(name for name, kind in seen if kind == fs.FileType.Directory)
        return folders, sorted(name for name, kind in seen if kind == fs.FileType.File)

    def open(self, relative: str) -> Any:
        return self.filesystem.open_input_file(self.path(relative))

    def make(self, relative: str) -> None:
        """Make a folder and those that it lies in, where the file system has folders."""
        if self.filesystem.type_name == "s3":
            return
        try:
            self.filesystem.create_dir(self.path(relative), recursive=True)
        except (OSError, pa.ArrowException) as error:
            self._fail("written", error)

    def stage(self, relative: str, data: Any) -> Staged:
        """Prepare the file `relative` of the bytes `data`; its folder must be there."""

        def commit() -> None:
            try:
                with self.filesystem.open_output_stream(self.path(relative)) as stream:
                    stream.write(data)
            except (OSError, pa.ArrowException) as error:
                self._fail("written", error)

        return Staged(commit, lambda: None)

    def remove(self, relative: str) -> None:
        """Remove a file; one that is not there is no error."""
        if self.exists(relative):
            try:
                self.filesystem.delete_file(self.path(relative))
            except (OSError, pa.ArrowException) as error:
                self._fail("written", error)

    def probe(self, relative: str) -> None:
        """Write a file that no reader sees, and remove it again."""
        self.stage(f"{relative}/.probe", b"raybench").commit()
        self.remove(f"{relative}/.probe")

    def sweep(self, relative: str) -> None:
        """Remove what a killed writer left staged in a folder."""

    def _fail(self, what: str, error: BaseException) -> NoReturn:
        raise StoreError(f"results {self.name}: cannot be {what} ({_reason(error)})") from None


class LocalFolder(Folder):
    """A folder of this machine: files are written aside, flushed to the disk, and renamed."""

    def __init__(self, path: Path) -> None:
        super().__init__(fs.LocalFileSystem(), str(path.expanduser().absolute()), str(path))

    def make(self, relative: str) -> None:
        try:
            self._make(Path(self.path(relative)))
        except OSError as error:
            self._fail("written", error)

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            self._make(path.parent)
            path.mkdir(exist_ok=True)
            _flush_folder(path.parent)

    def stage(self, relative: str, data: Any) -> Staged:
        path = Path(self.path(relative))
        # Readers skip names that begin with a dot, or globs that want .parquet at the end: this is neither.
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")

        def discard() -> None:
            with suppress(OSError):
                aside.unlink(missing_ok=True)

        def commit() -> None:
            try:
                aside.rename(path)
                _flush_folder(path.parent)
            except OSError as error:
                discard()
                self._fail_writing(error)

        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            discard()
            self._fail_writing(error)
        except BaseException:
            discard()
            raise
        return Staged(commit, discard)

    def remove(self, relative: str) -> None:
        path = Path(self.path(relative))
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _flush_folder(path.parent)
        except OSError as error:
            self._fail("written", error)

    def probe(self, relative: str) -> None:
        """Write a file that no reader sees, and remove it again."""
        self.stage(f"{relative}/.probe", b"raybench").commit()
        self.remove(f"{relative}/.probe")

    def sweep(self, relative: str) -> None:
        for aside in Path(self.path(relative)).glob(".*.tmp"):
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    def _fail_writing(self, error: OSError) -> NoReturn:
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"results {self.name}: was removed while it was being written to") from None
        self._fail("written", error)


def open_folder(results: str | Path | Folder) -> Folder:
    """The folder that a path or a URI (`s3://bucket/folder`) names; it need not be there yet."""
    if isinstance(results, Folder):
        return results
    text = str(results)
    if not re.match(r"^[a-z][a-z0-9+.-]*://", text):
        return LocalFolder(Path(text))
    if text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")))
    name = shown(text)
    if "endpoint_override" in text:
        for variable in _CHECKSUMS:
            os.environ.setdefault(variable, "when_required")
    try:
        filesystem, root = fs.FileSystem.from_uri(text)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"results {name}: {_reason(error)}") from None
    return Folder(filesystem, root, name)


def shown(results: str) -> str:
    """A path or URI as messages may show it: without keys and settings."""
    scheme, is_uri, rest = results.partition("://")
    if not is_uri:
        return results
    place = rest.partition("?")[0]
    bucket, slash, path = place.partition("/")
    return f"{scheme}://{bucket.rpartition('@')[2]}{slash}{path}"


def _reason(error: BaseException) -> str:
    """What went wrong in one line; of an object store's errors, also what to look at."""
    known = error.strerror if isinstance(error, OSError) else None
    text = known or " ".join(str(error).split())
    code = re.search(r"AWS Error (\w+)", text)
    advice = _ADVICE.get(code[1]) if code else None
    return f"{advice}; {text}" if advice else text


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
