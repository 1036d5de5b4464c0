"""What OCI's errors mean to the person who typed `ray up`: one message each, that says what to do."""

from __future__ import annotations

import sys
from typing import Any

import oci
from click import ClickException
from ray.autoscaler.node_launch_exception import NodeLaunchException

CAPACITY = ("out of host capacity", "out of capacity", "outofhostcapacity", "outofcapacity")


class OCIError(NodeLaunchException, ClickException):  # type: ignore[misc]
    """Both what Ray's autoscaler records of a failed launch and what its command line prints without a traceback."""

    def __init__(self, category: str, description: str, src_exc_info: Any = None) -> None:
        super().__init__(category, description, src_exc_info)  # type: ignore[call-arg]

    def format_message(self) -> str:
        return str(self.description)

    def __str__(self) -> str:
        return str(self.description)


class OutOfCapacityError(OCIError):
    """This availability domain has no such host free; another may."""


class UnansweredError(OCIError):
    """OCI never gave an answer that settles it: what was asked may have happened."""


class NotFoundError(OCIError):
    """Not there, or not ours to see: OCI does not tell these apart."""


def is_capacity(error: oci.exceptions.ServiceError) -> bool:
    """OCI reports a lack of hosts as a server error, in words."""
    said = f"{error.code} {error.message}".lower()
    return error.status >= 500 and any(word in said for word in CAPACITY)


def is_transient(error: oci.exceptions.ServiceError) -> bool:
    if error.status == 409:
        return bool(error.code != "InvalidatedRetryToken")
    return error.status == 429 or (error.status >= 500 and error.status != 501 and not is_capacity(error))


def explain(error: Exception, doing: str, credentials: str) -> OCIError:
    """The OCIError for what the SDK raised while `doing` something; `credentials` says where they came from."""
    source = sys.exc_info()
    if not isinstance(error, oci.exceptions.ServiceError):
        text = f"{doing}: OCI cannot be reached ({error}). Check the network, the region and any proxy."
        return UnansweredError("Unreachable", text, source)
    detail = str(error.message).strip()
    said = f"OCI says: {error.status} {error.code}: {detail}"
    request = (error.headers or {}).get("opc-request-id") or error.request_id
    if is_capacity(error):
        return OutOfCapacityError("OutOfCapacity", detail, source)
    if error.status == 401:
        text = f"{doing}: OCI refused the credentials ({credentials}). {_renew(credentials)} {said}"
        return OCIError("NotAuthenticated", text, source)
    if error.code in ("LimitExceeded", "QuotaExceeded"):
        return OCIError("QuotaExceeded", f"{doing}: {_quota(str(error.code))} {said}", source)
    if error.status == 404:
        advice = "Check provider.compartment_id and the policies (docs/clusters.md)."
        text = f"{doing}: not found, or not allowed. {advice} {said}"
        return NotFoundError("NotFound", text, source)
    if error.status == 409 and error.code == "InvalidatedRetryToken":
        text = f"{doing}: the instance was terminated while it was being launched. {said}"
        return OCIError("Terminated", text, source)
    if is_transient(error):
        text = f"{doing}: OCI did not take the request after all retries; try again later. {said} (request {request})"
        return UnansweredError("TryLater", text, source)
    return OCIError("Refused", f"{doing}: {said} (request {request})", source)


def _renew(credentials: str) -> str:
    if credentials.startswith("session token"):
        profile = credentials.rpartition(" ")[2]
        return f"The session has expired or is wrong: run `oci session authenticate --profile-name {profile}`."
    if credentials.startswith("instance principal"):
        return "Check that the instance is in a dynamic group that a policy names (docs/clusters.md)."
    return "Check that the API key and its fingerprint are those of the user in the console, and this machine's clock."


def _quota(code: str) -> str:
    if code == "QuotaExceeded":
        return "the compartment's quota allows no more of this shape: have its administrator raise it, or use fewer."
    return (
        "the tenancy's service limit allows no more of this shape: request an increase (console: Governance, "
        "Limits, Quotas and Usage; GPU limits are 0 until asked for), or use another region or fewer nodes."
    )
