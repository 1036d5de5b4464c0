"""Keeps `docs/guide.md` true: draws its diagrams and writes the numbers of a report between its markers.

`make guide` does it for the newest suite of every track in `results/`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from raybench.errors import RequestError
from raybench.parallel.pipeline.draw import save_png
from raybench.parallel.pipeline.schedules import build as build_schedule
from raybench.parallel.pipeline.simulate import Times, simulate
from raybench.report.charts import Bar, Bars, Figure, Row, Rows, Stretch
from raybench.report.content import Report, build
from raybench.report.diagrams import collectives, tensor_parallel
from raybench.report.plots import figures
from raybench.report.png import write_figures
from raybench.report.summary import grid
from raybench.report.text import known, markdown, milliseconds, number, percent, size, whole
from raybench.results.store import load

GUIDE = "guide.md"
MEASURED = ("benchmark", "time-split", "communication")
"""Figures of the report that the guide shows."""
BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GRADIENTS, LAYER_S = 6, 1e-3
"""Layers of the drawn backward pass, each with a gradient to be summed, and the time of one."""


def write_guide(report: Report, docs: Path) -> list[Path]:
    """Draw the figures into `docs/figures` and renew the numbers in `docs/guide.md`; the files written.

    Raises:
        RequestError: the guide is not there or cannot be written.
    """
    guide, folder = docs / GUIDE, docs / "figures"
    try:
        text = guide.read_text(encoding="utf-8")
        folder.mkdir(exist_ok=True)
        drawn = [collectives(folder / "collectives.png"), tensor_parallel(folder / "tensor.png")]
        drawn.append(_schedules(folder / "pipelines.png"))
        drawn += write_figures([_ladder(), _sharded()], "by construction, not measured", folder)
        measured = [figure for figure in figures(report) if figure.name in MEASURED]
        drawn += write_figures(measured, " · ".join(list(report.facts.values())[:3])[:180], folder)
        guide.write_text(BLOCK.sub(lambda m: f"{m[1]}{_NUMBERS[m[2]](report)}\n{m[3]}", text), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{docs}: the guide cannot be written ({error.strerror or error})") from None
    return [guide, *drawn]


def _throughput(report: Report) -> str:
    titles = ["track", "case", "ranks", "tokens/s", "× control", "step, ms", "exposed", "state a rank"]
    rows = [
        [
            markdown(section.track),
            markdown(row.case),
            whole(row.num_ranks),
            number(row.tokens_per_s, 4),
            number(row.ratio_to_control),
            milliseconds(row.step_time_s),
            percent(row.communication_fraction),
            size(int(row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes)),
        ]
        for section in report.sections
        for row in section.rows
        if known(row.tokens_per_s)
    ]
    return "\n".join([_where(report), "", *grid(titles, rows, left=titles[:2])])


def _shares(report: Report) -> str:
    """Communication share by kind of parallelism: the range over all cases that use it, winner first."""
    found: dict[str, list[float]] = {}
    for section in report.sections:
        for row in section.cases[section.cases.communication_fraction.notna()].to_dict("records"):
            axes = [axis for axis in ("data", "pipeline", "tensor") if row[f"{axis}_size"] > 1]
            nodes = "one node" if row["num_nodes"] == 1 else "several nodes"
            found.setdefault(f"{' × '.join(axes)}, {nodes}", []).append(row["communication_fraction"])
    rows = [
        [name, str(len(shares)), f"{percent(min(shares))} – {percent(max(shares))}"]
        for name, shares in sorted(found.items())
    ]
    return "\n".join(
        [_where(report), "", *grid(["parallelism", "cases", "exposed communication"], rows, left=("parallelism",))]
    )


def _answers(report: Report) -> str:
    lines = [f"- **{markdown(section.title)}.** {markdown(section.answer[0])}" for section in report.sections]
    return "\n".join(lines)


def _where(report: Report) -> str:
    facts = [f"{name} {report.facts[name]}" for name in ("Device", "Backend", "Scale", "torch") if name in report.facts]
    return f"Measured on {markdown(', '.join(facts))}."


_NUMBERS: dict[str, Callable[[Report], str]] = {"throughput": _throughput, "shares": _shares, "answers": _answers}


def _schedules(path: Path) -> Path:
    names = ("gpipe", "one-f-one-b", "zero-bubble")
    times = Times(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    drawn = [simulate(build_schedule(name, stages=4, micro_batches=8), times) for name in names]
    save_png(drawn, path)
    return path


def _ladder() -> Figure:
    """When gradients move, rung by rung, over one backward pass of equal layers."""
    groups = (
        ("accumulated: after backward, one blocking all-reduce a parameter", _after()),
        ("hooked: inside backward, blocking", _blocking()),
        ("overlapped: inside backward, asynchronous", _overlapped(1)),
        ("bucketed: asynchronous, two gradients at a time", _overlapped(2)),
    )
    unit = "ms; backward takes 1 ms a layer, an all-reduce 0.6 ms and 0.7 ms for each gradient in it"
    chart = Rows("Backward, then the optimizer", unit, groups)
    alternative = "Backward and communication of four strategies on the time axis"
    return Figure("ladder", "When gradients move", alternative, (("", chart, "a drawing, not a measurement"),))


def _after() -> tuple[Row, ...]:
    end, took = GRADIENTS * LAYER_S, _transfer_s(1)
    sent = [Stretch("communication", end + k * took, end + (k + 1) * took) for k in range(GRADIENTS)]
    return (_row([Stretch("backward", 0, end), *sent], sent),)


def _blocking() -> tuple[Row, ...]:
    work, sent, now = [], [], 0.0
    for _ in range(GRADIENTS):
        ready, now = now + LAYER_S, now + LAYER_S + _transfer_s(1)
        work.append(Stretch("backward", ready - LAYER_S, ready))
        sent.append(Stretch("communication", ready, now))
    return (_row([*work, *sent], sent),)


def _overlapped(bucket: int) -> tuple[Row, ...]:
    backward = GRADIENTS * LAYER_S
    sent, free = [], 0.0
    for last in range(bucket, GRADIENTS + 1, bucket):
        begin = max(free, last * LAYER_S)
        free = begin + _transfer_s(bucket)
        sent.append(Stretch("communication", begin, free))
    return (_row([Stretch("backward", 0, backward), Stretch("communication", backward, free)], sent),)


def _transfer_s(num_gradients: int) -> float:
    return 0.6e-3 + 0.7e-3 * num_gradients


def _row(thick: list[Stretch], thin: list[Stretch]) -> Row:
    end = max(stretch.end for stretch in thick)
    return Row("a rank", (*thick, Stretch("optimizer", end, end + LAYER_S / 2)), tuple(thin))


def _sharded() -> Figure:
    """Bytes of state a parameter and rank with AdamW in fp32 over 4 ranks: what each stage divides."""
    ranks = 4
    whole = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
    divided: dict[str, tuple[str, ...]] = {
        "replicated": (),
        "zero1": ("optimizer",),
        "zero2": ("optimizer", "gradients"),
        "zero3": ("optimizer", "gradients", "parameters"),
    }
    bars = tuple(
        _state(name, {k: v / ranks if k in parts else v for k, v in whole.items()}) for name, parts in divided.items()
    )
    chart = Bars("Four ranks, AdamW in fp32", "bytes of state a parameter", bars, lambda value: f"{value:g}")
    alternative = "Bytes of parameters, gradients and optimizer state a rank by ZeRO stage"
    return Figure("sharded", "What each stage of ZeRO divides", alternative, (("", chart, "by formula"),))


def _state(name: str, parts: dict[str, float]) -> Bar:
    return Bar(name, f"{sum(parts.values()):g} bytes", tuple(parts.items()))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m raybench.report.guide RESULTS DOCS")
    for written in write_guide(build(load(sys.argv[1])), Path(sys.argv[2])):
        print(written)
