"""Text as it comes: records of a data set, read in batches, and refused in words where they are wrong."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from raybench.data import reviews
from raybench.errors import RequestError
from raybench.models.sources import hub_answers, unreachable
from raybench.suite.track import DataConfig, Workload

BATCH = 1000
MADE_UP_TRAINED = 4000
"""Reviews of the embedded set, where a workload names no number."""
MADE_UP_HELD_OUT = 500
HELD_OUT = 2000
"""Most samples of a source that are kept for evaluation."""
EVERY = 10
"""Of a source without a split to evaluate on, every how manieth sample is held out."""
KINDS = {".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Records:
    """Texts, and labels where the task needs them."""

    texts: Sequence[str]
    labels: Sequence[int] | None


@dataclass(frozen=True)
class Source:
    """A data set: what is trained on, and what is held out, both as batches of records, read anew by each loop."""

    trained: Iterable[Records]
    held_out: Iterable[Records]


def fingerprint(data: DataConfig) -> str:
    """A text that changes when the files behind a data set do."""
    files = local_files(data)
    described = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()


def local_files(data: DataConfig) -> list[Path]:
    """The Parquet or CSV files of a data set on this machine; none for one on the hub or an embedded one.

    Raises:
        RequestError: a path that is not there, or a folder without such files.
    """
    path = Path(data.name).expanduser()
    if path.is_file() and path.suffix in KINDS:
        return [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in KINDS)
        if not files:
            raise RequestError(f"workload.data.name: {data.name} has no files to read (allowed: .parquet, .csv)")
        return files
    if path.exists():
        raise RequestError(f"workload.data.name: {data.name} cannot be read (allowed: .parquet, .csv)")
    if data.name.startswith((".", "/", "~")) or path.suffix in KINDS:
        raise RequestError(f"workload.data.name: {data.name}: there is no such file or folder")
    return []


def read(workload: Workload) -> Source:
    """All of the workload's text; the order of what is trained on follows from the seed.

    Raises:
        RequestError: a source that cannot be read, is empty, has records without text, or labels outside the classes.
    """
    data = workload.data
    if data.name == "reviews":
        return _made_up(workload)
    if data.name == "python-docs":
        return _python_docs()
    trained, held_out = _splits(data)
    _check_columns(workload, trained.column_names)
    if held_out is None:
        if len(trained) < 2:
            raise RequestError(f"workload.data.name: {data.name} has {len(trained)} rows (needed: at least 2)")
        numbers, every = range(len(trained)), min(EVERY, len(trained))
        held_out = trained.select([i for i in numbers if i % every == every - 1])
        trained = trained.select([i for i in numbers if i % every < every - 1])
    if workload.model.task == "classification":
        trained = trained.shuffle(seed=workload.seed)
    if data.num_samples is not None and workload.model.task == "classification":
        if len(trained) < data.num_samples:
            raise RequestError(
                f"workload.data.num_samples: {data.num_samples} is more than the {len(trained)} of {data.name}"
            )
        trained = trained.select(range(data.num_samples))
    held_out = held_out.select(range(min(HELD_OUT, len(held_out))))
    return Source(_Rows(workload, trained), _Rows(workload, held_out))


def _made_up(workload: Workload) -> Source:
    wanted = workload.data.num_samples if workload.model.task == "classification" else None
    num_trained = wanted or MADE_UP_TRAINED
    if workload.model.task == "classification" and workload.model.num_classes < reviews.NUM_CLASSES:
        raise RequestError(
            f"workload.model.num_classes: {workload.model.num_classes} is too few for reviews (allowed: at least "
            f"{reviews.NUM_CLASSES})"
        )

    def some(begin: int, end: int) -> Records:
        pairs = [reviews.review(index, workload.seed) for index in range(begin, end)]
        return Records([text for text, _ in pairs], [label for _, label in pairs])

    # Held-out reviews have numbers of their own: how many are trained on does not change them.
    trained = [some(begin, min(begin + BATCH, num_trained)) for begin in range(0, num_trained, BATCH)]
    return Source(trained, [some(2**40, 2**40 + MADE_UP_HELD_OUT)])


def _python_docs() -> Source:
    """The topics of Python's language reference, which every installation carries."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[EVERY - 1 :: EVERY]
    trained = [text for number, text in enumerate(texts) if number % EVERY < EVERY - 1]
    return Source([Records(trained, None)], [Records(held_out, None)])


