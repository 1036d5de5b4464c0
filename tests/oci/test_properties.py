"""Two clusters in one compartment, whatever happens: nothing leaked, nothing doubled, nobody sees the other's nodes."""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from raybench.oci.errors import OCIError
from raybench.oci.session import Session
from tests.oci.conftest import NODE_CONFIG, WORKER, Cloud
from tests.testbed.cloud import ApiError, FakeCloud

CLUSTERS = ("bench", "bench-2")  # one name begins the other
ERRORS = [
    ApiError(429, "TooManyRequests", "slow down"),
    ApiError(500, "InternalError", "internal"),
    ApiError(500, "InternalError", "Out of host capacity."),
    ApiError(503, "ServiceUnavailable", "later"),
    ApiError(409, "Conflict", "being modified"),
    ApiError(401, "NotAuthenticated", "who"),
    ApiError(404, "NotAuthorizedOrNotFound", "no"),
    ApiError(0, "", "", drop=True),
]
OPERATIONS = ["launch", "list", "get", "update", "terminate", "attachments", "vnic", "images", "domains"]
clusters = st.sampled_from(CLUSTERS)


@functools.cache
def _server() -> tuple[Cloud, Session]:
    """One server and one set of clients for all examples, each with a cloud of its own: these take long to make."""
    logging.getLogger("raybench.oci").setLevel(logging.ERROR)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    oci = Cloud(Path(folder.name))
    return oci, oci.session()


class TwoClusters(RuleBasedStateMachine):
    """Random calls of Ray's, errors of OCI's and restarts of the head."""

    @initialize(lag=st.integers(0, 2), page=st.sampled_from([1, 2, 100]))
    def begin(self, lag: int, page: int) -> None:
        self.oci, self.session = _server()
        self.cloud = self.oci.cloud = self.oci.api.cloud = FakeCloud(page_size=page, list_lag=lag)
        self.providers = {name: self.oci.provider(name, self.session) for name in CLUSTERS}

    def owned(self, name: str) -> dict[str, Any]:
        """What the cloud holds of a cluster, and how it is."""
        every = self.cloud.instances.values()
        mine = [instance for instance in every if instance.tags.get("ray-cluster-name") == name]
        return {instance.id: (instance.state in ("TERMINATING", "TERMINATED"), instance.tags) for instance in mine}

    def alive(self, name: str) -> int:
        return sum(not gone for gone, _ in self.owned(name).values())

    def untouched(self, name: str, before: dict[str, Any]) -> None:
        """The other cluster is as it was."""
        (other,) = set(CLUSTERS) - {name}
        assert self.owned(other) == before

    def snapshot(self, name: str) -> dict[str, Any]:
        (other,) = set(CLUSTERS) - {name}
        return copy.deepcopy(self.owned(other))

    @rule(name=clusters, count=st.integers(1, 3))
    def create(self, name: str, count: int) -> None:
        others, before = self.snapshot(name), self.alive(name)
        try:
            created = self.providers[name].create_node(copy.deepcopy(NODE_CONFIG), WORKER, count)
        except OCIError:
            assert before <= self.alive(name) <= before + count
        else:
            assert len(created) == count == self.alive(name) - before
        self.untouched(name, others)

    @rule(name=clusters, number=st.integers(0, 20), value=st.text("abc", max_size=3))
    def tag(self, name: str, number: int, value: str) -> None:
        others, nodes = self.snapshot(name), sorted(self.cloud.instances)
        if nodes:
            node = nodes[number % len(nodes)]
            try:
                self.providers[name].set_node_tags(node, {"ray-node-status": value})
            except OCIError:
                pass
            else:
                gone, tags = self.owned(name).get(node, (True, {}))
                assert gone or tags["ray-node-status"] == value
        self.untouched(name, others)

    @rule(name=clusters)
    def look(self, name: str) -> None:
        try:
            nodes = self.providers[name].non_terminated_nodes({})
            addresses = [self.providers[name].internal_ip(node) for node in nodes]
        except OCIError:
            return
        assert len(set(nodes)) == len(nodes)
        assert set(nodes) <= self.owned(name).keys()
        known = [address for address in addresses if address]
        assert len(set(known)) == len(known)

    @rule(name=clusters, numbers=st.lists(st.integers(0, 20), max_size=3, unique=True))
    def terminate(self, name: str, numbers: list[int]) -> None:
        others, every = self.snapshot(name), sorted(self.cloud.instances)
        nodes = sorted({every[number % len(every)] for number in numbers}) if every else []
        try:
            self.providers[name].terminate_nodes(nodes)
        except OCIError:
            pass
        else:
            assert all(self.owned(name)[node][0] for node in nodes if node in self.owned(name))
        self.untouched(name, others)

    @rule(name=clusters)
    def restart(self, name: str) -> None:
        self.providers[name] = self.oci.provider(name, self.session)

    @rule(
        operation=st.sampled_from(OPERATIONS),
        error=st.sampled_from(ERRORS),
        times=st.integers(1, 6),
        after=st.booleans(),
    )
    def fail(self, operation: str, error: ApiError, times: int, after: bool) -> None:
        if operation == "get" and error.status == 404:
            return  # the only word that there is on whether an instance exists
        definite = 400 <= error.status < 500 or "capacity" in error.message  # never said of what was done
        self.cloud.fail(operation, error, times=times, after=after and not definite)

    @rule(domain=st.integers(0, 2), room=st.integers(0, 2))
    def limit(self, domain: int, room: int) -> None:
        self.cloud.capacity[(self.cloud.domains[domain], NODE_CONFIG["shape"])] = room

    @invariant()
    def everything_belongs_to_a_cluster(self) -> None:
        if hasattr(self, "cloud"):
            assert {instance.tags["ray-cluster-name"] for instance in self.cloud.alive()} <= set(CLUSTERS)
            assert len(self.cloud.boot_volumes) == len(self.cloud.alive())

    def teardown(self) -> None:
        """`ray down` of both, once OCI works again: nothing is left."""
        if not hasattr(self, "cloud"):
            return
        self.cloud.faults.clear()
        for name in CLUSTERS:
            provider = self.oci.provider(name, self.session)
            for _ in range(self.cloud.list_lag + 2):
                provider.terminate_nodes(provider.non_terminated_nodes({}))
            assert provider.non_terminated_nodes({}) == []
            assert self.alive(name) == 0
        assert not self.cloud.alive()
        assert not self.cloud.boot_volumes


def _settings(examples: int, steps: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    phases = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes many minutes; the steps are printed whole
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=slow, phases=phases
    )


def test_two_clusters() -> None:
    run_state_machine_as_test(TwoClusters, settings=_settings(20, 20))


@pytest.mark.slow
def test_two_clusters_for_long() -> None:
    run_state_machine_as_test(TwoClusters, settings=_settings(150, 40))
