"""A node type's `node_config` as the SDK's launch details: its keys, one to one, with nothing renamed."""

from __future__ import annotations

import re
from typing import Any

import oci

from raybench.errors import RequestError, unknown

MAX_TAGS = 10  # free-form tags of an OCI resource
MAX_TAG_LENGTH = 256
_PRIMITIVE = ("str", "int", "float", "bool", "object", "datetime")
models = oci.core.models


def build(node_config: dict[str, Any], subnet_id: str | None) -> Any:
    """`LaunchInstanceDetails` of `node_config`; an unknown key or a wrong shape of value is refused by name."""
    details = _model("LaunchInstanceDetails", node_config, "node_config")
    vnic = details.create_vnic_details or models.CreateVnicDetails()
    vnic.subnet_id = vnic.subnet_id or details.subnet_id or subnet_id
    details.create_vnic_details, details.subnet_id = vnic, None
    if not vnic.subnet_id:
        raise RequestError("node_config.create_vnic_details.subnet_id: missing; name it here or in provider.subnet_id")
    if not details.shape:
        raise RequestError("node_config.shape: missing (VM.GPU.A10.2, say)")
    if details.source_details is None and details.image_id:
        details.source_details = models.InstanceSourceViaImageDetails(image_id=details.image_id)
    details.image_id = None
    if details.source_details is None:
        text = "missing; give image_id, or instance_source_image_filter_details to take the newest image"
        raise RequestError(f"node_config.source_details: {text}")
    return details


def check(node_config: dict[str, Any], subnet_id: str | None) -> None:
    """Everything that can be refused before OCI is asked."""
    details = build(node_config, subnet_id)
    source = details.source_details
    if source.source_type != "image":
        text = "only 'image' makes a boot volume that goes with its node"
        raise RequestError(f"node_config.source_details.source_type: {text}")
    if not source.image_id:
        query(details)
    if len(details.freeform_tags or {}) > 1:
        raise RequestError("node_config.freeform_tags: OCI allows 10 tags and Ray uses 9 of them, so give at most one")


def query(details: Any) -> tuple[str, str]:
    """Operating system and version that an image is looked up by."""
    wanted = details.source_details.instance_source_image_filter_details
    if wanted is None or not wanted.operating_system or not wanted.operating_system_version:
        keys = "operating_system and operating_system_version"
        text = f"give image_id, or instance_source_image_filter_details with {keys}"
        raise RequestError(f"node_config.source_details: {text}")
    return wanted.operating_system, wanted.operating_system_version


def tags(user: dict[str, str] | None, rays: dict[str, str]) -> dict[str, str]:
    """Both together, within what OCI takes; a tag of the user's never replaces one of Ray's."""
    both = {**(user or {}), **rays}
    if len(both) > MAX_TAGS:
        text = f"OCI allows {MAX_TAGS} tags, Ray uses {len(rays)}; give fewer of your own"
        raise RequestError(f"node_config.freeform_tags: {text}")
    for key, value in both.items():
        if len(value) > MAX_TAG_LENGTH:
            raise RequestError(f"tag {key}: {len(value)} characters, OCI allows {MAX_TAG_LENGTH}")
    return both


def _model(name: str, value: Any, path: str) -> Any:
    """An SDK model filled from plain data; the SDK's own tables say what each key holds."""
    if not isinstance(value, dict):
        raise RequestError(f"{path}: {value!r} must be a mapping (of {name})")
    cls = getattr(models, name)
    if hasattr(cls, "get_subtype"):
        wire = {cls().attribute_map.get(key, key): item for key, item in value.items()}
        try:
            subtype = getattr(models, cls.get_subtype(wire))
        except KeyError as error:
            key = next((key for key, on_wire in cls().attribute_map.items() if on_wire == error.args[0]), error.args[0])
            raise RequestError(f"{path}.{key}: missing, it says which kind of {name} this is") from None
        cls = subtype
    result = cls()
    for key, item in value.items():
        if key not in result.swagger_types:
            raise unknown(path, key, result.swagger_types)
        try:
            setattr(result, key, _value(result.swagger_types[key], item, f"{path}.{key}"))
        except ValueError as error:  # the SDK's setters know the allowed values of an enumeration
            raise RequestError(f"{path}.{key}: {error}") from None
    return result


def _value(kind: str, item: Any, path: str) -> Any:
    if item is None or kind.startswith("dict(") or kind in _PRIMITIVE:
        return item
    many = re.fullmatch(r"list\[(.+)\]", kind)
    if many is None:
        return _model(kind, item, path)
    if not isinstance(item, list):
        raise RequestError(f"{path}: {item!r} must be a list")
    return [_value(many[1], each, f"{path}[{index}]") for index, each in enumerate(item)]
