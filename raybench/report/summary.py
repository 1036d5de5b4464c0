"""The report as Markdown: `BENCHMARK_SUMMARY.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raybench.report import collectives
from raybench.report.collectives import Sweep
from raybench.report.content import Report, Section
from raybench.report.reference import Published
from raybench.report.terminal import peak_bytes, speed, state_bytes
from raybench.report.text import (
    has_numbers,
    interval,
    known,
    markdown,
    milliseconds,
    number,
    percent,
    size,
    whole,
    words,
)

FILE_NAME = "BENCHMARK_SUMMARY.md"

COLUMNS: dict[str, Callable[[Any], str]] = {
    "case": lambda row: markdown(row.case) + (" (peer)" if known(row.peer) else ""),
    "ranks": lambda row: whole(row.num_ranks),
    "nodes": lambda row: whole(row.num_nodes),
    "gate": lambda row: words(row.gate),
    "tokens/s": lambda row: speed(row) if has_numbers(row) else f"**{speed(row)}**",
    "95 % interval": lambda row: interval(row.tokens_per_s_low, row.tokens_per_s_high, 4) or "–",
    "rounds": lambda row: whole(row.rounds),
    "× control": lambda row: number(row.ratio_to_control),
    "scaling": lambda row: percent(row.scaling_efficiency),
    "step, ms": lambda row: milliseconds(row.step_time_s),
    "exposed comm.": lambda row: percent(row.communication_fraction),
    "bubble": lambda row: percent(row.bubble_measured),
    "MFU, 6N": lambda row: percent(row.mfu_6n),
    "MFU, non-causal": lambda row: percent(row.mfu_non_causal),
    "USD per million tokens": lambda row: number(row.usd_per_million_tokens),
    "state a rank": lambda row: size(state_bytes(row)),
    "peak a rank": lambda row: size(peak_bytes(row)),
}
TEXT_COLUMNS = ("case", "gate")
PUBLISHED_COLUMNS = (
    "case", "source", "device", "ranks", "tokens/s", "step, ms", "state a rank", "printed", "known to be wrong"
)  # fmt: skip
PUBLISHED_TEXT = ("case", "source", "device", "printed", "known to be wrong")

HOW_TO_READ = """\
- **gate**: every gradient, and the parameters after a step, were compared with a single-process run of the same model
  on the same batch. A case whose gate failed has no throughput.
- **tokens/s**: global tokens of a timed window ÷ its length until the last rank ended; median over rounds, with an
  interval that holds the true median in 95 % of repetitions. One round has no interval.
- **× control**: tokens/s ÷ (ranks × tokens/s of one process on one rank's batch), measured in the same rounds.
- **scaling**: speed of a rank ÷ speed of a rank in the track's smallest layout of the same strategy, else of one
  process.
- **exposed comm.**: the share of a step in which a rank waited for communication, from instrumented steps outside
  the window.
- **bubble**: the share of a pipeline's step in which ranks computed nothing, as measured.
- **MFU**: model FLOPs a second ÷ the GPUs' peak, under two conventions: 6 × parameters in matrix products (6N), and
  with attention's scores, masked half included (non-causal). A device whose peak is not known has none.
- **state a rank**: parameters, gradients and optimizer state of the rank that holds most. **peak a rank**: of the
  device's memory; on a CPU of the whole process, libraries included.
- **peer**: a library's own implementation of the same thing.
- A case without numbers did not run to its end; the reason is below its table. It is not zero."""


def render(report: Report, figures: Sequence[str] = ()) -> str:
    """The whole document, with the figures that lie beside it."""
    lines = ["# Benchmark summary", ""]
    for warning in report.warnings:
        lines += [f"> {markdown(warning)}", ">"]
    if report.warnings:
        lines[-1] = ""
    for section in report.sections:
        lines += _section(section)
    if report.sweeps:
        lines += ["## Collectives", ""]
    for sweep in report.sweeps:
        lines += _sweep(sweep)
    if figures:
        lines += ["## Figures", "", *(f"![{name.removesuffix('.png')}]({name})" for name in figures), ""]
    lines += ["## Where and with what", "", *grid(["", ""], [[k, markdown(v)] for k, v in report.facts.items()])]
    lines += ["", "## How to read this", "", how_to_read(report), ""]
    return "\n".join(lines)


def how_to_read(report: Report) -> str:
    """A list of the terms that a report uses."""
    lists = {HOW_TO_READ: report.sections, collectives.HOW_TO_READ: report.sweeps}
    return "\n".join(entries for entries, shown in lists.items() if shown)


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {markdown(section.title)}", "")
    if section.question:
        yield from (f"*{markdown(section.question)}*", "")
    for sentence in section.answer:
        yield from (f"**{markdown(sentence)}**", "")
    yield from (f"- {markdown(sentence)}" for sentence in section.explanation)
    yield from [""] if section.explanation else []
    rows = section.rows
    columns = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cell != "–" for cell in cells)}
    cells = [list(row) for row in zip(*columns.values(), strict=True)]
    yield from grid(list(columns), cells, left=TEXT_COLUMNS)
    yield ""
    for case, status, reason in section.failures:
        yield f"- {markdown(case)}: **{status}**, {markdown(reason)}"
    if section.failures:
        yield ""
    if section.published:
        yield from ("Published by others, on other hardware, with other software and without this gate:", "")
        cells = [[markdown(cell) for cell in published_cells(row)] for row in section.published]
        yield from grid(PUBLISHED_COLUMNS, cells, left=PUBLISHED_TEXT)
        yield ""
    yield from (f"Track `{section.track}`, suite `{section.suite_id}`: {markdown(section.workload)}.", "")


def _sweep(sweep: Sweep) -> Iterator[str]:
    yield from (f"### {markdown(sweep.title)}", "")
    titles, rows = sweep.table
    if "status" in titles:
        place = titles.index("status")
        rows = [[f"**{c}**" if n == place and c != "ok" else markdown(c) for n, c in enumerate(row)] for row in rows]
    yield from grid(titles, rows, left=collectives.TEXT_COLUMNS)
    yield ""
    for operation, status, reason in sweep.failures:
        yield f"- {markdown(operation)}: **{status}**, {markdown(reason)}"
    yield from [""] if sweep.failures else []
    yield from (f"{markdown(sweep.basis)}; suite `{sweep.suite_id}`.", "")


def published_cells(row: Published) -> list[str]:
    """A published row in the order of `PUBLISHED_COLUMNS`."""
    numbers = [whole(row.num_ranks), number(row.tokens_per_s, 4), milliseconds(row.step_time_s), size(row.state_bytes)]
    return [row.case, row.source, row.device, *numbers, row.printed or "–", row.known_wrong or "–"]


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ("",)) -> Iterator[str]:
    """A Markdown table that also reads as plain text."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    widths = [max(width, 3) for width in widths]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_pad(c, w, t in left) for c, w, t in zip(cells, widths, titles, strict=True)) + " |"

    yield line(titles)
    yield line(["-" * w if t in left else "-" * (w - 1) + ":" for w, t in zip(widths, titles, strict=True)])
    for row in rows:
        yield line(row)


def _pad(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
