"""What the commands do; each returns its answer and prints nothing but progress."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import RequestError, unknown
from raybench.suite.answer import Answer, document

if TYPE_CHECKING:
    from raybench.suite.driver import Outcome
    from raybench.suite.request import Request

DOCTOR_KINDS = ("topo", "nccl", "watchdog")


def list_command(*, on_cluster: bool) -> Answer:
    """Tracks and cases; with `on_cluster` against the Ray cluster and with its nodes, else against this machine."""
    from raybench.suite.cluster import probe_local, probe_ray
    from raybench.suite.listing import (
        cluster_text,
        describe_cluster,
        describe_nccl,
        list_text,
        listed_rows,
        nccl_text,
        plan_suite,
    )

    if on_cluster:
        from raybench.suite.embedded import connect

        with connect():
            cluster = probe_ray()
    else:
        cluster = probe_local()
    plans = plan_suite(cluster)
    nccl = describe_nccl() if on_cluster else None
    text = list_text(plans, cluster)
    if nccl is not None:
        text = f"{cluster_text(cluster)}\n{nccl_text(nccl)}\n\n{text}"
    body = document(0, rows=listed_rows(plans), cluster=describe_cluster(cluster), nccl=nccl)
    return Answer(text=text, document=body)


def run_command(request: Request, *, dry_run: bool) -> Answer:
    """Measure, or with `dry_run` say what would be measured."""
    from raybench.suite.planned import plan_text, plan_tracks, planned_rows
    from raybench.suite.progress import for_stream
    from raybench.suite.request import new_suite_id
    from raybench.suite.session import connected, drive, prepare, recorded_so_far

    request.check()
    check_writable(request.results)
    if dry_run:
        with connected(request) as cluster:
            prepared = prepare(request, cluster)
            notes: list[str] = []
            recorded = recorded_so_far(request, prepared, notes.append)
        tracks = plan_tracks(prepared, recorded)
        rows = planned_rows(tracks)
        code = 0 if any(planned.rounds for planned in tracks) else 1
        seconds = {planned.plan.track.track: round(planned.seconds) for planned in tracks}
        body = document(code, rows=rows, scale=prepared.scale, estimated_seconds=seconds, notes=notes)
        return Answer(exit_code=code, text=plan_text(prepared, tracks, notes), document=body)
    suite_id = new_suite_id()
    with _suite_folders(request, suite_id), connected(request) as cluster:
        prepared = prepare(request, cluster)
        with for_stream() as progress:
            progress.note(f"cluster: {cluster.describe()}; scale {prepared.scale}")
            for note in prepared.notes:
                progress.note(note)
            suite_id, outcome = drive(request, prepared, progress, suite_id=suite_id)
    return _run_answer(request, suite_id, outcome)


def check_writable(results: str) -> None:
    """Refuse a results folder that cannot be written, before anything starts.

    Raises:
        RequestError: in one sentence.
    """
    if "://" in results:
        return
    place = Path(results).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise RequestError(f"--results {results}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise RequestError(f"--results {results}: {place} cannot be written")


def check_file_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything starts.

    Raises:
        RequestError: naming the option and the path.
    """
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise RequestError(
            f"{option}: {str(path)!r} cannot be written ({error.strerror}); allowed is a file in a folder that exists"
        ) from None


@contextmanager
def _suite_folders(request: Request, suite_id: str) -> Iterator[None]:
    """Make a new suite's folders before anything starts, so that what is wrong with the store shows then."""
    from raybench.results.schema import TRACK_TABLES
    from raybench.results.store import Writer

    if request.resume is None:
        Writer(request.results, suite_id).check()
    try:
        yield
    finally:
        for table in () if "://" in request.results else TRACK_TABLES:
            with suppress(OSError):
                (Path(request.results) / table / suite_id).rmdir()  # only where it stayed empty


def _run_answer(request: Request, suite_id: str, outcome: Outcome) -> Answer:
    """The suite's table and rows, as they are in the store."""
    from raybench.analysis.rows import rows
    from raybench.report.terminal import table
    from raybench.results.folder import open_folder
    from raybench.results.store import load

    errors = list(outcome.errors)
    code = outcome.exit_code
    told, found, place = None, [], str(open_folder(request.results))
    lines = [f"raybench: {error}" for error in errors]
    try:
        results = load(request.results, suite_id)
        told, found = table(results), rows(results)
        lines.append(where_rows_are(place, suite_id))
    except RequestError as error:
        errors.append(str(error))
        lines.append(f"raybench: {error}")
        code = code or 1
    body = document(code, rows=found, errors=errors, suite_id=suite_id, results=place, notes=outcome.notes)
    return Answer(exit_code=code, table=told, text="\n".join(lines), document=body)


