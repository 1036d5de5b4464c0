"""`raybench comm`: check what is asked, find the cluster, sweep, and show what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.comm.driver import Outcome, Sweep, SweepRun
from raybench.comm.plan import notes, plan
from raybench.comm.request import CommRequest, read, record
from raybench.errors import RequestError
from raybench.results.sweep_writer import SweepWriter
from raybench.suite.answer import Answer, document
from raybench.suite.cluster import Cluster
from raybench.suite.commands import check_file_writable, check_writable, where_rows_are
from raybench.suite.job_run import Patience
from raybench.suite.request import LauncherName, new_suite_id


def comm_command(request: CommRequest) -> Answer:
    """Sweep, and answer with the table, the fit and where the rows are.

    Raises:
        RequestError: the request is wrong, or does not fit the cluster.
    """
    asked = read(request)
    check_writable(request.results)
    if request.png is not None:
        check_file_writable("--png", request.png)
    from raybench.suite.progress import for_stream
    from raybench.suite.session import connected_by

    suite_id = new_suite_id()
    with connected_by(request.launcher) as cluster:
        sweep = plan(request, asked, cluster, suite_id)
        writer = SweepWriter(request.results, suite_id, record(request, asked))
        with for_stream() as progress:
            for note in notes(request, sweep, cluster):
                progress.note(note)
            outcome = _run(sweep, writer, request.launcher, cluster, progress)
    return answer(request, sweep, outcome)


def _run(sweep: Sweep, writer: SweepWriter, launcher: LauncherName, cluster: Cluster, progress: Any) -> Outcome:
    from raybench.comm.driver import LOOP
    from raybench.suite.launch import launcher as launcher_by_name
    from raybench.suite.session import sink_host
    from raybench.suite.sink import Sink

    writer.check()
    host = sink_host(cluster)
    return SweepRun(
        sweep=sweep,
        store=writer,
        launcher=launcher_by_name(launcher, loop=LOOP),
        make_sink=lambda: Sink(host),
        progress=progress,
        patience=Patience(),
    ).run()


def answer(request: CommRequest, sweep: Sweep, outcome: Outcome) -> Answer:
    """The table and rows of the sweep, as they are in the store."""
    from raybench.analysis.links import links, sizes
    from raybench.comm.render import as_rows, legend, table
    from raybench.results.folder import open_folder
    from raybench.results.reader import load

    errors = [*outcome.errors, *(outcome.refused if request.operations is not None else [])]
    code = 130 if outcome.interrupted else 1 if errors or not outcome.num_measured else 0
    place, lines, told = str(open_folder(request.results)), [f"raybench: {error}" for error in errors], None
    body: dict[str, Any] = {"links": []}
    rows: Sequence[Mapping[str, Any]] = []
    try:
        loaded = load(request.results, sweep.suite_id, of="collectives")
    except RequestError as error:
        errors.append(str(error))
        lines.append(f"raybench: {error}")
        code = code or 1
    else:
        measured, fitted = sizes(loaded), links(loaded)
        told, rows, body["links"] = table(measured, fitted, by_size=request.by_size), as_rows(measured), as_rows(fitted)
        lines = [*legend(measured, by_size=request.by_size), *lines]
        if request.png is not None and measured.time_ns.notna().any():
            from raybench.comm.figure import draw

            try:
                draw(measured, fitted, request.png)
            except OSError as error:
                errors.append(f"--png: {request.png} cannot be written ({error.strerror or error})")
                lines.append(f"raybench: {errors[-1]}")
                code = code or 1
            else:
                body["png"] = str(request.png)
                lines.append(f"wrote {request.png}")
        lines.append(where_rows_are(place, sweep.suite_id))
    body |= {"suite_id": sweep.suite_id, "results": place, "budget_s": sweep.budget_s}
    return Answer(
        exit_code=code,
        table=told,
        text="\n".join(lines),
        document=document(code, rows=rows, errors=errors, skipped=outcome.refused, **body),
    )
