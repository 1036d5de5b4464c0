"""Which image, which availability domain, and which of the things named in a launch does not exist."""

from __future__ import annotations

import copy
from typing import Any

from raybench.errors import RequestError
from raybench.oci import launch
from raybench.oci.config import ProviderConfig
from raybench.oci.errors import NotFoundError, OCIError
from raybench.oci.session import Session


def set_image(session: Session, details: Any, siblings: list[Any]) -> None:
    """Put an image OCID where the node configuration has a query: the siblings' own, else the newest for the shape."""
    if details.source_details.source_type != "image" or details.source_details.image_id:
        return
    try:
        system, version = launch.query(details)
    except RequestError as error:
        raise OCIError("Config", str(error)) from None
    known = next((node.image_id for node in siblings if getattr(node, "image_id", None)), None)
    image = known or newest_image(session, details.compartment_id, details.shape, system, version)
    source = copy.copy(details.source_details)
    source.image_id, source.instance_source_image_filter_details = image, None
    details.source_details = source


def newest_image(session: Session, compartment: str, shape: str, system: str, version: str) -> str:
    """GPU shapes get the newest image that carries NVIDIA's driver (its name says GPU), if the system has one."""
    doing = f"looking for an image of {system} {version} for {shape}"
    options = {"shape": shape, "lifecycle_state": "AVAILABLE", "sort_by": "TIMECREATED", "sort_order": "DESC"}
    every = session.all(doing, session.compute.list_images, compartment, **options)
    images = [image for image in every if (image.operating_system, image.operating_system_version) == (system, version)]
    if not images:
        there = sorted({f"{image.operating_system} {image.operating_system_version}" for image in every})
        text = (
            f"node_config.source_details: there is no image of {system} {version} for {shape} in {session.region} "
            f"(there are: {', '.join(there) or 'none'}); change instance_source_image_filter_details, or give image_id"
        )
        raise OCIError("ImageNotFound", text)
    fitting = [image for image in images if ("GPU" in image.display_name) == ("GPU" in shape)]
    return str((fitting or images)[0].id)


def domains(session: Session, config: ProviderConfig, details: Any, siblings: list[Any]) -> list[str]:
    """Where to try, in order: a fixed one, else all, beginning where the cluster already is."""
    if details.availability_domain:
        return [details.availability_domain]
    names = config.availability_domains
    if names is None:
        doing = "listing the availability domains"
        found = session.all(doing, session.identity.list_availability_domains, config.compartment_id)
        names = [domain.name for domain in found]
    taken = {node.availability_domain for node in siblings}
    return sorted(names, key=lambda name: name not in taken)


def diagnose(session: Session, config: ProviderConfig, details: Any, error: NotFoundError) -> OCIError:
    """OCI says only "not found": ask for each thing that was named, and say which it is."""
    image, subnet = details.source_details.image_id, details.create_vnic_details.subnet_id
    named = [
        ("node_config.source_details.image_id", image, session.compute.get_image, "images differ by region"),
        ("subnet_id", subnet, session.network.get_subnet, "subnets belong to one region"),
    ]
    for key, ocid, get, hint in named:
        try:
            session.call(f"looking at {ocid}", get, ocid)
        except NotFoundError:
            text = f"{key}: {ocid} does not exist in {session.region}, or its compartment's policies hide it ({hint})"
            return OCIError("NotFound", text)
    text = (
        f"{error.description} Image and subnet are there, so either provider.compartment_id "
        f"({config.compartment_id}) is wrong or no policy lets you launch instances in it."
    )
    return OCIError("NotFound", text)