def where_rows_are(results: str, suite_id: str) -> str:
    """Where to find the rows, and from a Ray job's node how to copy them down."""
    from raybench.suite.request import inside_ray_job

    lines = [f"suite {suite_id}: rows in {results}"]
    if inside_ray_job() and "://" not in results:
        path = Path(results).absolute()
        home = Path.home()
        shown = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        lines.append(f"copy them down: ray rsync-down CLUSTER.yaml '{shown}/' results/")
    return "\n".join(lines)


def report_command(
    results: str, out: Path, *, price: float | None = None, reference: bool = False, exports: str | None = None
) -> Answer:
    """The table, and the report's files."""
    from raybench.analysis.rows import rows
    from raybench.comm.render import as_rows
    from raybench.report.content import build
    from raybench.report.export import parse_exports
    from raybench.report.reference import load_references
    from raybench.report.terminal import tables
    from raybench.report.write import write_report
    from raybench.results.store import load

    wanted = parse_exports(exports)
    loaded = load(results, of="any")
    report = build(loaded, price=price, references=load_references() if reference else None)
    files = [str(path) for path in write_report(report, out, wanted)]
    text = "\n".join(f"wrote {path}" for path in files)
    links = [row for sweep in report.sweeps for row in as_rows(sweep.operations)]
    body = document(
        0, rows=rows(loaded), links=links, results=str(loaded.folder), files=files, problems=loaded.problems
    )
    return Answer(table=tables(report), text=text, document=body)


def compare_command(base: str, new: str) -> Answer:
    """Whether NEW is faster or slower than BASE, case by case.

    The exit code is 3 where anything got worse, 1 where no case can be compared.
    """
    from raybench.analysis.compare import CONFIDENCE, MINIMUM_EFFECT, compare, load_side
    from raybench.report.comparison import comparison_rows, comparison_table, conclusion

    found = compare(load_side(base), load_side(new))
    nothing = all(row.verdict == "not comparable" for row in found)
    code = 3 if any(row.is_regression for row in found) else 1 if nothing else 0
    body = document(
        code,
        rows=comparison_rows(found),
        errors=["no case can be compared"] if code == 1 else [],
        base=base,
        new=new,
        confidence=CONFIDENCE,
        minimum_effect=MINIMUM_EFFECT,
    )
    return Answer(exit_code=code, table=comparison_table(found), text=conclusion(found), document=body)


def schedule_command(
    name: str, *, stages: int, micro_batches: int, chunks: int | None, times: str | None, png: Path | None
) -> Answer:
    """One pipeline schedule, checked and simulated."""
    from raybench.parallel.pipeline.show import as_text, describe, parse_times, picture

    given = None if times is None else parse_times(times)
    body = describe(name, stages, micro_batches, chunks, given)
    text = as_text(body)
    if png is not None:
        picture(png, name, stages, micro_batches, chunks, given)
        body, text = {**body, "png": str(png)}, f"{text}\n\nwrote {png}"
    return Answer(text=text, document=document(0, **body))


def doctor_command(arguments: Sequence[str], out: Path | None = None) -> Answer:
    """What files of topology, NCCL logs and watchdog reports say, several as one story; without files, the cluster.

    A file that says nothing that is known ends with exit code 1; what the others say is told all the same.
    """
    if not arguments:
        from raybench.doctor.live.command import live_command

        return live_command(out)
    if out is not None:
        raise RequestError(f"-o: {str(out)!r} would be the environment for a cluster; leave the files away")
    from raybench.doctor.read import read_file, story
    from raybench.doctor.render import render

    if len(arguments) % 2:
        kinds = "|".join(DOCTOR_KINDS)
        raise RequestError(f"doctor: give pairs of {kinds} and FILE, such as: raybench doctor nccl job.log")
    pairs = list(zip(arguments[::2], map(Path, arguments[1::2]), strict=True))
    for kind, _ in pairs:
        if kind not in DOCTOR_KINDS:
            raise unknown("doctor", kind, DOCTOR_KINDS)
    read = [(kind, path, read_file(kind, path)) for kind, path in pairs]  # type: ignore[arg-type]
    found = read[0][2] if len(read) == 1 else story(read)
    unread = any(item["code"] == "not-recognised" for item in found["findings"])
    code = 1 if unread else 0
    return Answer(exit_code=code, text=render(found).rstrip(), document=document(code, **found))
