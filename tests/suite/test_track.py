"""Track files: what is in the suite, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raybench.errors import RequestError
from raybench.suite.catalog import find_tracks, parse_targets, whole_suite
from raybench.suite.track_file import Track

KEYS = "title, question, workload, scaling, micro_batch, memory_budget_mib, evaluate, measure, cases"
OWN = """
title: Mine
question: Which?
workload: {sequence_length: 16}
scales:
  smoke: {measure: {num_steps: 3}}
cases:
  - name: mine
    layout: {data: 2}
    strategy: {data: naive}
"""


def own(folder: Path, text: str = OWN) -> Track:
    path = folder / "own.yaml"
    path.write_text(text)
    return Track(path)


def test_the_suite_is_valid_at_every_scale():
    for target in whole_suite():
        for scale in ("smoke", "full"):
            assert target.track.resolve(scale).cases


@pytest.mark.parametrize("name", ["a-ddp-one-node", "b-ddp-two-nodes"])
def test_full_is_the_published_workload(name: str):
    work = Track(find_tracks()[name]).resolve("full").workload
    model = work.model
    sizes = (model.num_layers, model.width, model.num_heads, model.ffn_width, model.vocabulary_size, model.tied_head)
    assert sizes == (12, 768, 12, 3072, 50257, False)
    assert (work.sequence_length, work.micro_batch_size, work.num_micro_batches, work.precision) == (128, 8, 1, "fp32")
    assert Track(find_tracks()[name]).resolve("full").measure.num_steps == 50


def test_two_nodes_come_with_their_own_baseline():
    cases = {case.name: case.layout for case in Track(find_tracks()["b-ddp-two-nodes"]).resolve("smoke").cases}
    assert (cases["bucketed-one-node"].num_ranks, cases["bucketed-one-node"].nodes) == (2, 1)
    assert {(cases[n].num_ranks, cases[n].nodes) for n in ("naive", "bucketed", "torch-ddp")} == {(4, 2)}


def test_scale_and_settings_are_laid_over_the_file(tmp_path: Path):
    track = own(tmp_path)
    assert track.resolve("smoke").measure.num_steps == 3
    assert track.resolve("full").measure.num_steps == 50
    changed = track.resolve("smoke", ["measure.num_steps=7", "cases.mine.layout.data=3", "workload.seed=1"])
    assert (changed.measure.num_steps, changed.cases[0].layout.data, changed.workload.seed) == (7, 3, 1)
    assert changed.workload.hash != track.resolve("smoke").workload.hash
    assert track.resolve("smoke").workload.hash == track.resolve("full").workload.hash


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("naive", "naiv", "cases.mine: strategy.data: 'naiv' is not known; did you mean 'naive'? (allowed: "),
        ("strategy: {data: naive}", "", "cases.mine: strategy.data is missing for layout.data 2 (allowed: "),
        ("data: 2", "data: 0", "cases.mine.layout.data: 0: input should be greater than 0"),
        ("data: 2", "data: -1", "cases.mine.layout.data: -1: input should be greater than 0"),
        ("data: 2", "data: 1", "cases.mine: strategy.data: 'naive' needs layout.data of at least 2, not 1"),
        ("data: 2", "data: 2, nodes: 3", "cases.mine: layout.nodes: 3 is more than the layout's 2 ranks"),
        (
            "data: 2",
            "data: 4, nodes: 3",
            "cases.mine: layout.nodes: 3 does not divide the layout's 4 ranks (nearest: 2, 4)",
        ),
        ("layout:", "lay_out:", "cases.mine: 'lay_out' is not known; did you mean 'layout'? (allowed: name, "),
        ("question: Which?", "", "question: is missing"),
        ("title:", "titel:", "title: is missing (and 1 more)"),
        ("title: Mine", "title: Mine\nseed: 3", "key: 'seed' is not known (allowed: title, question, workload, "),
        ("title: Mine", "title: Mine\nscale: full", "key: 'scale' is not known"),
        ("smoke:", "smok:", "scales: 'smok' is not known; did you mean 'smoke'? (allowed: smoke, full)"),
        (
            "sequence_length: 16",
            "model: {width: 10, num_heads: 4}",
            "workload.model: num_heads: 4 does not divide width 10 (nearest: 2, 5)",
        ),
        (
            "sequence_length: 16",
            "data: {num_samples: 3}",
            "workload.data.num_samples: 3 is less than one global batch of case 'mine' (16 sequences)",
        ),
        (
            "sequence_length: 16",
            "micro_batch_size: 4.5",
            "workload.micro_batch_size: 4.5: input should be a valid integer",
        ),
        ("sequence_length: 16", "precision: fp8", "workload.precision: \"fp8\": input should be 'fp32' or 'bf16'"),
        ("name: mine", "name: Mine", "cases.Mine.name: \"Mine\": must be of small letters, digits, '.', '_' and '-'"),
        ("title: Mine", "title: [a]", "title: must be text"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_file_key_and_what_is_allowed(tmp_path: Path, old: str, new: str, message: str):
    assert old in OWN
    with pytest.raises(RequestError) as error:
        own(tmp_path, OWN.replace(old, new)).resolve("smoke")
    assert str(error.value).startswith(f"{tmp_path / 'own.yaml'}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", f"must be a mapping of {KEYS} and scales"),
        ("", f"must be a mapping of {KEYS} and scales"),
        ("a: [", "line 1: expected the node content, but found '<stream end>'"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice"),
        ("!!python/object:os.system {}", "line 1: could not determine a constructor for the tag"),
    ],
)
def test_a_file_that_is_no_track_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(RequestError, match=r"^track .*own\.yaml: ") as error:
        own(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("foo", "--set: 'foo' is not key=value (such as workload.micro_batch_size=4)"),
        ("=3", "--set: '=3' is not key=value (such as workload.micro_batch_size=4)"),
        ("workload..seed=3", "--set: 'workload..seed=3' is not key=value (such as workload.micro_batch_size=4)"),
        ("workload.seed=[", "--set workload.seed: '[' is not a YAML value"),
        ("cases.mne.layout.data=3", "--set cases: 'mne.layout.data' is not known (allowed: mine.…)"),
        ("scale=full", "--set: 'scale' is not known; did you mean 'scaling'? (allowed: title, question, "),
        (
            "workload.sed=3",
            "own.yaml with workload.sed=3: workload: 'sed' is not known; did you mean 'seed'? (allowed: model, ",
        ),
        ("workload=3", "own.yaml with workload=3: workload: 3: must be a mapping of its keys"),
        ("cases=3", "own.yaml with cases=3: cases: 3: must be a list"),
        ("cases.mine.options.bucket_mib=3", "own.yaml: cases.mine: options: 'bucket_mib' is not known (allowed: none)"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, setting: str, message: str):
    with pytest.raises(RequestError) as error:
        own(tmp_path).resolve("smoke", [setting])
    assert message in str(error.value)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10) | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    ["title", "workload", "workload.model", "workload.model.width", "workload.data", "workload.optimizer", "measure",
     "measure.num_steps", "cases", "cases.mine", "cases.mine.layout", "cases.mine.layout.nodes", "cases.mine.name",
     "cases.mine.strategy", "cases.mine.options", "scale", "x", "workload.compile", "evaluate", "evaluate.num_samples",
     "evaluate.x", "scaling", "micro_batch", "memory_budget_mib", "workload.micro_batch_size"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@example(changes=[("cases", True), ("cases.mine", None)])
@given(changes=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
def test_whatever_is_set_gives_a_track_or_one_sentence(changes: list[tuple[str, Any]], tmp_path_factory: Any):
    import json

    track = own(tmp_path_factory.mktemp("track"))
    told = "one sentence"
    try:
        track.resolve("smoke", [f"{key}={json.dumps(value)}" for key, value in changes])
    except RequestError as error:
        told = str(error)
    assert len(told.splitlines()) == 1


def test_names_on_the_command_line():
    stem = "a-ddp-one-node"
    for text in ("a", "A", stem, "a-ddp", "A-DDP-ONE-NODE"):
        (target,) = parse_targets([text])
        assert (target.track.stem, target.cases) == (stem, None)
    first, second = parse_targets(["b:naive", "a", "b:bucketed", "b:naive"])
    assert (first.track.stem, first.cases) == ("b-ddp-two-nodes", ("naive", "bucketed"))
    assert (second.track.stem, second.cases) == (stem, None)
    assert parse_targets(["a:naive", "a"])[0].cases is None
    with pytest.raises(RequestError, match=r"^track: 'a-ddp-two-nodes' is not known; did you mean 'b-ddp-two-nodes'\?"):
        parse_targets(["a-ddp-two-nodes"])
    with pytest.raises(RequestError, match=r"^track: 'zzz' is not known \(allowed: a-ddp-one-node, "):
        parse_targets(["zzz"])
    with pytest.raises(RequestError, match=r"^TRACK:CASE: 'a:' names no case after the colon$"):
        parse_targets(["a:"])


def test_an_ambiguous_prefix_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("h-one", "h-two"):
        (tmp_path / f"{name}.yaml").write_text(OWN)
    monkeypatch.setattr("raybench.suite.catalog.tracks_folder", lambda: tmp_path)
    with pytest.raises(RequestError, match=r"^track: 'h-' is not one track \(it begins h-one, h-two\)$"):
        parse_targets(["h-"])
    assert parse_targets(["h-o"])[0].track.stem == "h-one"


def test_a_track_of_ones_own(tmp_path: Path):
    own(tmp_path)
    path = tmp_path / "own.yaml"
    assert parse_targets([str(path)])[0].track.stem == "own"
    assert parse_targets([f"{path}:mine"])[0].cases == ("mine",)
    with pytest.raises(RequestError, match=r"^track .*none\.yaml: there is no such file$"):
        parse_targets([str(tmp_path / "none.yaml")])
    other = tmp_path / "other"
    other.mkdir()
    own(other)
    with pytest.raises(RequestError, match=r"has the same name as .*own\.yaml \(each needs its own\)$"):
        parse_targets([str(path), str(other / "own.yaml")])
    odd = tmp_path / "o dd.yaml"
    odd.write_text(OWN)
    with pytest.raises(RequestError, match=r"the file's name may hold letters, digits, '\.', '_' and '-' only$"):
        parse_targets([str(odd)])
