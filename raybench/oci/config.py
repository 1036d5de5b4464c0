"""The `provider` section of a cluster file, and the checks and small conveniences that come before a launch."""

from __future__ import annotations

import copy
import os
import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raybench.errors import RequestError, unknown
from raybench.oci import launch
from raybench.oci.errors import OCIError

TOKEN_FILE = "~/.ray/auth_token"
_RAYS = (
    "type",
    "module",
    "use_internal_ips",
    "use_external_head_ip",
    "cache_stopped_nodes",
    "disable_node_updaters",
    "disable_launch_config_check",
    "foreground_node_launch",
    "worker_liveness_check",
    "worker_rpc_drain",
)


class ProviderConfig(BaseModel):
    """What the provider needs to know besides each node type's `node_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compartment_id: str
    """OCID of the compartment that holds the cluster's instances."""
    region: str | None = None
    """Default: the region of the profile, or of the instance."""
    subnet_id: str | None = None
    """OCID of the subnet of every node whose `create_vnic_details` names none."""
    availability_domains: list[str] | None = Field(default=None, min_length=1)
    """Domains to try, in this order; default: all of the region, those of the cluster's other nodes first."""
    auth: Literal["auto", "config_file", "instance_principal"] = "auto"
    """auto: the configuration file where it exists, else the instance's own identity."""
    config_file: str = "~/.oci/config"
    profile: str = "DEFAULT"
    service_endpoint: str | None = None
    """Base URL of all services instead of the region's own, for a dedicated region or a test."""


def parse(section: dict[str, Any]) -> ProviderConfig:
    """Read a `provider` section; anything wrong is one message that names the key."""
    if section.get("cache_stopped_nodes"):
        text = "provider.cache_stopped_nodes: OCI bills stopped GPU instances, so nodes are terminated; remove the key"
        raise OCIError("Config", text)
    own = {key: value for key, value in section.items() if key not in _RAYS and not key.startswith("_")}
    for key in own:
        if key not in ProviderConfig.model_fields:
            raise OCIError("Config", str(unknown("provider", key, ProviderConfig.model_fields)))
    _refuse_unfilled(own, "provider")
    try:
        return ProviderConfig.model_validate(own)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OCIError("Config", f"provider.{where}: {first['msg']} (now {own.get(where)!r})") from None


def bootstrap(cluster: dict[str, Any]) -> dict[str, Any]:
    """Check the whole file before anything is launched, and fill in what the machine that runs `ray up` knows."""
    cluster = copy.deepcopy(cluster)
    provider = parse(cluster["provider"])
    public_key = _public_key(cluster.get("auth", {}))
    _make_token(cluster.get("file_mounts") or {})
    for name, kind in cluster.get("available_node_types", {}).items():
        _refuse_unfilled(kind["node_config"], f"available_node_types.{name}.node_config")
        metadata = kind["node_config"].setdefault("metadata", {})
        if public_key:
            metadata.setdefault("ssh_authorized_keys", public_key)
        try:
            launch.check(kind["node_config"], provider.subnet_id)
        except RequestError as error:
            raise OCIError("Config", f"available_node_types.{name}.{error}") from None
    return cluster


def for_head(cluster: dict[str, Any]) -> dict[str, Any]:
    """The same file as the head node uses it: no credentials travel, the head is itself one."""
    section = cluster["provider"]
    if parse(section).auth == "auto":
        section["auth"] = "instance_principal"
        section.pop("config_file", None)
        section.pop("profile", None)
    return cluster


def _refuse_unfilled(value: Any, path: str) -> None:
    """Refuse what the shipped files leave to fill in, by its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unfilled(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unfilled(item, f"{path}[{index}]")
    elif isinstance(value, str) and "FILL-IN" in value:
        text = f"{path}: fill in your own value (now {value!r}); docs/clusters.md says where to find it"
        raise OCIError("Config", text)


def _public_key(auth: dict[str, Any]) -> str | None:
    """The key beside `auth.ssh_private_key`, which instances get as metadata."""
    if "ssh_public_key" in auth:
        text = (
            "auth.ssh_public_key: leave it out (the head cannot read it); the one beside auth.ssh_private_key is used"
        )
        raise OCIError("Config", text)
    private = auth.get("ssh_private_key")
    if not private:
        return None
    path = Path(os.path.expanduser(private))
    public = path.with_name(path.name + ".pub")
    if not path.exists() or not public.exists():
        make = f"run `ssh-keygen -t ed25519 -f {private}`"
        text = f"auth.ssh_private_key: {private} and {private}.pub must both exist: {make}"
        raise OCIError("Config", text)
    return public.read_text().strip()


def _make_token(mounts: dict[str, str]) -> None:
    """Ray's token, where the file mounts send it to the nodes and this machine has none yet; for its owner only."""
    path = Path(os.path.expanduser(TOKEN_FILE))
    if TOKEN_FILE not in mounts.values() or path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))
