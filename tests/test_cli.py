"""The command line: exit codes, one message for each mistake, and JSON that is alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from raybench.cli import main
from raybench.suite.means import Means
from tests.suite.fakes import QUICK, World, cluster, node

OWN = """
title: Mine
question: Which?
workload: {sequence_length: 16}
measure: {num_rounds: 2, timeout_s: 1}
cases:
  - {name: one, layout: {data: 2}, strategy: {data: naive}}
  - {name: two, layout: {data: 2}, strategy: {data: bucketed}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN)
    return str(tmp_path / "own.yaml")


def play(monkeypatch: pytest.MonkeyPatch, world: World) -> World:
    """Have every job played by `world` instead of started."""
    monkeypatch.setattr("raybench.suite.launch.launcher", lambda name: world)
    monkeypatch.setattr("raybench.suite.sink.Sink", lambda host: world.make_sink())
    monkeypatch.setattr("raybench.suite.session.Means", partial(Means, patience=QUICK))
    return world


def run(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*arguments])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "TRACK: none is named (raybench list shows them, raybench run-all takes all)"),
        (["run", "a-dpd-one-node"], "track: 'a-dpd-one-node' is not known; did you mean 'a-ddp-one-node'? (allowed: "),
        (["run", "a:nave"], "case of track a-ddp-one-node: 'nave' is not known; did you mean 'naive'? (allowed: "),
        (["run", "none.yaml"], "track none.yaml: there is no such file"),
        (["run", "a", "--set", "foo=1"], "a-ddp-one-node.yaml with foo=1: key: 'foo' is not known (allowed: title"),
        (["run", "a", "--set", "workload.sed=1"], "workload: 'sed' is not known; did you mean 'seed'? (allowed: "),
        (["run", "a", "--set", "cases.naive.strategy.data=naiv"], "strategy.data: 'naiv' is not known; did you"),
        (["run", "a", "--set", "workload.model.num_heads=5"], "num_heads: 5 does not divide width 128 (nearest: 4, 8)"),
        (["run", "a", "--set", "workload.micro_batch_size=0"], "size: 0: input should be greater than 0"),
        (["run", "a", "--set", "measure.num_rounds=0", "--repeats", "1"], "measure.num_rounds is set to 0 and to 1"),
        (["run", "a", "--set", "workload.seed=1", "--set", "workload.seed=2"], "workload.seed is set to 1 and to 2"),
        (["run", "a", "--steps", "0"], "--steps: '0' is not allowed (a whole number of at least 1)"),
        (["run", "a", "--repeats", "-1"], "--repeats: '-1' is not allowed (a whole number of at least 1)"),
        (["run", "a", "--warmup", "-1"], "--warmup: '-1' is not allowed (a whole number of at least 0)"),
        (["run", "a", "--timeout-s", "0"], "--timeout-s: '0' is not allowed (a whole number of at least 1)"),
        (["run", "a", "--budget-s", "0"], "--budget-s: '0' is not allowed (a number of seconds above 0)"),
        (["run", "a", "--budget-s", "nan"], "--budget-s: 'nan' is not allowed (a number of seconds above 0)"),
        (["run", "a", "--scale", "ful"], "--scale: 'ful' is not known; did you mean 'full'? (allowed: smoke, full)"),
        (["run", "a", "--launcher", "mpi"], "--launcher: 'mpi' is not known (allowed: ray, torchrun)"),
        (["run", "a", "--force"], "--force: says that --resume may mix code or versions, and --resume is not given"),
        (["run", "a", "--nccl-env", "nope"], "--nccl-env: 'nope' is not known"),
        (["run", "a", "--results", "/proc/1/x"], "--results /proc/1/x: "),
        (["run", "a", "--steps", "x"], "--steps: 'x' is not allowed (a whole number of at least 1)"),
        (["run", "a", "--stpes", "3"], "option: '--stpes' is not known; did you mean '--steps'? (allowed: "),
        (["run", "a", "--steps"], "Option '--steps' requires an argument"),
        (["rnu"], "command: 'rnu' is not known; did you mean 'run'? (allowed: "),
        (["verify", "a", "--steps", "3"], "option: '--steps' is not known"),
        (["report", "nowhere"], "nowhere"),
        (["schedule", "gpip", "--stages", "2", "--micro-batches", "2"], "'gpip'"),
        (["schedule", "gpipe"], "Missing option '--stages'"),
        (["schedule", "gpipe", "--stages", "0", "--micro-batches", "2"], "stages"),
        (["doctor", "nccl"], "doctor: give pairs of topo|nccl|watchdog and FILE"),
        (["doctor", "ncl", "x"], "doctor: 'ncl' is not known; did you mean 'nccl'? (allowed: topo, nccl, watchdog)"),
        (["doctor", "nccl", "/nowhere.log"], "/nowhere.log"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_message_and_exit_code_2(
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    play(monkeypatch, World())
    code, out, err = run(*arguments, capfd=capfd)
    assert (code, out) == (2, "")
    assert err.startswith("raybench: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    code, out, err = run(arguments[0], "--json", *arguments[1:], capfd=capfd)
    body = json.loads(out)
    assert (code, body["exit_code"], body["schema"], body["rows"]) == (2, 2, 1, [])
    assert len(body["errors"]) == 1
    assert message in body["errors"][0]


def test_a_run_leaves_rows_and_says_where(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    play(monkeypatch, World())
    code, out, err = run("run", own, "--launcher", "torchrun", capfd=capfd)
    assert code == 0
    assert "Mine" in out
    assert out.splitlines()[-1].startswith("suite 20")
    assert out.splitlines()[-1].endswith(": rows in results")
    assert "own:one round 1:" in err
    assert "about" in err

    import pandas as pd

    runs = pd.read_parquet("results/runs")
    assert sorted(zip(runs["case"], runs["round"], strict=True)) == [("one", 1), ("one", 2), ("two", 1), ("two", 2)]
    assert set(runs.status) == {"ok"}

    code, out, err = run("report", "-o", "told", capfd=capfd)
    assert code == 0
    assert "wrote told/BENCHMARK_SUMMARY.md" in out
    assert "Mine" in Path("told/BENCHMARK_SUMMARY.md").read_text()


def test_the_json_of_a_run(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    world = play(monkeypatch, World({("two", 1): "oom"}))
    really_play = world._play

    def loud(job):
        os.write(1, b"a library prints\n")
        print("so does Python")
        return really_play(job)

    world._play = loud
    code, out, err = run("run", own, "--launcher", "torchrun", "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["schema"], body["exit_code"], body["results"]) == (1, 1, 1, "results")
    assert body["suite_id"].startswith("20")
    by_case = {row["case"]: row for row in body["rows"]}
    assert by_case["one"]["status"] == "ok"
    assert by_case["one"]["tokens_per_s"] == 500.0
    assert (by_case["two"]["status"], by_case["two"]["reason"]) == (
        "out_of_memory",
        "rank 1: no memory (last: all-reduce)",
    )
    assert by_case["two"]["tokens_per_s"] is None
    assert {
        "track",
        "case",
        "peer",
        "layout",
        "strategy",
        "gate",
        "rounds",
        "ratio_to_control",
        "bytes",
        "bubble",
    } <= set(by_case["one"])
    assert "a library prints" in err


def test_exit_codes_of_skipped_cases(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    play(monkeypatch, World())
    local = ("--launcher", "torchrun", "--json")
    code, out, _ = run("run", "a", "--no-peers", *local, capfd=capfd)
    assert code == 0
    skipped = next(row for row in json.loads(out)["rows"] if row["case"] == "torch-ddp")
    assert (skipped["status"], skipped["reason"]) == ("skipped", "peer of torch: left out by --no-peers")
    assert run("run", "a:naive", "a:torch-ddp", "--no-peers", *local, capfd=capfd)[0] == 1
    assert run("run", "a:torch-ddp", "--no-peers", *local, capfd=capfd)[0] == 1


def test_a_job_that_cannot_start_and_an_interrupt(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    play(monkeypatch, World(before="no resources"))
    code, out, _ = run("run", own, "--launcher", "torchrun", "--json", capfd=capfd)
    assert code == 1
    assert {(row["status"], row["reason"]) for row in json.loads(out)["rows"]} == {("crashed", "the cluster is full")}
    play(monkeypatch, World({("two", 2): "interrupt"}))
    code, out, _ = run("run", own, "--launcher", "torchrun", "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["exit_code"], body["errors"]) == (130, 130, ["interrupted"])
    assert {row["case"]: row["reason"] for row in body["rows"]} == {"one": None, "two": "interrupted"}


def test_an_interrupt_before_anything_ran_is_one_message(monkeypatch, capfd) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raybench.suite.commands.doctor_command", interrupted)
    code = main(["doctor", "--json"])
    out, _ = capfd.readouterr()
    assert (code, json.loads(out)["errors"]) == (130, ["interrupted"])
    assert main(["doctor"]) == 130
    assert capfd.readouterr().err.strip() == "raybench: interrupted"


def test_resume_runs_just_the_rest(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    local = ("--launcher", "torchrun", "--json")
    play(monkeypatch, World({("two", 1): "interrupt"}))
    code, out, _ = run("run", own, *local, capfd=capfd)
    suite = json.loads(out)["suite_id"]
    assert code == 130

    world = play(monkeypatch, World())
    code, out, err = run("run", own, *local, "--resume", capfd=capfd)
    body = json.loads(out)
    assert (code, body["suite_id"]) == (0, suite)
    assert f"going on with suite {suite}: 3 rounds left" in err
    assert [(key.case, key.round) for key in world.jobs[0].rounds] == [("two", 1), ("one", 2), ("two", 2)]
    assert world.jobs[0].gate_passed["one"]["gate"] == "passed"
    assert {row["case"]: (row["status"], row["rounds"]) for row in body["rows"]} == {"one": ("ok", 2), "two": ("ok", 2)}

    world = play(monkeypatch, World())
    code, out, err = run("run", own, *local, f"--resume={suite}", capfd=capfd)
    assert (code, world.jobs) == (0, [])
    assert f"going on with suite {suite}: nothing is left to run" in err
    code, out, err = run("run", own, *local, "--resume", "--repeats", "3", capfd=capfd)
    assert (code, len(world.jobs)) == (0, 1)
    assert "has no suite of this request (its newest, " in err
    assert json.loads(out)["suite_id"] != suite
    code, out, _ = run("run", f"{own}:one", *local, f"--resume={suite}", capfd=capfd)
    assert code == 2
    assert json.loads(out)["errors"][0].startswith(f"--resume: suite {suite} was asked for something else")
    code, out, _ = run("run", own, *local, "--resume=nope", capfd=capfd)
    assert code == 2
    assert "--resume: there is no suite 'nope' in results (it has " in json.loads(out)["errors"][0]


def test_a_resumed_suite_keeps_the_micro_batch_that_was_found(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    largest = ("--launcher", "torchrun", "--json", "--set", "micro_batch=largest", "--set", "memory_budget_mib=9")
    play(monkeypatch, World({("two", 1): "interrupt"}))
    assert run("run", own, *largest, capfd=capfd)[0] == 130
    world = play(monkeypatch, World())
    assert run("run", own, *largest, "--resume", capfd=capfd)[0] == 0
    assert dict(world.jobs[0].micro_batch_sizes) == {"one": 24}
    code, out, _ = run("run", own, *largest[:5], capfd=capfd)
    assert code == 2
    assert json.loads(out)["errors"][0].startswith("own: memory_budget_mib: is missing; without GPUs ")


def test_resume_refuses_other_code_unless_forced(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    from raybench.suite import rows

    local = ("--launcher", "torchrun", "--json")
    play(monkeypatch, World({("two", 1): "interrupt"}))
    run("run", own, *local, capfd=capfd)
    changed = rows.Code("c" * 40, False, "0123456789")
    monkeypatch.setattr("raybench.suite.resume.this_code", lambda: changed)
    world = play(monkeypatch, World())
    code, out, _ = run("run", own, *local, "--resume", capfd=capfd)
    assert (code, world.jobs) == (2, [])
    assert "was run by other code of raybench (" in json.loads(out)["errors"][0]
    assert json.loads(out)["errors"][0].endswith("(--force mixes them, without it start anew)")
    assert run("run", own, *local, "--resume", "--force", capfd=capfd)[0] == 0


def test_a_folder_of_a_newer_raybench_is_refused_before_anything_starts(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    local = ("--launcher", "torchrun")
    play(monkeypatch, World())
    with monkeypatch.context() as newer:
        newer.setattr("raybench.results.parts.SCHEMA_MAJOR", 2)
        assert run("run", own, *local, capfd=capfd)[0] == 0
    world = play(monkeypatch, World())
    before = sorted(Path("results").rglob("*"))
    code, out, err = run("run", own, *local, capfd=capfd)
    assert (code, out, world.jobs) == (2, "", [])
    assert len(err.splitlines()) == 1
    assert "newer" in err
    assert sorted(Path("results").rglob("*")) == before
    assert run("report", capfd=capfd)[0] == 2


def test_a_results_folder_that_cannot_be_written(own: str, capfd: pytest.CaptureFixture[str]):
    Path("file").write_text("")
    code, _, err = run("run", own, "--results", "file", capfd=capfd)
    assert code == 2
    assert err.startswith("raybench: --results file: ")
    assert err.rstrip().endswith("is not a folder")
    code, _, err = run("run", own, "--results", "file/below", capfd=capfd)
    assert (code, err.rstrip().endswith("is not a folder")) == (2, True)


def test_verify_times_nothing(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    world = play(monkeypatch, World())
    code, out, _ = run("verify", own, "--launcher", "torchrun", "--json", capfd=capfd)
    assert code == 0
    assert world.jobs[0].verify_only
    assert [row["gate"] for row in json.loads(out)["rows"]] == ["passed", "passed"]


def test_dry_run_starts_nothing_and_writes_nothing(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    world = play(monkeypatch, World())
    code, out, _ = run("run", own, "--dry-run", "--launcher", "torchrun", capfd=capfd)
    assert (code, world.jobs, Path("results").exists()) == (0, [], False)
    assert "not promised" in out
    code, out, _ = run("run", own, "--dry-run", "--launcher", "torchrun", "--json", capfd=capfd)
    rows = json.loads(out)["rows"]
    assert json.loads(out)["estimated_seconds"]["own"] > 20
    assert [(row["case"], row["runs"], row["rounds"]) for row in rows] == [("one", True, 2), ("two", True, 2)]
    assert all(row["estimated_bytes_per_rank"] > 0 for row in rows)


def test_dry_run_of_a_suite_to_go_on_with_plans_what_it_lacks(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    play(monkeypatch, World({("two", 2): "oom"}))
    assert run("run", own, "--launcher", "torchrun", capfd=capfd)[0] == 1
    code, out, _ = run("run", own, "--dry-run", "--resume", "--launcher", "torchrun", "--json", capfd=capfd)
    rows = {row["case"]: row for row in json.loads(out)["rows"]}
    assert (code, rows["one"]["rounds"], rows["one"]["reason"]) == (0, 0, "done in this suite")
    assert rows["two"]["reason"] == "out_of_memory in this suite"
    assert json.loads(out)["estimated_seconds"]["own"] == 0
    code, _, err = run("run", own, "--dry-run", "--resume=gone", "--launcher", "torchrun", capfd=capfd)
    assert (code, "there is no suite 'gone'" in err) == (2, True)


def test_resume_says_what_the_newest_suite_was_asked_for_instead(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    play(monkeypatch, World())
    assert run("run", own, "--launcher", "torchrun", capfd=capfd)[0] == 0
    command = ["run", own, "--dry-run", "--resume", "--launcher", "torchrun"]
    _, out, _ = run(*command, "--no-peers", capfd=capfd)
    assert "no suite of this request (its newest, " in out
    assert "has peers on, not off), so a new one starts" in out
    _, out, _ = run(*command, "--repeats", "3", capfd=capfd)
    assert "has other tracks, cases or options), so a new one starts" in out


def test_inside_a_ray_job_rows_go_home_and_the_last_line_says_how_to_get_them(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    (tmp_path / "home").mkdir()
    play(monkeypatch, World())
    code, out, _ = run("run", own, "--launcher", "torchrun", capfd=capfd)
    assert code == 0
    assert (tmp_path / "home" / "raybench" / "results" / "runs").is_dir()
    assert out.splitlines()[-1] == "copy them down: ray rsync-down CLUSTER.yaml '~/raybench/results/' results/"


def test_an_unexpected_fault_is_one_line_and_a_log(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("never\nthought of")

    monkeypatch.setattr("raybench.suite.session.plan_track", broken)
    code, out, err = run("run", own, "--launcher", "torchrun", capfd=capfd)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("raybench: unexpected ZeroDivisionError: never thought of (more in ")
    log = Path(err.rpartition("more in ")[2].rstrip(")\n"))
    assert "Traceback" in log.read_text()
    log.unlink()
    assert list(Path("results/runs").iterdir()) == []


def test_list(capfd: pytest.CaptureFixture[str]):
    code, out, _ = run("list", capfd=capfd)
    assert code == 0
    assert "b-ddp-two-nodes: Data parallelism across two nodes" in out
    code, out, _ = run("list", "--json", capfd=capfd)
    rows = json.loads(out)["rows"]
    assert {"track", "case", "peer", "layout", "strategy", "runs", "reason", "num_ranks"} <= set(rows[0])


def test_schedule_and_doctor(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    code, out, _ = run("schedule", "gpipe", "--stages", "2", "--micro-batches", "4", "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["exit_code"], body["errors"]) == (0, 0, [])
    assert body["bubble"] == pytest.approx(0.2)
    log = tmp_path / "job.log"
    log.write_text("h:1:1 [0] NCCL INFO NCCL version 2.19.3+cuda12.1\n")
    code, out, _ = run("doctor", "nccl", str(log), "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["kind"], body["nccl_version"], body["cuda_version"]) == (0, "nccl-log", "2.19.3", "12.1")
    code, out, _ = run("doctor", "nccl", str(log), "nccl", str(log), "--json", capfd=capfd)
    assert (code, json.loads(out)["kind"]) == (0, "story")
    other = tmp_path / "other.log"
    other.write_text("hello\n")
    assert run("doctor", "nccl", str(other), capfd=capfd)[0] == 1
    code, out, _ = run("doctor", "nccl", str(log), "nccl", str(other), "--json", capfd=capfd)
    assert (code, json.loads(out)["exit_code"], json.loads(out)["kind"]) == (1, 1, "story")


def test_no_command_shows_the_commands(capfd: pytest.CaptureFixture[str]):
    code, out, _ = run(capfd=capfd)
    assert code == 2
    assert "run-all" in out
    assert run("--version", capfd=capfd)[1].startswith("raybench 0.")
    assert run("run", "--help", capfd=capfd)[0] == 0


@pytest.mark.flaky(reruns=2)  # a busy host lengthens CPU time too
@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["run", "--help"], ["run", "a", "--steps", "0"]])
def test_quick_answers_import_nothing_heavy(arguments: list[str]):
    code = (
        "import sys, time; from raybench.cli import main; main(sys.argv[1:]);"
        "heavy = {'torch', 'ray', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0 if time.process_time() < 1 else 'slow')"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cluster_without_free_resources(own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    world = play(monkeypatch, World())
    monkeypatch.setattr("raybench.suite.session.probe_local", lambda: cluster(node(free_cpus=0.0)))
    code, out, _ = run("run", own, "--launcher", "torchrun", "--json", capfd=capfd)
    assert (code, world.jobs) == (1, [])
    reason = "needs a free CPU, the cluster has none (all 2 are taken by other jobs)"
    assert {(row["status"], row["reason"]) for row in json.loads(out)["rows"]} == {("skipped", reason)}


def test_a_results_folder_that_is_removed_under_way(
    own: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    import shutil

    class Removing(World):
        def get(self, timeout: float):
            message = super().get(timeout)
            if getattr(message, "round", None) == 2:
                shutil.rmtree("results", ignore_errors=True)
            return message

    world = play(monkeypatch, Removing())
    code, out, err = run("run", own, "--launcher", "torchrun", "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["exit_code"], world.stopped) == (1, 1, [True])
    assert body["errors"][0] == "results results: was removed while it was being written to"
    assert "Traceback" not in err
