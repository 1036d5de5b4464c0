"""Text on its way to batches: read, checked, tokenised, kept, padded and counted."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from raybench.data import corpus, text
from raybench.data.batches import IGNORED_LABEL, Batches
from raybench.data.reviews import review
from raybench.errors import RequestError
from raybench.models import sources
from raybench.models.sources import UnreachableError
from raybench.suite.track import DataConfig, ModelConfig, Workload
from tests.hub import CLASSIFIER, DISTILBERT, LLAMA, classified, minilm_folder

YELP_ROWS = [review(index, 5) for index in range(70)]


def yelp(folder, kind="parquet", rows=YELP_ROWS, splits=("train", "test")):
    """Files as Yelp Review Full has them on the hub: a folder a configuration, a file a split."""
    inner = folder / "yelp_review_full"
    inner.mkdir(parents=True)
    for split in splits:
        made = datasets.Dataset.from_dict({"label": [label for _, label in rows], "text": [words for words, _ in rows]})
        path = inner / f"{split}-00000-of-00001.{kind}"
        made.to_parquet(path) if kind == "parquet" else made.to_csv(path)
    return folder


def tokenizer_of(work: Workload):
    return AutoTokenizer.from_pretrained(corpus.prepare(work) / "tokenizer")


@pytest.mark.parametrize("model", [CLASSIFIER, DISTILBERT])
def test_batches_hold_the_reviews_with_their_labels(model):
    work = classified(model, num_micro_batches=2)
    source, tokenizer = Batches(work, 2), tokenizer_of(work)
    batch = source.batch(1, 1)
    assert batch.num_tokens == 8  # samples of the global batch, each a label
    expected = [review(index, work.seed) for index in range(8 + 4, 8 + 8)]
    read = 0
    for number, (words, label) in enumerate(expected):
        micro_batch = batch.micro_batches[number // 2]
        ids, mask = (micro_batch.inputs[name][number % 2] for name in ("input_ids", "attention_mask"))
        valid = int(mask.sum())
        read += valid
        own = tokenizer(words, truncation=True, max_length=48)["input_ids"]
        assert ids[:valid].tolist() == own
        assert set(ids[valid:].tolist()) <= {0}
        labels = micro_batch.labels[number % 2]
        assert labels[labels != IGNORED_LABEL].tolist() == [label]
        if model.family == "llama":
            assert labels[valid - 1] == label
    other = source.batch(1, 0)
    assert (
        batch.num_read
        == other.num_read
        == read + sum(int(m.inputs["attention_mask"].sum()) for m in other.micro_batches)
    )


def test_padding_to_the_longest_gives_each_micro_batch_its_own_width():
    work = classified(
        DISTILBERT, sequence_length=64, data=DataConfig(name="reviews", num_samples=60, padding="longest")
    )
    source = Batches(work, 1)
    widths = set()
    for step in range(20):
        inputs = source.batch(step, 0).micro_batches[0].inputs
        assert inputs["attention_mask"].sum(1).max() == inputs["input_ids"].shape[1]
        widths.add(inputs["input_ids"].shape[1])
    assert len(widths) > 1
    assert work.data.described == "reviews (made up by a seeded grammar), padded to the longest"


def test_running_text_is_continued():
    work = classified(LLAMA, data=DataConfig(name="python-docs"), micro_batch_size=4)
    source = Batches(work, 1)
    batch = source.batch(0, 0)
    (micro_batch,) = batch.micro_batches
    assert torch.equal(micro_batch.inputs["input_ids"][:, 1:], micro_batch.labels[:, :-1])
    assert batch.num_tokens == batch.num_read == 4 * 48
    part = corpus.load(work)["trained"]
    words = tokenizer_of(work).decode(micro_batch.inputs["input_ids"][0])
    assert any(character.isalpha() for character in words)
    assert source.steps_per_pass == len(part) // 4


def test_a_gpt_takes_text_through_a_tokenizer_of_its_own_vocabulary():
    model = ModelConfig(num_layers=1, width=16, num_heads=2, ffn_width=16, vocabulary_size=300)
    work = Workload(model=model, sequence_length=16, micro_batch_size=2, data=DataConfig(name="python-docs"))
    ids = Batches(work, 1).batch(0, 0).micro_batches[0].inputs["input_ids"]
    assert 0 <= ids.min() <= ids.max() < 300


def test_held_out_reviews_are_never_trained_on():
    work = classified(DISTILBERT, sequence_length=40)
    parts = corpus.load(work)
    trained, held_out = ({bytes(part.sample(i)) for i in range(len(part))} for part in parts.values())
    assert len(parts["trained"]) == 60
    assert len(parts["held_out"]) == text.MADE_UP_HELD_OUT
    assert len(held_out - trained) > 0.95 * len(held_out)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_folder_of_files_is_read_like_the_hubs(tmp_path, kind):
    folder = yelp(tmp_path / "yelp", kind)
    data = DataConfig(name=str(folder), num_samples=32)
    work = classified(DISTILBERT, data=data, sequence_length=40)
    source, tokenizer = Batches(work, 1), tokenizer_of(work)
    assert source.steps_per_pass == 16
    known = {tuple(tokenizer(words, truncation=True, max_length=40)["input_ids"]): label for words, label in YELP_ROWS}
    for step in range(16):
        for micro_batch in source.batch(step, 0).micro_batches:
            for ids, mask, label in zip(*micro_batch.inputs.values(), micro_batch.labels, strict=True):
                assert known[tuple(ids[: int(mask.sum())].tolist())] == int(label)
    assert len(corpus.load(work)["held_out"]) == len(YELP_ROWS)


def test_without_a_split_to_evaluate_on_every_tenth_sample_is_held_out(tmp_path):
    work = classified(DISTILBERT, data=DataConfig(name=str(yelp(tmp_path / "yelp", splits=("train",)))))
    parts = corpus.load(work)
    assert (len(parts["trained"]), len(parts["held_out"])) == (63, 7)


def test_the_trained_minilm_brings_its_tokenizer():
    work = classified(ModelConfig(name=str(minilm_folder())), data=DataConfig(name="reviews", num_samples=10))
    ids = Batches(work, 1).batch(0, 0).micro_batches[0].inputs["input_ids"]
    assert ids[:, 0].tolist() == [101, 101]  # [CLS] of BERT's vocabulary


def test_the_text_is_tokenised_once(monkeypatch):
    work = classified(DISTILBERT, data=DataConfig(name="reviews", num_samples=11))
    folder = corpus.prepare(work)
    monkeypatch.setattr(corpus, "read", lambda workload: pytest.fail("read again"))
    assert corpus.prepare(work) == folder
    assert corpus.digest(work) == corpus.digest(work)
    assert isinstance(corpus.load(work)["trained"].ids, np.memmap)
    fewer = work.model_copy(update={"model": work.model.model_copy(update={"num_layers": 1})})
    assert corpus.prepare(fewer) == folder  # as the gate may ask
    with pytest.raises(pytest.fail.Exception):
        corpus.prepare(work.model_copy(update={"seed": 8}))


def _file(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"text,label\n", "has no rows"),
        (b"text,label\ngood,1\nbad,\n", "label_column: 'label' holds "),
        (b"text,label\ngood,1\nbad,5\n", "label_column: 'label' holds 5 for 'bad'"),
        (b"text,label\ngood,1\nbad,-1\n", "(allowed: 0 to 4, by workload.model.num_classes)"),
        (b"text,label\ngood,1\nbad,2,3\n", "line 3: 3 values, the header has 2"),
        (b"text,label\ngood,1\nbad\n", "line 3: 1 values, the header has 2"),
        (b"words,label\ngood,1\n", "text_column: 'text' is no column"),
        (b"text,stars\ngood,1\n", "label_column: 'label' is no column"),
        (b"text,label\n7,1\n8,1\n", "text_column: 'text' holds "),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_wrong_csv_file_is_refused_in_words(tmp_path, content, said):
    path = _file(tmp_path, "reviews.csv", content)
    work = classified(DISTILBERT, data=DataConfig(name=str(path), held_out_split="none"))
    with pytest.raises(RequestError, match=r"^workload\.data\.") as caught:
        corpus.prepare(work)
    assert said in str(caught.value)


def test_a_broken_parquet_file_is_refused_in_words(tmp_path):
    path = _file(tmp_path, "reviews.parquet", b"PAR1 not really")
    with pytest.raises(RequestError, match=r"^workload\.data\.name: .*reviews\.parquet cannot be read"):
        corpus.prepare(classified(DISTILBERT, data=DataConfig(name=str(path))))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "./nowhere"}, "there is no such file or folder"),
        ({"name": "missing.csv"}, "there is no such file or folder"),
        ({"name": "reviews", "tokenizer": "model"}, "workload.data.tokenizer"),
        ({"name": "reviews", "tokenizer": "words"}, "workload.data.tokenizer: 'words' is not known"),
        ({"name": "reviews", "tokenizer": "/nowhere"}, "there is no such folder"),
    ],
)
def test_what_is_not_there_is_refused_before_it_is_read(changes, said):
    model = LLAMA.model_copy(update={"task": "classification"})
    with pytest.raises(RequestError) as caught:
        corpus.check(classified(model, data=DataConfig(**changes)))
    assert said in str(caught.value)


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused():
    data = DataConfig(name="reviews", num_samples=10, tokenizer=str(minilm_folder()))
    with pytest.raises(RequestError, match="has ids up to 30521, and the model's vocabulary is 512"):
        corpus.prepare(classified(DISTILBERT, data=data))


def test_a_vocabulary_too_small_for_bytes_is_refused():
    model = DISTILBERT.model_copy(update={"vocabulary_size": 100})
    with pytest.raises(RequestError, match="vocabulary_size: 100 is too small for a byte-level BPE"):
        corpus.prepare(classified(model))


def test_fewer_samples_than_a_global_batch_are_refused():
    work = classified(DISTILBERT, micro_batch_size=50, data=DataConfig(name="reviews", num_samples=60))
    with pytest.raises(RequestError, match=r"has 60 samples, less than one global batch \(100\)"):
        Batches(work, 2)


def test_a_hub_data_set_without_a_network_is_one_message(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    sources.hub_answers.cache_clear()
    try:
        with pytest.raises(UnreachableError, match="three ways on"):
            corpus.check(classified(DISTILBERT, data=DataConfig(name="Yelp/yelp_review_full")))
    finally:
        sources.hub_answers.cache_clear()
