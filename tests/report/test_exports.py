"""Exports, prices and published numbers, by the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from raybench.cli import main
from raybench.report import build
from raybench.report.export import parse_exports
from raybench.report.reference import load_references, published, reference_folder, write_references
from raybench.results.parts import VERSION_KEY
from raybench.results.store import Writer, load
from tests.results.made import TRACK, run_row, skipped_row, write_cases, write_measured

NEW = ["flops_per_token_6n", "flops_per_token_non_causal"]
"""Columns that came with version 1.1."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_measured(tmp_path / "results", ["bucketed", "naive", "torch-ddp"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_csv_and_markdown_hold_the_summary(folder: Path) -> None:
    assert main(["report", "--export", "csv,md"]) == 0
    table = pd.read_csv("report/summary.csv")
    summary = load("results").summary()
    assert list(table.case) == list(summary.case)
    assert table.tokens_per_s.to_numpy() == pytest.approx(summary.tokens_per_s.to_numpy())
    assert list(table.columns[: len(summary.columns)]) == list(summary.columns)
    lines = Path("report/summary.md").read_text().splitlines()
    assert len(lines) == 2 + len(summary)
    assert len({line.count("|") for line in lines}) == 1


def test_tensorboard_gets_scalars_and_the_loss_by_step(folder: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    assert main(["report", "--export", "tensorboard"]) == 0
    (file,) = (folder / "report" / "tensorboard" / "suite-1" / TRACK / "naive").glob("events*")
    found: dict[str, list[tuple[int, float]]] = {}
    data = file.read_bytes()
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        data = data[16 + length :]
    row = load("results").summary().set_index("case").loc["naive"]
    assert found["tokens_per_s"] == [(0, pytest.approx(row.tokens_per_s))]
    assert found["loss/train"][0] == (3, pytest.approx(6.7))
    assert len(found["loss/train"]) == 10
    assert found["loss/evaluation"] == [(12, pytest.approx(6.0))]


def test_mlflow_gets_a_run_a_case(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    fake: Any = ModuleType("mlflow")
    fake.set_tracking_uri = lambda uri: calls.append(("uri", uri))
    fake.set_experiment = lambda name: calls.append(("experiment", name))
    fake.start_run = lambda run_name: (calls.append(("run", run_name)), Run())[1]
    fake.log_params = lambda values: calls.append(("params", values))
    fake.log_metrics = lambda values: calls.append(("metrics", values))
    fake.log_metric = lambda name, value, step: calls.append((name, (value, step)))
    fake.exceptions = SimpleNamespace(MlflowException=RuntimeError)
    for name, module in {"mlflow": fake, "sqlalchemy": ModuleType("a"), "alembic": ModuleType("b")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["report", "--export", "mlflow"]) == 0
    assert [name for kind, name in calls if kind == "run"] == ["naive", "bucketed", "torch-ddp"]
    assert [name for kind, name in calls if kind == "experiment"] == [f"raybench {TRACK}"] * 3
    assert next(value for kind, value in calls if kind == "uri").startswith("sqlite:///")
    params = next(value for kind, value in calls if kind == "params")
    assert (params["case"], params["num_ranks"], "peer" in params) == ("naive", 2, False)
    metrics = next(value for kind, value in calls if kind == "metrics")
    assert metrics["tokens_per_s"] == pytest.approx(load("results").summary().tokens_per_s[0])
    assert ("loss/train", (pytest.approx(6.7), 3)) in calls


@pytest.fixture
def mlflow() -> Any:
    """The package itself: `pip install raybench[mlflow]`."""
    for name in ("sqlalchemy", "alembic"):
        pytest.importorskip(name)
    return pytest.importorskip("mlflow")


def test_mlflow_itself_takes_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, mlflow: Any) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["report", "--export", "mlflow"]) == 0
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'report' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(f"raybench {TRACK}")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["bucketed", "naive", "torch-ddp"]
    naive = runs["naive"]
    assert (naive.info.status, naive.data.params["num_ranks"], "peer" in naive.data.params) == ("FINISHED", "2", False)
    assert naive.data.metrics["tokens_per_s"] == pytest.approx(load("results").summary().tokens_per_s[0])
    losses = client.get_metric_history(naive.info.run_id, "loss/train")
    assert [point.step for point in losses] == list(range(3, 13))


def test_where_mlflow_refuses_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mlflow: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    assert main(["report", "--export", "mlflow"]) == 2
    assert "raybench: --export: mlflow at nonsense://x: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "cvs"], "--export: 'cvs' is not known; did you mean 'csv'? (allowed: csv, md, tensorboard, mlf"),
        (["--price", "0"], "--price: '0' is not allowed (a number of USD above 0)"),
        (["--price", "cheap"], "--price: 'cheap' is not allowed (a number of USD above 0)"),
    ],
)
def test_wrong_options_are_one_message(
    folder: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) == 2
    assert message in capfd.readouterr().err
    assert not (folder / "report").exists()


