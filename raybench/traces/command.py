"""`raybench traces`: read a folder of traces, in parallel over its files, and write what they say."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raybench.errors import RequestError, unknown
from raybench.suite.answer import Answer, document
from raybench.traces.find import Window, case_folder, find_files, give_ranks, missing_ranks, newest, windows
from raybench.traces.rank import RankReport, report_rank
from raybench.traces.ranks import compare
from raybench.traces.stream import UnreadableTraceError
from raybench.traces.summary import CaseSummary, Row, as_csv

Select = Literal["latest", "all"]
SELECTIONS = ("latest", "all")
PARALLEL_BYTES = 4 << 20
"""Packed bytes from which reading in processes of their own is worth starting them."""
MAX_PROCESSES = 16


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written into one folder."""

    folder: Path
    cases: list[CaseSummary]


def traces_command(place: str, out: Path, select: str) -> Answer:
    """Summaries of all traces under `place`, as CSV and HTML, and on the terminal.

    Raises:
        RequestError: The folder, the selection or the place for the files is wrong, or nothing could be read.
    """
    if select not in SELECTIONS:
        raise unknown("--select", select, SELECTIONS)
    files = find_files(Path(place))
    files = newest(files) if select == "latest" else files
    reports, errors = read_all(files)
    if not reports:
        raise RequestError(f"DIR: {place}: no trace could be read: " + "; ".join(errors[:5]))
    outputs = arrange(reports, Path(place), out, select == "all")
    written = [path for output in outputs for path in _write(output)]
    rows = [row for output in outputs for case in output.cases for row in case.rows()]
    notes = list(dict.fromkeys(note for output in outputs for case in output.cases for note in case.notes))
    lines = [
        *_table(rows),
        *(f"! {note}" for note in notes),
        *(f"raybench: {error}" for error in errors),
        *(f"wrote {path}" for path in written),
    ]
    code = 1 if errors else 0
    body = document(code, rows=rows, errors=errors, notes=notes, files=[str(path) for path in written])
    return Answer(exit_code=code, text="\n".join(lines), document=body)


def read_all(files: Sequence[Path]) -> tuple[list[RankReport], list[str]]:
    """Every file's report, or a sentence that says why it has none."""
    reports: list[RankReport] = []
    errors: list[str] = []
    for found in _run(read_file, files):
        if isinstance(found, str):
            errors.append(found)
        else:
            reports.extend(found)
    return reports, errors


def read_file(path: Path) -> list[RankReport] | str:
    """One file's reports: one, but for the database of nsys, which may hold several GPUs."""
    try:
        if path.name.endswith((".sqlite", ".csv")):
            from raybench.traces.nsys import report_kernel_sums, report_sqlite

            return report_sqlite(path) if path.suffix == ".sqlite" else [report_kernel_sums(path)]
        return [report_rank(path)]
    except UnreadableTraceError as error:
        return f"{path}: {error}"
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def _run(read: Callable[[Path], list[RankReport] | str], files: Sequence[Path]) -> Iterator[list[RankReport] | str]:
    num_processes = min(len(files), len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if num_processes < 2 or sum(path.stat().st_size for path in files) < PARALLEL_BYTES:
        yield from map(read, files)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(read, files)


def arrange(reports: Sequence[RankReport], place: Path, out: Path, every_window: bool) -> list[Output]:
    """Reports by folder to write: the newest window of every case together, or each window in a folder of its own."""
    by_case: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        by_case[case_name(report, place)].append(report)
    by_window: dict[int, list[CaseSummary]] = defaultdict(list)
    begins: dict[int, int] = {}
    for name, members in sorted(by_case.items()):
        give_ranks(members)
        found = windows(members)
        for window in found if every_window else [_latest(members)]:
            index = window.index if every_window else 0
            begins[index] = min(window.begin_ns, begins.get(index, window.begin_ns))
            by_window[index].append(_summarise(name, window.reports))
    if not every_window:
        return [Output(folder=out, cases=by_window[0])]
    return [
        Output(folder=out / f"run_{index}_{begins[index] // 10**6}", cases=cases)
        for index, cases in sorted(by_window.items())
    ]


def _latest(members: Sequence[RankReport]) -> Window:
    newest_of = {report.rank: report for report in sorted(members, key=lambda r: r.timeline.begin_ns)}
    return windows(list(newest_of.values()))[0]


def _summarise(name: str, reports: list[RankReport]) -> CaseSummary:
    together = compare(reports)
    missing = missing_ranks(reports)
    notes = [f"{name}: {note}" for note in [*([missing] if missing else []), *together.notes]]
    notes += [f"{report.path}: {problem}" for report in reports for problem in report.problems]
    return CaseSummary(name=name, reports=reports, together=together, notes=notes)


def case_name(report: RankReport, place: Path) -> str:
    """Track and case where raybench recorded it, else where the traces lie."""
    case = report.case
    if case.get("track") and case.get("case"):
        return f"{case.get('suite_id')}/{case['track']}/{case['case']}"
    folder = case_folder(report.path)
    return folder.relative_to(place).as_posix() if folder.is_relative_to(place) and folder != place else place.name


def _write(output: Output) -> list[Path]:
    from raybench.traces.page import render

    files = {
        "summary.csv": as_csv([row for case in output.cases for row in case.rows()]),
        "operations.csv": as_csv([row for case in output.cases for row in case.operations()]),
        "summary.html": render(output.cases),
    }
    try:
        output.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output.folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"-o {output.folder}: cannot be written ({error.strerror or error})") from None
    return [output.folder / name for name in files]


_COLUMNS = (
    ("case", "case", "{}"),
    ("rank", "rank", "{}"),
    ("idle %", "idle_time_pctg", "{:.2f}"),
    ("compute %", "compute_time_pctg", "{:.2f}"),
    ("other %", "non_compute_time_pctg", "{:.2f}"),
    ("overlap %", "comm_comp_overlap_pctg", "{:.2f}"),
    ("comm. ms", "communication_time_us", "{:.3f}"),
    ("exposed %", "exposed_communication_pctg", "{:.2f}"),
    ("waiting ms", "waiting_us", "{:.3f}"),
    ("bubble %", "bubble_pctg", "{:.2f}"),
    ("peak MiB", "peak_allocated_mb", "{:.1f}"),
)


def _table(rows: Sequence[Row]) -> list[str]:
    """The most asked for, in columns."""
    cells = [[title for title, _, _ in _COLUMNS]]
    for row in rows:
        values = [
            (row[key] / 1000 if title.endswith(" ms") and row[key] is not None else row[key], form)
            for title, key, form in _COLUMNS
        ]
        cells.append(["–" if value is None else form.format(value) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
