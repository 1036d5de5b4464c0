"""Models and text that come from elsewhere, looked for before anything starts."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from raybench.errors import RequestError
from raybench.suite.track import ResolvedTrack


def with_sources(track: ResolvedTrack) -> ResolvedTrack:
    """The track with its model's sizes and the origin of its weights read from where the model comes from.

    Raises:
        UnreachableError: a model or data set on a hub that cannot be reached.
        RequestError: a model, a tokenizer or a data set that is not what it must be.
    """
    work = track.workload
    if work.model.source is not None or work.model.family is not None:
        from raybench.models.sources import resolve

        work = work.model_copy(update={"model": resolve(work.model)})
    if work.data.name != "synthetic":
        from raybench.data.corpus import check

        check(work)
    if work is track.workload:
        return track
    try:
        return ResolvedTrack.model_validate(track.model_copy(update={"workload": work}).model_dump())
    except ValidationError as error:
        raise RequestError(f"{track.track}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def prepare_text(track: ResolvedTrack, note: Callable[[str], None]) -> None:
    """Have the track's text in this machine's cache, tokenised; says so where that takes its time.

    Raises:
        RequestError: text that cannot be used, in one sentence.
    """
    if track.workload.data.name != "synthetic":
        from raybench.data.corpus import is_prepared, prepare

        if not is_prepared(track.workload):
            note(f"{track.track}: tokenising {track.workload.data.described}")
        prepare(track.workload)