def test_what_is_not_installed_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["report", "--export", "mlflow"]) == 2
    assert "--export: mlflow needs the package mlflow, which is not installed" in capfd.readouterr().err


def test_a_list_of_exports_is_read_once_each() -> None:
    assert parse_exports(" csv, md,csv,") == ("csv", "md")
    assert parse_exports(None) == ()


def test_a_price_becomes_the_cost_of_a_million_tokens(folder: Path) -> None:
    (section,) = build(load("results"), price=1.80).sections
    speed = section.cases.tokens_per_s[0]
    assert section.cases.usd_per_million_tokens[0] == pytest.approx(1.80 * 2 / 3600 / speed * 1e6)
    assert section.explanation[-1].startswith("A million tokens cost 0.1")
    assert build(load("results")).sections[0].cases.usd_per_million_tokens.isna().all()


def test_published_numbers_are_those_that_are_committed(tmp_path: Path) -> None:
    write_references(tmp_path)
    committed, fresh = load_references(), load(tmp_path)
    assert published(committed) == published(fresh)
    assert reference_folder().is_dir()


def test_published_numbers_say_what_is_wrong_with_them() -> None:
    rows = {(row.track, row.case): row for row in published(load_references())}
    first = rows["a-ddp-one-node", "ddp-one-node"]
    assert first.tokens_per_s == pytest.approx(49_290, rel=1e-6)
    assert first.known_wrong is not None
    assert "2.6 GB" in first.known_wrong
    assert rows["l-yelp-sharded", "zero2"].state_bytes == (1380 + 690 + 1380) * 2**20
    assert rows["l-yelp-sharded", "zero2"].step_time_s == pytest.approx(2.321)
    assert rows["k-yelp-data-parallel", "simple_ddp"].known_wrong is None
    assert rows["k-yelp-data-parallel", "bucket_ddp_async"].known_wrong is not None
    assert len(rows) == 5 + 6 + 7 + 5


def test_published_numbers_stand_beside_ours_when_asked(folder: Path) -> None:
    assert main(["report", "--reference"]) == 0
    text = Path("report/BENCHMARK_SUMMARY.md").read_text()
    assert "49,290" in text
    assert "2.6 GB" in text
    assert "49,290" in Path("report/report.html").read_text()
    assert main(["report"]) == 0
    assert "49,290" not in Path("report/BENCHMARK_SUMMARY.md").read_text()


@pytest.mark.parametrize("case", ["one row", "only failures", "mixed versions", "a corrupt file", "verified"])
@pytest.mark.filterwarnings("ignore:results")
def test_every_store_with_a_row_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    match case:
        case "one row":
            Writer("results", "s").write_round("t", "c", 1, 1, {"runs": [run_row()]})
        case "only failures":
            Writer("results", "s").write_round("t", "a", 0, 0, {"runs": [skipped_row("no GPU")]})
            Writer("results", "s").write_round("t", "b", 1, 1, {"runs": [run_row(status="timeout", window_ns=None)]})
        case "mixed versions":
            write_measured(tmp_path / "results", ["bucketed", "naive"])
            write_cases(tmp_path / "results", {"bucketed": [9_000.0, 9_100.0]}, suite="suite-0")
            for part in (tmp_path / "results" / "runs" / "suite-0").iterdir():
                table = pq.read_table(part)
                older = {**table.schema.metadata, VERSION_KEY: b"1.0"}
                pq.write_table(table.drop_columns(NEW).replace_schema_metadata(older), part)
        case "a corrupt file":
            write_measured(tmp_path / "results", ["bucketed", "naive"])
            for table in ("runs", "steps", "operations"):
                next((tmp_path / "results" / table / "suite-1").iterdir()).write_bytes(b"PAR1 nothing PAR1")
        case "verified":
            write_cases(tmp_path / "results", {"bucketed": [100.0]}, tokens=None)
    assert main(["report", "--export", "csv,md,tensorboard", "--reference", "--price", "1"]) == 0
    for name in ("BENCHMARK_SUMMARY.md", "report.html", "summary.csv"):
        assert (tmp_path / "report" / name).stat().st_size > 100


def test_an_empty_folder_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "runs").mkdir(parents=True)
    assert main(["report", "--json"]) == 2
    body = json.loads(capfd.readouterr().out)
    assert body["errors"] == ["results results: there are no results in it"]