def _splits(data: DataConfig) -> tuple[Any, Any]:
    """The splits to train and to evaluate on, as data sets; None for one that the source does not have."""
    import datasets

    files = local_files(data)
    if files:
        kinds = {path.suffix for path in files}
        if len(kinds) > 1:
            raise RequestError(f"workload.data.name: {data.name} mixes {', '.join(sorted(kinds))} (allowed: one kind)")
        for path in files:
            _check_file(path)
        by_split = {
            split: [str(p) for p in files if p.stem.startswith(split)] for split in (data.split, data.held_out_split)
        }
        if not by_split[data.split]:
            if any(by_split.values()) and len(files) > len(by_split[data.held_out_split]):
                by_split[data.split] = [str(p) for p in files if str(p) not in by_split[data.held_out_split]]
            else:
                by_split = {data.split: [str(p) for p in files]}
        arguments: dict[str, Any] = {
            "path": KINDS[files[0].suffix],
            "data_files": {split: names for split, names in by_split.items() if names},
        }
    else:
        if not hub_answers():
            raise unreachable("workload.data.name", data.name, "workload.data.name=reviews or python-docs")
        arguments = {"path": data.name}
    bar = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(**arguments)
    except Exception as error:
        raise RequestError(f"workload.data.name: {data.name} cannot be read ({_cause(error)})") from None
    finally:
        if bar:
            datasets.enable_progress_bars()
    if data.split not in loaded:
        raise RequestError(f"workload.data.split: {data.split!r} is not in {data.name} (allowed: {', '.join(loaded)})")
    return loaded[data.split], loaded.get(data.held_out_split)


def _check_file(path: Path) -> None:
    """Refuse an empty file, and a CSV file whose rows are not all of its header's length.

    Readers fill short rows up with nothing and take their word for it.
    """
    if path.stat().st_size == 0:
        raise RequestError(f"workload.data.name: {path} is empty")
    if path.suffix != ".csv":
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            length, header_ends = len(next(rows)), rows.line_num
            for row in rows:
                if row and len(row) != length:
                    raise RequestError(
                        f"workload.data.name: {path}, line {rows.line_num}: {len(row)} values, the header has {length}"
                    )
            if rows.line_num == header_ends:
                raise RequestError(f"workload.data.name: {path} has no rows")
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise RequestError(f"workload.data.name: {path} cannot be read ({error})") from None


class _Rows:
    """The records of a split, each with its text, and a label where the task needs one."""

    def __init__(self, workload: Workload, rows: Any) -> None:
        self.workload = workload
        self.rows = rows
        self.labelled = workload.model.task == "classification"
        if not len(rows):
            raise RequestError(f"workload.data.name: {workload.data.name} has no rows")

    def __iter__(self) -> Iterator[Records]:
        data = self.workload.data
        for batch in self.rows.iter(batch_size=BATCH):
            texts = batch[data.text_column]
            labels = batch[data.label_column] if self.labelled else None
            _check_rows(self.workload, texts, labels)
            yield Records(texts, None if labels is None else [int(label) for label in labels])


def _check_columns(workload: Workload, there: Sequence[str]) -> None:
    data = workload.data
    wanted = {"text_column": data.text_column}
    if workload.model.task == "classification":
        wanted["label_column"] = data.label_column
    for key, column in wanted.items():
        if column not in there:
            allowed = ", ".join(there)
            raise RequestError(f"workload.data.{key}: {column!r} is no column of {data.name} (allowed: {allowed})")


def _check_rows(workload: Workload, texts: Sequence[Any], labels: Sequence[Any] | None) -> None:
    data, classes = workload.data, workload.model.num_classes
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(
                f"workload.data.text_column: {data.text_column!r} holds {text!r} in {data.name} (allowed: text)"
            )
    for text, label in zip(texts, labels or (), strict=False):
        whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
        if not whole or not 0 <= label < classes:
            raise RequestError(
                f"workload.data.label_column: {data.label_column!r} holds {label!r} for {text[:40]!r} in {data.name} "
                f"(allowed: 0 to {classes - 1}, by workload.model.num_classes)"
            )


def _cause(error: BaseException) -> str:
    """The first line of what an error began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def texts_of(records: Iterable[Records], most: int) -> Iterator[str]:
    """The first `most` texts."""
    return islice((text for batch in records for text in batch.texts), most)
