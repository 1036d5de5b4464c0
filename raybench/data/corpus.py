"""A workload's text as token ids on the disk: made once, read by every rank through memory maps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raybench.data import reviews
from raybench.data.cache import cache_folder, prepared
from raybench.data.text import Records, fingerprint, local_files, read
from raybench.data.tokenizer import make_tokenizer, tokenizer_folder
from raybench.errors import RequestError
from raybench.models.sources import hub_answers, unreachable
from raybench.suite.track import BUILT_IN_DATA, Workload

FORMAT = 1
"""To be counted up with every change of what is written."""
PARTS = ("trained", "held_out")


@dataclass(frozen=True)
class Part:
    """Samples of ids, one after the other: sample `i` is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The class of every sample; of none where text is only continued."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, index: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def load(workload: Workload) -> dict[str, Part]:
    """`trained` and `held_out`, memory-mapped; what is not in the cache is made.

    Raises:
        RequestError: what `text.read` and `make_tokenizer` refuse, or a cache that cannot be written.
    """
    folder = prepare(workload)
    return {name: _load_part(folder, name) for name in PARTS}


def prepare(workload: Workload) -> Path:
    """The folder of the workload's corpus, made if it is not there."""
    return prepared(_key(workload), lambda folder: _write(workload, folder))


def is_prepared(workload: Workload) -> bool:
    """Whether the workload's corpus is in the cache."""
    return (cache_folder() / _key(workload)).is_dir()


def check(workload: Workload) -> None:
    """Refuse what can be seen to be wrong without reading the text.

    Raises:
        UnreachableError: a data set on a hub that cannot be reached, and that is not in the cache.
        RequestError: files or a tokenizer that are not there.
    """
    data = workload.data
    if is_prepared(workload) or data.name in BUILT_IN_DATA or local_files(data):
        return
    if not hub_answers():
        raise unreachable("workload.data.name", data.name, "workload.data.name=reviews or python-docs")


def digest(workload: Workload) -> str:
    """A number of what every rank trains on: equal on all nodes, or they do not train on the same."""
    return str(json.loads((prepare(workload) / "about.json").read_text(encoding="utf-8"))["digest"])


def _key(workload: Workload) -> str:
    """What the corpus depends on, as the name of a folder."""
    model, data = workload.model, workload.data
    own = tokenizer_folder(workload)
    depends = {
        "format": FORMAT,
        "data": data.model_dump(exclude={"padding", "min_length"}),
        "files": fingerprint(data),
        "reviews": hashlib.sha256(Path(reviews.__file__).read_bytes()).hexdigest(),
        "tokenizer": None if own is None else _digest_of(own),
        "tokenizers": version("tokenizers"),
        "model": [
            model.family,
            model.task,
            model.vocabulary_size,
            model.num_classes,
            model.options.get("pad_token_id"),
        ],
        "sequence_length": workload.sequence_length,
        "seed": workload.seed,
    }
    text = json.dumps(depends, sort_keys=True)
    name = "".join(c if c.isalnum() else "-" for c in data.name.strip("./~"))[-40:]
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _digest_of(folder: Path) -> str:
    """Of the files of a tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix in (".json", ".txt", ".model") and path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _write(workload: Workload, folder: Path) -> None:
    source = read(workload)
    tokenizer = make_tokenizer(workload, source.trained)
    digests = {
        name: _write_part(workload, folder, name, records, tokenizer)
        for name, records in zip(PARTS, (source.trained, source.held_out), strict=True)
    }
    tokenizer.save_pretrained(folder / "tokenizer")
    about: Mapping[str, Any] = {
        "data": workload.data.described,
        "digest": hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16],
        "vocabulary_size": len(tokenizer),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")


def _write_part(workload: Workload, folder: Path, name: str, records: Iterable[Records], tokenizer: Any) -> str:
    """Tokenise one part, batch by batch; a digest of it."""
    classify = workload.model.task == "classification"
    length = workload.sequence_length
    end = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), 0)
    digest = hashlib.sha256()
    lengths: list[int] = []
    labels: list[int] = []
    with (folder / f"{name}.ids").open("wb") as file:
        for batch in records:
            if classify:
                rows = tokenizer(list(batch.texts), truncation=True, max_length=length)["input_ids"]
                rows = [row or [end] for row in rows]
                labels += batch.labels or ()
            else:
                rows = [[*row, end] for row in tokenizer(list(batch.texts), add_special_tokens=False)["input_ids"]]
            content = np.concatenate([np.asarray(row, np.int32) for row in rows]).tobytes()
            digest.update(content)
            file.write(content)
            lengths += map(len, rows)
    if not classify:
        lengths = _sequences(sum(lengths), workload, name)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    np.save(folder / f"{name}.offsets.npy", offsets)
    np.save(folder / f"{name}.labels.npy", np.asarray(labels, np.int64))
    digest.update(offsets.tobytes())
    return digest.hexdigest()


def _sequences(num_ids: int, workload: Workload, name: str) -> list[int]:
    """Running text, cut into sequences of one more id than the model takes: each begins with the last one's end."""
    count = (num_ids - 1) // workload.sequence_length
    if count < 1:
        raise RequestError(
            f"workload.sequence_length: {workload.sequence_length} is more than the text of {workload.data.name} "
            f"({name.replace('_', ' ')}) has tokens ({num_ids})"
        )
    return [workload.sequence_length] * count


def _load_part(folder: Path, name: str) -> Part:
    ids: NDArray[np.int32] = np.memmap(folder / f"{name}.ids", np.int32, mode="r")
    offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r")
    return Part(ids, offsets, np.load(folder / f"{name}.labels.npy", mmap_mode="r"))
