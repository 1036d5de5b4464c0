"""Models and text that come from elsewhere are found, or refused, before anything starts."""

from __future__ import annotations

import pytest

from raybench.data import corpus
from raybench.errors import RequestError
from raybench.models.sources import UnreachableError
from raybench.suite.catalog import find_tracks, parse_targets, whole_suite
from raybench.suite.request import Request
from raybench.suite.session import prepare
from raybench.suite.sources import prepare_text, with_sources
from raybench.suite.track_file import Track
from tests.hub import minilm_folder
from tests.suite.test_plan import cluster, node

YELP = [stem for stem in find_tracks() if "-yelp-" in stem]


@pytest.mark.parametrize("stem", YELP)
def test_the_yelp_tracks_need_no_download_at_smoke(stem):
    track = with_sources(Track(find_tracks()[stem]).resolve("smoke"))
    assert track.workload.model.weights == "random"
    assert track.workload.data.described == "reviews (made up by a seeded grammar)"
    sizes = {track.workload_of(case).samples_per_rank * case.layout.data for case in track.cases}
    assert len(sizes) == 1  # every case trains on the same global batches


@pytest.mark.parametrize("stem", YELP)
def test_at_full_they_are_the_published_workload(stem):
    track = Track(find_tracks()[stem]).resolve("full")
    work, optimizer = track.workload, track.workload.optimizer
    assert (work.data.name, work.data.num_samples, track.evaluate.num_samples) == ("Yelp/yelp_review_full", 32, 16)
    assert (optimizer.name, optimizer.learning_rate, work.seed, work.precision) == ("adamw", 5e-5, 42, "fp32")
    assert (work.model.num_classes, work.sequence_length) == (5, 256)
    ranks = [case for case in track.cases if case.layout.num_ranks > 1]
    if work.model.name == "smollm2-360m":
        assert work.samples_per_rank == 8
        assert all(track.workload_of(case).num_micro_batches == 4 for case in ranks)
    else:
        assert (work.micro_batch_size, work.num_micro_batches) == (4, 8)


def test_what_cannot_be_reached_is_skipped_in_a_suite_and_refused_alone():
    suite = Request(targets=tuple(whole_suite()), results="r", scale="full")
    prepared = prepare(suite, cluster(node(gpus=8), node("other", gpus=8)))
    for plan in prepared.plans:
        reasons = {reason for _, reason in plan.skipped}
        if plan.track.track in YELP:
            assert not plan.runnable
            assert all("three ways on" in reason for reason in reasons)
        else:
            assert plan.runnable
    with pytest.raises(UnreachableError, match=r"^workload\.data\.name: 'Yelp/yelp_review_full' is in no cache"):
        prepare(Request(targets=tuple(parse_targets(["k"])), results="r", scale="full"), cluster(node(gpus=8)))


def test_a_folders_sizes_are_checked_like_a_tracks_own():
    settings = (f"workload.model.name={minilm_folder()}", "cases.megatron.layout.tensor=5")
    track = Track(find_tracks()["o-yelp-tensor-5"])
    with pytest.raises(RequestError, match=r"^o-yelp-tensor-5: .*layout\.tensor: 5 does not divide workload\.model\."):
        with_sources(track.resolve("full", (*settings, "workload.data.name=reviews")))


def test_the_text_is_ready_before_a_job_starts():
    settings = ("workload.data.num_samples=40", "workload.seed=77")
    track = with_sources(Track(find_tracks()["k-yelp-data-parallel"]).resolve("smoke", settings))
    told: list[str] = []
    prepare_text(track, told.append)
    prepare_text(track, told.append)
    assert told == ["k-yelp-data-parallel: tokenising reviews (made up by a seeded grammar)"]
    assert len(corpus.load(track.workload)["trained"]) == 40
    bad = Track(find_tracks()["k-yelp-data-parallel"]).resolve("smoke", ("workload.model.vocabulary_size=100",))
    with pytest.raises(RequestError, match=r"^workload\.model\.vocabulary_size: 100 is too small"):
        prepare_text(with_sources(bad), told.append)
