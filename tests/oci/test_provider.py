"""The node provider against the fake API: what Ray asks of it, one thing a test."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import click
import pytest
from ray.autoscaler.node_launch_exception import NodeLaunchException

from raybench.oci.errors import OCIError
from tests.oci.conftest import HEAD, NODE_CONFIG, WORKER, Cloud
from tests.testbed.cloud import ApiError


def launch(provider: Any, tags: dict[str, str] = WORKER, count: int = 1, **changes: Any) -> list[str]:
    return list(provider.create_node({**copy.deepcopy(NODE_CONFIG), **changes}, tags, count))


def test_a_node_is_launched_listed_addressed_tagged_and_terminated(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    (node,) = launch(provider, HEAD)
    assert provider.non_terminated_nodes({"ray-node-type": "head"}) == [node]
    assert provider.non_terminated_nodes({"ray-node-type": "worker"}) == []
    assert provider.is_running(node)
    assert not provider.is_terminated(node)
    assert provider.internal_ip(node) == oci_cloud.cloud.instances[node].private_ip
    assert provider.external_ip(node) == oci_cloud.cloud.instances[node].public_ip
    provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    assert provider.node_tags(node)["ray-node-status"] == "up-to-date"
    assert oci_cloud.provider().node_tags(node)["ray-cluster-name"] == "test"
    provider.terminate_node(node)
    assert provider.non_terminated_nodes({}) == []
    assert provider.is_terminated(node)
    assert not oci_cloud.cloud.alive()
    assert not oci_cloud.cloud.boot_volumes


def test_addresses_are_none_until_there_are_any(oci_cloud: Cloud) -> None:
    class Slow:
        def boot(self, instance: Any) -> None: ...

        def shut(self, instance: Any) -> None: ...

    oci_cloud.cloud.backend = Slow()
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    assert provider.internal_ip(node) is None
    assert provider.external_ip(node) is None
    oci_cloud.cloud.instances[node].private_ip = "10.0.0.9"
    assert provider.internal_ip(node) == "10.0.0.9"
    assert provider.external_ip(node) == "10.0.0.9"  # a private subnet


def test_newest_gpu_image_of_the_system_is_taken(oci_cloud: Cloud) -> None:
    (node,) = launch(oci_cloud.provider())
    image = oci_cloud.cloud.instances[node].details["sourceDetails"]["imageId"]
    assert image == "ocid1.image.oc1.iad.oracle-linux-8.10-gen2-gpu-2025.07.21-0"
    assert oci_cloud.cloud.instances[node].details["sourceDetails"]["bootVolumeSizeInGBs"] == 200


def test_workers_get_the_image_of_their_siblings(oci_cloud: Cloud) -> None:
    tags = {**WORKER, "ray-launch-config": "same"}
    provider = oci_cloud.provider()
    (first,) = launch(provider, tags)
    newer = copy.deepcopy(next(iter(oci_cloud.cloud.images.values())))
    newer |= {"id": "ocid1.image.oc1.iad.newer", "timeCreated": "2027-01-01T00:00:00Z"}
    oci_cloud.cloud.images[newer["id"]] = newer
    provider.non_terminated_nodes({})
    (second,) = launch(provider, tags)
    (other,) = launch(provider, {**WORKER, "ray-launch-config": "other"})
    images = {
        node: oci_cloud.cloud.instances[node].details["sourceDetails"]["imageId"] for node in (first, second, other)
    }
    assert images[first] == images[second] != images[other] == newer["id"]


def test_a_fixed_image_is_not_looked_up(oci_cloud: Cloud) -> None:
    image = "ocid1.image.oc1.iad.canonical-ubuntu-22.04-2025.07.23-0"
    (node,) = launch(oci_cloud.provider(), source_details={"source_type": "image", "image_id": image})
    assert oci_cloud.cloud.instances[node].details["sourceDetails"]["imageId"] == image
    assert oci_cloud.cloud.calls("images") == 0


def test_a_full_domain_leads_to_the_next(oci_cloud: Cloud) -> None:
    first, second, _ = oci_cloud.cloud.domains
    oci_cloud.cloud.capacity[(first, "VM.GPU.A10.2")] = 1
    provider = oci_cloud.provider()
    nodes = launch(provider, count=3)
    where = [oci_cloud.cloud.instances[node].details["availabilityDomain"] for node in nodes]
    assert where == [first, second, second]


def test_nodes_gather_in_the_domain_of_their_cluster(oci_cloud: Cloud) -> None:
    second = oci_cloud.cloud.domains[1]
    provider = oci_cloud.provider()
    launch(provider, availability_domain=second)
    provider.non_terminated_nodes({})
    (node,) = launch(provider)
    assert oci_cloud.cloud.instances[node].details["availabilityDomain"] == second


def test_no_room_anywhere_is_one_message_and_leaves_nothing(oci_cloud: Cloud) -> None:
    for domain in oci_cloud.cloud.domains:
        oci_cloud.cloud.capacity[(domain, "VM.GPU.A10.2")] = 0
    with pytest.raises(NodeLaunchException) as raised:
        launch(oci_cloud.provider())
    assert raised.value.category == "OutOfCapacity"
    assert "no VM.GPU.A10.2 is free in Uocm:US-ASHBURN-AD-1" in str(raised.value)
    assert "another region or shape" in str(raised.value)
    assert isinstance(raised.value, click.ClickException)
    assert raised.value.format_message() == str(raised.value)
    assert not oci_cloud.cloud.instances
    assert oci_cloud.slept == []  # lack of capacity is an answer, not a failure to retry


@pytest.mark.parametrize("status", [429, 500, 503, 409])
def test_passing_errors_are_tried_again_and_launch_once(oci_cloud: Cloud, status: int) -> None:
    oci_cloud.cloud.fail("launch", ApiError(status, "Passing", "passing"), times=2)
    assert len(launch(oci_cloud.provider())) == 1
    assert len(oci_cloud.cloud.instances) == 1
    assert len(oci_cloud.slept) == 2
    assert 0.75 <= oci_cloud.slept[0] <= 1.25 <= 1.5 <= oci_cloud.slept[1] <= 2.5


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "x"), ApiError(0, "", "", drop=True)])
def test_a_lost_answer_does_not_launch_twice(oci_cloud: Cloud, error: ApiError) -> None:
    oci_cloud.cloud.fail("launch", error, times=2, after=True)
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    assert list(oci_cloud.cloud.instances) == [node]


def test_a_launch_that_is_never_answered_is_found_by_its_name(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.fail("launch", ApiError(503, "ServiceUnavailable", "x"), times=99, after=True)
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    assert provider.non_terminated_nodes({}) == [node]
    assert len(oci_cloud.cloud.instances) == 1
    assert oci_cloud.cloud.calls("launch") == 4


def test_retries_end(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.fail("list", ApiError(500, "InternalError", "x"), times=99)
    with pytest.raises(OCIError, match="did not take the request after all retries; try again later"):
        oci_cloud.provider().non_terminated_nodes({})
    assert oci_cloud.cloud.calls("list") == 4


def test_a_new_instance_is_there_before_lists_show_it(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.list_lag = 3
    provider = oci_cloud.provider()
    (node,) = launch(provider, HEAD)
    for _ in range(5):
        assert provider.non_terminated_nodes({"ray-node-type": "head"}) == [node]


def test_lists_are_read_to_the_last_page(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.page_size = 2
    provider = oci_cloud.provider()
    nodes = launch(provider, count=5)
    assert sorted(oci_cloud.provider().non_terminated_nodes({})) == sorted(nodes)


def test_tags_written_at_the_same_time_are_both_kept(oci_cloud: Cloud) -> None:
    provider, other = oci_cloud.provider(), oci_cloud.provider()
    (node,) = launch(provider)
    provider.non_terminated_nodes({})
    update = provider.session.compute.update_instance

    def late(*args: Any, **kwargs: Any) -> Any:
        provider.session.compute.update_instance = update
        other.set_node_tags(node, {"ray-file-mounts-contents": "b"})
        return update(*args, **kwargs)

    provider.session.compute.update_instance = late
    provider.set_node_tags(node, {"ray-runtime-config": "a"})
    tags = oci_cloud.cloud.instances[node].tags
    assert (tags["ray-runtime-config"], tags["ray-file-mounts-contents"]) == ("a", "b")


def test_tagging_waits_for_a_booting_instance(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    oci_cloud.cloud.fail("update", ApiError(409, "Conflict", "being modified"), times=3)
    provider.set_node_tags(node, {"ray-node-status": "waiting-for-ssh"})
    assert oci_cloud.cloud.instances[node].tags["ray-node-status"] == "waiting-for-ssh"


def test_tagging_what_is_gone_is_no_error(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    provider.terminate_node(node)
    provider.set_node_tags(node, {"ray-node-status": "x"})
    provider.set_node_tags("ocid1.instance.oc1.iad.never", {"ray-node-status": "x"})


def test_nothing_of_another_cluster_is_seen_or_touched(oci_cloud: Cloud) -> None:
    ours, theirs = oci_cloud.provider("one"), oci_cloud.provider("two")
    (foreign,) = launch(theirs)
    assert ours.non_terminated_nodes({}) == []
    ours.set_node_tags(foreign, {"ray-node-status": "mine"})
    ours.terminate_nodes([foreign])
    assert ours.node_tags(foreign) == {}
    assert not ours.is_running(foreign)
    assert oci_cloud.cloud.instances[foreign].state == "RUNNING"
    assert "ray-node-status" not in oci_cloud.cloud.instances[foreign].tags
    assert oci_cloud.cloud.calls("terminate") == 0


def test_a_stopped_instance_still_goes_with_ray_down(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    oci_cloud.cloud.instances[node].state = "STOPPED"
    assert provider.non_terminated_nodes({}) == [node]
    assert not provider.is_running(node)
    provider.terminate_nodes([node])
    assert not oci_cloud.cloud.boot_volumes


def test_every_node_is_tried_when_one_cannot_be_terminated(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    nodes = launch(provider, count=3)
    oci_cloud.cloud.fail("terminate", ApiError(403, "NotAllowed", "no"), times=1)
    with pytest.raises(OCIError):
        provider.terminate_nodes(nodes)
    assert len(oci_cloud.cloud.alive()) == 1
    provider.terminate_nodes(provider.non_terminated_nodes({}))
    assert not oci_cloud.cloud.alive()


def test_a_termination_that_is_not_allowed_is_said(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    (node,) = launch(provider)
    oci_cloud.cloud.fail("terminate", ApiError(404, "NotAuthorizedOrNotFound", "Authorization failed"))
    with pytest.raises(OCIError, match="no policy lets you terminate it"):
        provider.terminate_node(node)
    assert provider.non_terminated_nodes({}) == [node]
    provider.terminate_node(node)
    assert provider.non_terminated_nodes({}) == []


def test_too_few_is_said_and_what_was_launched_is_listed(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.limits["VM.GPU.A10.2"] = 2
    provider = oci_cloud.provider()
    with pytest.raises(NodeLaunchException, match=r"2 of 3 were launched") as raised:
        launch(provider, count=3)
    assert raised.value.category == "QuotaExceeded"
    assert len(provider.non_terminated_nodes({})) == 2


def test_errors_survive_pickling(oci_cloud: Cloud) -> None:
    error = pickle.loads(pickle.dumps(OCIError("QuotaExceeded", "words")))
    assert (error.category, str(error)) == ("QuotaExceeded", "words")
