"""Waiting for other ranks on the job's store: without a collective, whose time-out long work of one rank could meet."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

from torch._C._distributed_c10d import Store

from raybench.worker.communication import Axis
from raybench.worker.recorder import Marks


class Rendezvous:
    """Meetings and announcements by name. Every rank that takes part uses the same names in the same order."""

    def __init__(self, store: Store, marks: Marks, timeout_s: float) -> None:
        self._store = store
        self._marks = marks
        self._timeout = timedelta(seconds=timeout_s)
        self._counts: dict[str, int] = defaultdict(int)
        """Meetings so far, by name and ranks: cases of different sizes meet different ranks."""

    def meet(self, axis: Axis, name: str) -> None:
        """Return once every rank of `axis` has come."""
        if axis.size == 1:
            return
        name_and_ranks = f"{name}/{','.join(map(str, axis.ranks))}"
        self._counts[name_and_ranks] += 1
        key = f"meet/{name_and_ranks}/{self._counts[name_and_ranks]}"
        self._marks.mark(f"waiting for {name}")
        if self._store.add(key, 1) == axis.size:
            self._store.set(f"{key}/all", "1")
        self._store.wait([f"{key}/all"], self._timeout)

    def exchange(self, axis: Axis, name: str, text: str, timeout_s: float | None) -> list[str]:
        """Every rank's `text`, in order along the axis; a name serves once. No `timeout_s`: as long as meetings.

        Raises:
            DistStoreError: some rank has said nothing within `timeout_s`.
        """
        self._marks.mark(f"waiting for {name}")
        keys = [f"exchange/{name}/{','.join(map(str, axis.ranks))}/{rank}" for rank in axis.ranks]
        self._store.set(keys[axis.index], text)
        self._store.wait(keys, self._timeout if timeout_s is None else timedelta(seconds=timeout_s))
        return [str(self._store.get(key).decode()) for key in keys]

    def announce(self, name: str, text: str) -> None:
        """Tell `text` to all who `listen` for `name`, now or later."""
        self._store.set(f"say/{name}", text)

    def listen(self, name: str) -> str:
        """What is announced under `name`, once it is."""
        self._marks.mark(f"waiting to hear {name}")
        self._store.wait([f"say/{name}"], self._timeout)
        return str(self._store.get(f"say/{name}").decode())
