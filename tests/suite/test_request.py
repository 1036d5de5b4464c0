"""What makes two requests the same, and what a request is before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raybench.errors import RequestError
from raybench.results.store import request_hash
from raybench.suite.catalog import parse_targets
from raybench.suite.numbers import seconds, whole_number
from raybench.suite.request import Request, default_results, measure_settings, new_suite_id
from raybench.suite.resume import find_suite


def request(*targets: str, **more: object) -> Request:
    return Request(targets=tuple(parse_targets(targets or ("a",))), results="results", **more)


def test_suite_ids_sort_by_time_and_differ():
    found = [new_suite_id() for _ in range(20)]
    assert all(re.fullmatch(r"20\d{6}-\d{6}-[0-9a-f]{4}", text) for text in found)
    assert len(set(found)) > 15


def test_time_limits_do_not_make_another_request_but_everything_measured_does():
    base = request_hash(request().record("smoke"))
    assert request_hash(request(settings=("measure.timeout_s=7",)).record("smoke")) == base
    assert request_hash(replace(request(), budget_s=9.0, resume="", force=True).record("smoke")) == base
    others = [
        request().record("full"),
        request("a:naive").record("smoke"),
        request("a", "b").record("smoke"),
        request(settings=("measure.num_steps=7",)).record("smoke"),
        request(peers=False).record("smoke"),
        request(launcher="torchrun").record("smoke"),
        request(nccl_env={"NCCL_DEBUG": "INFO"}).record("smoke"),
        request(verify_only=True).record("smoke"),
    ]
    assert len({base, *map(request_hash, others)}) == len(others) + 1


def test_both_scales_are_checked_before_the_cluster_says_which_it_is():
    wrong_at_full = ("scales.full.measure.num_steps=0",)
    with pytest.raises(RequestError):
        request(settings=wrong_at_full).check()
    with pytest.raises(RequestError, match=r"^TRACK: none is named"):
        Request(targets=(), results="r").check()


def test_options_that_stand_for_keys():
    assert measure_settings(steps=3, warmup=0, repeats=None, timeout_s=9) == (
        "measure.num_steps=3",
        "measure.num_warmup_steps=0",
        "measure.timeout_s=9",
    )
    assert whole_number("--x", 0)("0") == 0
    assert seconds("--x")("1.5") == 1.5
    for text in ("", "1.5", "-1", "1e3", "none"):
        with pytest.raises(RequestError, match=r"^--x: '.*' is not allowed \(a whole number of at least 0\)$"):
            whole_number("--x", 0)(text)


def test_rows_go_home_from_inside_a_ray_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert default_results() == "results"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_results() == str(tmp_path / "raybench" / "results")


def test_nothing_to_resume(tmp_path: Path):
    assert find_suite(str(tmp_path / "none"), "", request().record("smoke")) is None
    with pytest.raises(RequestError, match=r"^--resume: there is no suite 'x' in .*none \(it has none\)$"):
        find_suite(str(tmp_path / "none"), "x", request().record("smoke"))
