"""What other tools read: the summary as CSV or Markdown table, scalars for TensorBoard, runs for MLflow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from raybench.errors import RequestError, unknown
from raybench.report.content import Report
from raybench.report.text import has_numbers, known, markdown, plain

METRICS = (
    "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "step_time_s", "ratio_to_control", "scaling_efficiency",
    "communication_fraction", "compute_s", "communication_s", "waiting_s", "optimizer_s", "other_s", "bubble_measured",
    "mfu_6n", "mfu_non_causal", "usd_per_million_tokens", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
    "activation_bytes", "peak_device_bytes", "peak_rss_bytes",
)  # fmt: skip
PARAMETERS = (
    "suite_id", "track", "case", "peer", "scale", "status", "gate", "data_strategy", "pipeline_strategy",
    "tensor_strategy", "data_size", "pipeline_size", "tensor_size", "num_ranks", "num_nodes", "model", "precision",
    "backend", "device", "rounds",
)  # fmt: skip


def parse_exports(text: str | None) -> tuple[str, ...]:
    """The names in a list with commas.

    Raises:
        RequestError: one that is not known.
    """
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in EXPORTS:
            raise unknown("--export", name, EXPORTS)
    return names


def export(name: str, report: Report, out: Path) -> list[Path]:
    """Write one export into `out`; the files or folders written.

    Raises:
        RequestError: it needs a package that is not installed, or where it writes refuses.
    """
    return EXPORTS[name](report, out)


def _table(report: Report) -> pd.DataFrame:
    return pd.concat([section.cases for section in report.sections], ignore_index=True)


def _csv(report: Report, out: Path) -> list[Path]:
    path = out / "summary.csv"
    _table(report).to_csv(path, index=False)
    return [path]


def _markdown(report: Report, out: Path) -> list[Path]:
    table = _table(report)
    table = table[[name for name in table if table[name].notna().any()]]
    lines: list[list[str]] = [[str(name) for name in table], ["---"] * len(table.columns)]
    lines += [[markdown(value) if known(value) else "" for value in row] for row in table.itertuples(index=False)]
    path = out / "summary.md"
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")
    return [path]


def _tensorboard(report: Report, out: Path) -> list[Path]:
    """A run a case: its metrics at step 0, and its loss by step."""
    writers = _package("tensorboardX", "tensorboard")
    folder = out / "tensorboard"
    for section, row in _measured(report):
        with writers.SummaryWriter(str(folder / row["suite_id"] / row["track"] / row["case"])) as writer:
            for name, value in _metrics(row):
                writer.add_scalar(name, value, 0)
            for name, step, value in _losses(section, row["case"]):
                writer.add_scalar(name, value, step)
    return [folder]


def _mlflow(report: Report, out: Path) -> list[Path]:
    """A run a case in an experiment a track, where MLFLOW_TRACKING_URI says, else in a database in `out`."""
    mlflow = _package("mlflow", "mlflow")
    path = out / "mlflow.db"
    place = os.environ.get("MLFLOW_TRACKING_URI")
    if not place:
        for needed in ("sqlalchemy", "alembic"):  # which mlflow-skinny comes without
            _package(needed, "mlflow")
        place = f"sqlite:///{path.resolve()}"
    mlflow.set_tracking_uri(place)
    try:
        _mlflow_runs(mlflow, report)
    except mlflow.exceptions.MlflowException as error:
        raise RequestError(f"--export: mlflow at {place}: {plain(error, 200)}") from None
    return [path] if path.exists() else []


def _mlflow_runs(mlflow: Any, report: Report) -> None:
    for section, row in _measured(report):
        mlflow.set_experiment(f"raybench {row['track']}")
        with mlflow.start_run(run_name=row["case"]):
            mlflow.log_params({name: row[name] for name in PARAMETERS if known(row[name])})
            mlflow.log_metrics(dict(_metrics(row)))
            for name, step, value in _losses(section, row["case"]):
                mlflow.log_metric(name, value, step=step)


def _measured(report: Report) -> Iterator[tuple[Any, dict[str, Any]]]:
    for section in report.sections:
        for row in section.rows:
            if has_numbers(row):
                yield section, row._asdict()


def _metrics(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, float(row[name])) for name in METRICS if known(row[name]))


def _losses(section: Any, case: str) -> Iterator[tuple[str, int, float]]:
    losses = section.details.losses
    for row in losses[losses.case == case].itertuples(index=False):
        yield f"loss/{row.data}", int(row.step), float(row.loss)


def _package(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise RequestError(
            f"--export: {name} needs the package {module}, which is not installed{HINTS.get(name, '')}"
        ) from None


HINTS = {"mlflow": " (pip install raybench[mlflow])"}
EXPORTS: dict[str, Callable[[Report, Path], list[Path]]] = {
    "csv": _csv,
    "md": _markdown,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}
