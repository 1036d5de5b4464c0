"""A compute cloud in memory with the manners of OCI's: what `ray up` meets, errors included.

Pure state: no sockets, no processes. `server.py` speaks HTTP for it; a `Backend` gives its instances bodies.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

COMPARTMENT = "ocid1.compartment.oc1..testbed"
SUBNET = "ocid1.subnet.oc1.iad.testbed"
TENANCY = "ocid1.tenancy.oc1..testbed"
USER = "ocid1.user.oc1..testbed"
REGION = "us-ashburn-1"
MAX_TAGS = 10
Json = dict[str, Any]
Strings = dict[str, str]


class ApiError(Exception):
    """An answer other than success; `drop` hangs up instead of answering."""

    def __init__(self, status: int, code: str, message: str, *, drop: bool = False) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message, self.drop = status, code, message, drop


def not_found() -> ApiError:
    """OCI never says which it was, nor what was looked for."""
    return ApiError(404, "NotAuthorizedOrNotFound", "Authorization failed or requested resource not found.")


class Backend(Protocol):
    """What stands behind the instances. Both calls return at once."""

    def boot(self, instance: Instance) -> None: ...

    def shut(self, instance: Instance) -> None: ...


@dataclass
class Instance:
    id: str
    number: int
    details: Json
    state: str = "PROVISIONING"
    tags: dict[str, str] = field(default_factory=dict)
    etag: int = 0
    private_ip: str | None = None
    public_ip: str | None = None
    hidden: int = 0  # list calls that will not show it yet
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def json(self) -> Json:
        keys = ("compartmentId", "availabilityDomain", "displayName", "shape", "metadata", "sourceDetails")
        kept = {key: self.details.get(key) for key in keys}
        image = (self.details.get("sourceDetails") or {}).get("imageId")
        more = {"region": "iad", "imageId": image, "timeCreated": self.created, "freeformTags": dict(self.tags)}
        return {"id": self.id, "lifecycleState": self.state, "faultDomain": "FAULT-DOMAIN-1", **kept, **more}


@dataclass
class Fault:
    operation: str
    error: ApiError
    times: int
    after: bool  # do it first, then fail: the answer was lost


def _image(name: str, system: str, version: str, created: str, shapes: list[str]) -> Json:
    identifier = f"ocid1.image.oc1.iad.{name.lower()}"
    return {
        "id": identifier,
        "displayName": name,
        "operatingSystem": system,
        "operatingSystemVersion": version,
        "timeCreated": created,
        "lifecycleState": "AVAILABLE",
        "compartmentId": None,
        "createImageAllowed": True,
        "shapes": shapes,
    }


SHAPES = ["VM.GPU.A10.1", "VM.GPU.A10.2", "BM.GPU.A10.4", "BM.GPU4.8", "BM.GPU.H100.8", "VM.Standard.E5.Flex"]
IMAGES = [
    _image("Oracle-Linux-8.9-Gen2-GPU-2024.05.29-0", "Oracle Linux", "8", "2024-06-01T00:00:00Z", SHAPES[:-1]),
    _image("Oracle-Linux-8.10-Gen2-GPU-2025.07.21-0", "Oracle Linux", "8", "2025-07-25T00:00:00Z", SHAPES[:-1]),
    _image("Oracle-Linux-8.10-2025.09.16-0", "Oracle Linux", "8", "2025-09-20T00:00:00Z", SHAPES),
    _image("Canonical-Ubuntu-22.04-2025.07.23-0", "Canonical Ubuntu", "22.04", "2025-07-24T00:00:00Z", SHAPES),
]


class FakeCloud:
    """One region of one tenancy."""

    def __init__(self, backend: Backend | None = None, *, page_size: int = 100, list_lag: int = 0) -> None:
        self.backend, self.page_size, self.list_lag = backend, page_size, list_lag
        self.lock = threading.RLock()
        self.domains = [f"Uocm:US-ASHBURN-AD-{n}" for n in (1, 2, 3)]
        self.compartments, self.subnets = {COMPARTMENT}, {SUBNET}
        self.images: dict[str, Json] = {image["id"]: image for image in IMAGES}
        self.limits: dict[str, int] = {}  # per shape; none is unlimited
        self.capacity: dict[tuple[str, str], int] = {}  # per domain and shape
        self.instances: dict[str, Instance] = {}
        self.boot_volumes: dict[str, str] = {}  # id: instance
        self.tokens: dict[str, tuple[str, Json]] = {}  # retry token: instance, body
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str | None]] = []  # operation, resource
        self._numbers = itertools.count(1)

    # What tests say and ask

    def fail(self, operation: str, error: ApiError, *, times: int = 1, after: bool = False) -> None:
        """Make the next `times` calls of `operation` fail."""
        self.faults.append(Fault(operation, error, times, after))

    def alive(self) -> list[Instance]:
        gone = ("TERMINATING", "TERMINATED")
        return [instance for instance in self.instances.values() if instance.state not in gone]

    def calls(self, operation: str) -> int:
        return sum(1 for name, _ in self.log if name == operation)

    # The API

    def call(self, operation: str, resource: str | None, query: Strings, headers: Strings, body: Json) -> Any:
        """One request; the result is JSON, a (JSON, headers) pair, or an ApiError."""
        with self.lock:
            self.log.append((operation, resource))
            fault = next((fault for fault in self.faults if fault.operation == operation and fault.times > 0), None)
            if fault:
                fault.times -= 1
                if fault.after:
                    self._do(operation, resource, query, headers, body)
                raise fault.error
            return self._do(operation, resource, query, headers, body)

    def _do(self, operation: str, resource: str | None, query: Strings, headers: Strings, body: Json) -> Any:
        handler = getattr(self, f"_{operation}")
        return handler(resource=resource, query=query, headers=headers, body=body)

    def _compartment(self, name: str | None) -> None:
        if name not in self.compartments and name != TENANCY:
            raise not_found()

    def _domains(self, query: Strings, **_: Any) -> list[Json]:
        self._compartment(query.get("compartmentId"))
        return [{"name": name, "id": f"ocid1.domain.{name}", "compartmentId": TENANCY} for name in self.domains]

    def _images(self, query: Strings, **_: Any) -> Any:
        self._compartment(query.get("compartmentId"))
        found = list(self.images.values())
        for key, name in (("operatingSystem",) * 2, ("operatingSystemVersion",) * 2):
            if name in query:
                found = [image for image in found if image[key] == query[name]]
        if "shape" in query:
            found = [image for image in found if query["shape"] in image["shapes"]]
        found.sort(key=lambda image: str(image["timeCreated"]), reverse=query.get("sortOrder", "DESC") == "DESC")
        return self._page(found, query)

    def _image(self, resource: str | None, **_: Any) -> Json:
        if resource not in self.images:
            raise not_found()
        return self.images[resource]

    def _subnet(self, resource: str | None, **_: Any) -> Json:
        if resource not in self.subnets:
            raise not_found()
        return {"id": resource, "compartmentId": COMPARTMENT, "cidrBlock": "10.77.0.0/24"}

    def _launch(self, headers: Strings, body: Json, **_: Any) -> Any:
        token = headers.get("opc-retry-token")
        if token in self.tokens:
            known, first = self.tokens[token]
            if first != body:
                raise ApiError(400, "InvalidParameter", "The retry token was used with other details.")
            if self.instances[known].state in ("TERMINATING", "TERMINATED"):
                raise ApiError(409, "InvalidatedRetryToken", "The retry token was invalidated by a later operation.")
            return self._answer(self.instances[known])
        self._check_launch(body)
        number = next(self._numbers)
        identifier = f"ocid1.instance.oc1.iad.{number:06d}"
        instance = Instance(identifier, number, body, tags=dict(body.get("freeformTags") or {}), hidden=self.list_lag)
        self.instances[identifier] = instance
        self.boot_volumes[f"ocid1.bootvolume.oc1.iad.{number:06d}"] = identifier
        if token:
            self.tokens[token] = (identifier, body)
        answer = self._answer(instance)
        if self.backend:
            self.backend.boot(instance)
        return answer

    def _check_launch(self, body: Json) -> None:
        self._compartment(body.get("compartmentId"))
        shape, domain = body.get("shape"), body.get("availabilityDomain")
        image = (body.get("sourceDetails") or {}).get("imageId")
        if (body.get("createVnicDetails") or {}).get("subnetId") not in self.subnets or image not in self.images:
            raise not_found()
        if domain not in self.domains:
            raise ApiError(400, "InvalidParameter", f"availabilityDomain {domain} is not valid.")
        if shape not in self.images[image]["shapes"]:
            raise ApiError(400, "InvalidParameter", f"Shape {shape} is not valid for image {image}.")
        self._check_tags(body.get("freeformTags") or {})
        used = [instance for instance in self.alive() if instance.details["shape"] == shape]
        if len(used) >= self.limits.get(shape, 1000):
            message = "The following service limits were exceeded: gpu-a10-count. Request a service limit increase."
            raise ApiError(400, "LimitExceeded", message)
        here = [instance for instance in used if instance.details["availabilityDomain"] == domain]
        if len(here) >= self.capacity.get((domain, shape), 1000):
            raise ApiError(500, "InternalError", "Out of host capacity.")

    def _check_tags(self, tags: dict[str, str]) -> None:
        if len(tags) > MAX_TAGS:
            raise ApiError(400, "InvalidParameter", f"At most {MAX_TAGS} free-form tags are allowed.")
        if any("." in key or " " in key or len(str(value)) > 256 for key, value in tags.items()):
            raise ApiError(400, "InvalidParameter", "A free-form tag is not valid.")

    def _list(self, query: Strings, **_: Any) -> Any:
        self._compartment(query.get("compartmentId"))
        found = []
        for instance in self.instances.values():
            if "page" not in query and instance.hidden > 0:
                instance.hidden -= 1
            elif instance.hidden == 0 and instance.details["compartmentId"] == query["compartmentId"]:
                self._settle(instance)
                found.append(instance)
        if "displayName" in query:
            found = [instance for instance in found if instance.details.get("displayName") == query["displayName"]]
        return self._page([instance.json() for instance in found], query)

    def _page(self, items: list[Json], query: Strings) -> Any:
        start = int(query.get("page", 0))
        size = min(int(query.get("limit", self.page_size)), self.page_size)
        more = {"opc-next-page": str(start + size)} if start + size < len(items) else {}
        return items[start : start + size], more

    def _find(self, resource: str | None) -> Instance:
        if resource not in self.instances:
            raise not_found()
        return self.instances[resource]

    def _settle(self, instance: Instance) -> None:
        """Without a backend, a state passes to the next when looked at."""
        if self.backend is None:
            steps = {"PROVISIONING": "RUNNING", "TERMINATING": "TERMINATED"}
            if instance.state == "PROVISIONING":
                instance.private_ip = f"10.0.{instance.number // 250}.{instance.number % 250 + 2}"
                instance.public_ip = f"203.0.113.{instance.number % 250 + 2}"
            instance.state = steps.get(instance.state, instance.state)

    def _answer(self, instance: Instance) -> Any:
        return instance.json(), {"etag": str(instance.etag)}

    def _get(self, resource: str | None, **_: Any) -> Any:
        instance = self._find(resource)
        self._settle(instance)
        return self._answer(instance)

    def _update(self, resource: str | None, headers: Strings, body: Json, **_: Any) -> Any:
        instance = self._find(resource)
        if headers.get("if-match", str(instance.etag)) != str(instance.etag):
            raise ApiError(412, "NoEtagMatch", "The etag does not match.")
        if instance.state != "RUNNING":
            self._settle(instance)
            raise ApiError(409, "Conflict", "The instance is currently being modified.")
        if "freeformTags" in body:
            self._check_tags(body["freeformTags"])
            instance.tags = dict(body["freeformTags"])
        instance.etag += 1
        return self._answer(instance)

    def _terminate(self, resource: str | None, query: Strings, **_: Any) -> None:
        instance = self._find(resource)
        if instance.state == "TERMINATED":
            raise not_found()
        if instance.state == "TERMINATING":
            return
        instance.state = "TERMINATING"
        instance.etag += 1
        if query.get("preserveBootVolume", "false") != "true":
            self.boot_volumes = {key: owner for key, owner in self.boot_volumes.items() if owner != instance.id}
        if self.backend:
            self.backend.shut(instance)

    def _attachments(self, query: Strings, **_: Any) -> list[Json]:
        self._compartment(query.get("compartmentId"))
        instance = self._find(query.get("instanceId"))
        self._settle(instance)
        state = "ATTACHED" if instance.private_ip else "ATTACHING"
        vnic = f"ocid1.vnic.oc1.iad.{instance.number:06d}"
        where = {"compartmentId": COMPARTMENT, "availabilityDomain": instance.details["availabilityDomain"]}
        what = {"instanceId": instance.id, "vnicId": vnic, "lifecycleState": state}
        return [{"id": f"attachment{instance.number}", **what, **where}]

    def _vnic(self, resource: str | None, **_: Any) -> Json:
        number = int(str(resource).rsplit(".", 1)[-1])
        instance = next((instance for instance in self.instances.values() if instance.number == number), None)
        if instance is None:
            raise not_found()
        addresses = {"privateIp": instance.private_ip, "publicIp": instance.public_ip, "isPrimary": True}
        return {"id": resource, "lifecycleState": "AVAILABLE", "compartmentId": COMPARTMENT, **addresses}
