"""The node provider: Ray's interface on one side, OCI instances of one compartment on the other.

What makes it safe to interrupt at any point: an instance carries its cluster's name from the moment it exists, so
whatever a lost answer left behind is listed, and goes with `ray down`; a launch carries a retry token, so asking again
never makes a second one; and nothing without this cluster's name is ever changed.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import oci
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME, TAG_RAY_LAUNCH_CONFIG, TAG_RAY_NODE_KIND

from raybench.errors import RequestError
from raybench.oci import config, launch, placement
from raybench.oci.errors import NotFoundError, OCIError, OutOfCapacityError, UnansweredError
from raybench.oci.session import Session

logger = logging.getLogger(__name__)
GONE = ("TERMINATING", "TERMINATED")  # a stopped instance is not gone: it costs, and `ray down` must end it
UNLISTED_S = 600.0  # how long a launched instance is asked for by name while lists do not show it yet
PARALLEL = 8


class OCINodeProvider(NodeProvider):  # type: ignore[misc]
    """Nodes are the instances of `provider.compartment_id` whose free-form tag `ray-cluster-name` is this cluster's."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str, session: Session | None = None) -> None:
        super().__init__(provider_config, cluster_name)
        self.config = config.parse(provider_config)
        self.session = session or Session(self.config)
        self._lock = threading.RLock()
        self._nodes: dict[str, Any] = {}  # the instances of the latest look, by OCID
        self._unlisted: dict[str, float] = {}  # launched here, not yet in a list: when
        self._ended: set[str] = set()  # terminated here, whatever a late list still says
        self._addresses: dict[str, tuple[str, str | None]] = {}
        self._tagging: dict[str, threading.Lock] = {}

    # What is there

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        nodes = self._look()
        return [node_id for node_id, node in nodes.items() if tag_filters.items() <= (node.freeform_tags or {}).items()]

    def _look(self) -> dict[str, Any]:
        """All of this cluster's instances that are not gone, freshly listed."""
        compartment = self.config.compartment_id
        doing = f"listing the instances of {compartment}"
        listed = self.session.all(doing, self.session.compute.list_instances, compartment, limit=100)
        found = {node.id: node for node in listed if self._is_ours(node)}
        with self._lock:
            for node_id in found:
                self._unlisted.pop(node_id, None)
            late = {key: when for key, when in self._unlisted.items() if time.monotonic() - when < UNLISTED_S}
            self._unlisted = late
        for node_id in late:
            node = self._get(node_id)
            if node is not None:
                found[node_id] = node
        with self._lock:
            gone = {key for key, node in found.items() if node.lifecycle_state in GONE} | self._ended
            self._nodes = {key: node for key, node in found.items() if key not in gone}
            return dict(self._nodes)

    def _is_ours(self, node: Any) -> bool:
        return bool((node.freeform_tags or {}).get(TAG_RAY_CLUSTER_NAME) == self.cluster_name)

    def _get(self, node_id: str) -> Any:
        """The instance now, or None if there is none of that OCID in this cluster."""
        response = self._get_response(node_id)
        return response.data if response else None

    def _get_response(self, node_id: str) -> Any:
        try:
            response = self.session.call(f"looking at {node_id}", self.session.compute.get_instance, node_id)
        except NotFoundError:
            return None
        if not self._is_ours(response.data):
            return None
        with self._lock:
            if response.data.lifecycle_state in GONE or node_id in self._ended:
                self._nodes.pop(node_id, None)
            else:
                self._nodes[node_id] = response.data
        return response

    def is_running(self, node_id: str) -> bool:
        node = self._nodes.get(node_id)
        if node is None or node.lifecycle_state != "RUNNING":
            node = self._get(node_id)
        return node is not None and node.lifecycle_state == "RUNNING" and node_id not in self._ended

    def is_terminated(self, node_id: str) -> bool:
        node = self._get(node_id)
        return node is None or node.lifecycle_state in GONE or node_id in self._ended

    def node_tags(self, node_id: str) -> dict[str, str]:
        node = self._nodes.get(node_id) or self._get(node_id)
        return dict(node.freeform_tags or {}) if node is not None else {}

    def internal_ip(self, node_id: str) -> str | None:
        addresses = self._find_addresses(node_id)
        return addresses[0] if addresses else None

    def external_ip(self, node_id: str) -> str | None:
        """The public address, or the private one where the subnet has no public ones (behind a VPN, say)."""
        addresses = self._find_addresses(node_id)
        return addresses[1] or addresses[0] if addresses else None

    def _find_addresses(self, node_id: str) -> tuple[str, str | None] | None:
        """Private and public address of the primary interface; None while there is none."""
        with self._lock:
            if node_id in self._addresses:
                return self._addresses[node_id]
        compute, compartment = self.session.compute, self.config.compartment_id
        doing = f"looking up the addresses of {node_id}"
        try:
            attachments = self.session.all(doing, compute.list_vnic_attachments, compartment, instance_id=node_id)
            for attachment in attachments:
                if attachment.lifecycle_state != "ATTACHED" or not attachment.vnic_id:
                    continue
                vnic = self.session.call(doing, self.session.network.get_vnic, attachment.vnic_id).data
                if vnic.is_primary and vnic.private_ip:
                    with self._lock:
                        return self._addresses.setdefault(node_id, (vnic.private_ip, vnic.public_ip))
        except NotFoundError:
            return None
        return None

    # Tags

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Read, merge, write if nobody wrote meanwhile: the head's autoscaler and `ray up` both do this."""
        with self._lock:
            lock = self._tagging.setdefault(node_id, threading.Lock())
        with lock:
            for _ in range(10):
                response = self._get_response(node_id)
                if response is None or response.data.lifecycle_state in GONE:
                    logger.warning("%s is gone, so it cannot be tagged", node_id)
                    return
                merged = launch.tags(response.data.freeform_tags, tags)
                if merged == response.data.freeform_tags:
                    return
                details = oci.core.models.UpdateInstanceDetails(freeform_tags=merged)
                try:
                    updated = self.session.call(
                        f"tagging {node_id}",
                        self.session.compute.update_instance,
                        node_id,
                        details,
                        if_match=response.headers.get("etag"),
                    ).data
                except OCIError as error:
                    if "412" not in error.description:
                        raise
                    continue
                with self._lock:
                    if node_id in self._nodes:
                        self._nodes[node_id] = updated
                return
            raise OCIError("Conflict", f"tagging {node_id}: somebody else kept changing it")

    # Launch

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch `count` instances; on failure those already launched stay, tagged, and are listed."""
        try:
            details = launch.build(copy.deepcopy(node_config), self.config.subnet_id)
            rays = {**tags, TAG_RAY_CLUSTER_NAME: self.cluster_name}
            details.freeform_tags = launch.tags(details.freeform_tags, rays)
        except RequestError as error:
            raise OCIError("Config", str(error)) from None
        details.compartment_id = details.compartment_id or self.config.compartment_id
        if details.compartment_id != self.config.compartment_id:
            text = "node_config.compartment_id: nodes are looked for in provider.compartment_id only; leave it out"
            raise OCIError("Config", text)
        with self._lock:
            siblings = list(self._nodes.values())
        placement.set_image(self.session, details, [node for node in siblings if _same_type(node, tags)])
        domains = placement.domains(self.session, self.config, details, siblings)
        created: dict[str, Any] = {}
        for _ in range(count):
            try:
                node = self._launch_one(details, domains, tags.get(TAG_RAY_NODE_KIND, "node"))
            except OCIError as error:
                done = f" ({len(created)} of {count} were launched)" if created else ""
                raise OCIError(error.category, error.description + done, error.src_exc_info) from error
            created[node.id] = {"availability_domain": node.availability_domain, "display_name": node.display_name}
        return created

    def _launch_one(self, details: Any, domains: list[str], kind: str) -> Any:
        """One instance in the first domain that has room for it."""
        label = uuid.uuid4().hex
        details.display_name = f"ray-{self.cluster_name}-{kind}-{label[:8]}"[:255]
        for number, domain in enumerate(domains):
            details.availability_domain = domain
            doing = f"launching {details.shape} in {domain}"
            try:
                # The token makes a repeated request return the first one's instance; a new domain is a new request.
                launch_instance = self.session.compute.launch_instance
                node = self.session.call(doing, launch_instance, details, opc_retry_token=f"{label}-{number}").data
            except OutOfCapacityError:
                logger.warning("no %s free in %s", details.shape, domain)
                continue
            except UnansweredError:
                node = self._find_launched(details.display_name)
                if node is None:
                    raise
            except NotFoundError as error:
                raise placement.diagnose(self.session, self.config, details, error) from error
            with self._lock:
                self._nodes[node.id] = node
                self._unlisted[node.id] = time.monotonic()
            return node
        text = (
            f"no {details.shape} is free in {', '.join(domains)}. Try again later, another region or shape, or a "
            "capacity reservation (node_config.capacity_reservation_id)."
        )
        raise OCIError("OutOfCapacity", text)

    def _find_launched(self, display_name: str) -> Any:
        """What a launch without an answer made after all: names are unique."""
        compute, compartment = self.session.compute, self.config.compartment_id
        found = self.session.all("looking for it", compute.list_instances, compartment, display_name=display_name)
        alive = [node for node in found if self._is_ours(node) and node.lifecycle_state not in GONE]
        return alive[0] if alive else None

    # End

    def terminate_node(self, node_id: str) -> dict[str, Any]:
        """End an instance of this cluster with all volumes it was launched with; once is as good as twice."""
        if self._get(node_id) is None:
            logger.warning("%s is no instance of cluster %s, so it is left alone", node_id, self.cluster_name)
            return {}
        try:
            self.session.call(
                f"terminating {node_id}",
                self.session.compute.terminate_instance,
                node_id,
                preserve_boot_volume=False,
                preserve_data_volumes_created_at_launch=False,
            )
        except NotFoundError as error:
            if not self.is_terminated(node_id):  # OCI says "not found" for "not allowed" too
                text = f"{error.description} The instance is still there: no policy lets you terminate it."
                raise OCIError("NotAllowed", text) from error
        with self._lock:
            self._ended.add(node_id)
            self._nodes.pop(node_id, None)
            self._unlisted.pop(node_id, None)
            self._addresses.pop(node_id, None)
        return {node_id: {}}

    def terminate_nodes(self, node_ids: list[str]) -> dict[str, Any]:
        """All of them, side by side; the first failure is raised after every one was tried."""
        ended: dict[str, Any] = {}
        failure: OCIError | None = None
        with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
            for future in [pool.submit(self.terminate_node, node_id) for node_id in node_ids]:
                try:
                    ended.update(future.result())
                except OCIError as error:
                    failure = failure or error
        if failure:
            raise failure
        return ended

    # Hooks of `ray up`

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return config.bootstrap(cluster_config)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        return config.for_head(cluster_config)


def _same_type(node: Any, tags: dict[str, str]) -> bool:
    """Launched from the very same node configuration."""
    wanted = tags.get(TAG_RAY_LAUNCH_CONFIG)
    return bool(wanted) and (node.freeform_tags or {}).get(TAG_RAY_LAUNCH_CONFIG) == wanted
