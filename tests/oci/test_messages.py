"""Each thing that a person can get wrong is one message that says what to do, before anything is rented if possible."""

from __future__ import annotations

import base64
import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from raybench.oci import config
from raybench.oci.errors import OCIError
from raybench.oci.provider import OCINodeProvider
from raybench.oci.session import Session
from tests.oci.conftest import NODE_CONFIG, WORKER, Cloud
from tests.testbed.cloud import ApiError


def message(action: Any) -> str:
    with pytest.raises(OCIError) as raised:
        action()
    text = raised.value.format_message()
    assert "\n" not in text
    return text


def launching(cloud: Cloud, **changes: Any) -> str:
    node_config = {**copy.deepcopy(NODE_CONFIG), **changes.pop("node_config", {})}
    return message(lambda: cloud.provider(**changes).create_node(node_config, WORKER, 1))


def test_wrong_key(oci_cloud: Cloud) -> None:
    other = "fingerprint=" + ":".join(["00"] * 16) + "#"
    text = oci_cloud.config_file.read_text().replace("fingerprint=", other).replace("#", "\nignored=")
    oci_cloud.config_file.write_text(text)
    text = message(lambda: oci_cloud.provider().non_terminated_nodes({}))
    assert "OCI refused the credentials (API key of profile DEFAULT" in text
    assert "fingerprint" in text


def session_profile(cloud: Cloud, folder: Path, seconds: float) -> None:
    """As `oci session authenticate` leaves it."""
    key = serialization.load_pem_private_key(cloud.api.identity.user_key.encode(), None)
    token = folder / "token"
    token.write_text(cloud.api.identity.token(key.public_key(), seconds))
    text = cloud.config_file.read_text().replace("[DEFAULT]", "[lab]").replace("user=ocid1.user.oc1..testbed\n", "")
    cloud.config_file.write_text(text + f"security_token_file={token}\n")


def test_session_token_works(oci_cloud: Cloud, tmp_path: Path) -> None:
    session_profile(oci_cloud, tmp_path, 600)
    assert oci_cloud.provider(profile="lab").non_terminated_nodes({}) == []


def test_expired_session_token(oci_cloud: Cloud, tmp_path: Path) -> None:
    session_profile(oci_cloud, tmp_path, -600)
    text = message(lambda: oci_cloud.provider(profile="lab"))
    assert (
        text
        == "the session token of profile lab expired 10 minutes ago: run `oci session authenticate --profile-name lab`"
    )


def test_session_token_that_expires_while_used(oci_cloud: Cloud, tmp_path: Path) -> None:
    session_profile(oci_cloud, tmp_path, 600)
    provider = oci_cloud.provider(profile="lab")
    for key in oci_cloud.api.identity._expires:
        oci_cloud.api.identity._expires[key] = time.time() - 1
    text = message(lambda: provider.non_terminated_nodes({}))
    assert "run `oci session authenticate --profile-name lab`" in text


def test_no_configuration_and_no_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCI_METADATA_BASE_URL", "http://127.0.0.1:1/opc/v2")
    monkeypatch.setattr("time.sleep", lambda _: None)
    section = {"compartment_id": "ocid1.compartment.oc1..x", "config_file": str(tmp_path / "none")}
    text = message(lambda: Session(config.parse(section)))
    assert "run `oci setup config`" in text


def test_unknown_profile(oci_cloud: Cloud) -> None:
    assert "name provider.profile" in message(lambda: oci_cloud.provider(profile="nobody"))


def test_unreachable(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    oci_cloud.api.close()
    assert "OCI cannot be reached" in message(lambda: provider.non_terminated_nodes({}))


def test_wrong_compartment(oci_cloud: Cloud) -> None:
    wrong = "ocid1.compartment.oc1..other"
    text = message(lambda: oci_cloud.provider(compartment_id=wrong).non_terminated_nodes({}))
    assert "Check provider.compartment_id and the policies" in text
    assert wrong in text


def test_missing_image(oci_cloud: Cloud) -> None:
    gone = "ocid1.image.oc1.iad.gone"
    text = launching(oci_cloud, node_config={"source_details": {"source_type": "image", "image_id": gone}})
    assert text.startswith(f"node_config.source_details.image_id: {gone} does not exist in us-ashburn-1")


def test_no_image_fits_the_query(oci_cloud: Cloud) -> None:
    source = copy.deepcopy(NODE_CONFIG["source_details"])
    source["instance_source_image_filter_details"]["operating_system_version"] = "7"
    text = launching(oci_cloud, node_config={"source_details": source})
    assert "there is no image of Oracle Linux 7 for VM.GPU.A10.2" in text
    assert "there are: Canonical Ubuntu 22.04, Oracle Linux 8" in text


def test_missing_subnet(oci_cloud: Cloud) -> None:
    text = launching(oci_cloud, subnet_id="ocid1.subnet.oc1..gone")
    assert text.startswith("subnet_id: ocid1.subnet.oc1..gone does not exist")


def test_launch_not_allowed(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.fail("launch", ApiError(404, "NotAuthorizedOrNotFound", "Authorization failed"))
    assert "no policy lets you launch" in launching(oci_cloud)


def test_limit_and_quota(oci_cloud: Cloud) -> None:
    oci_cloud.cloud.limits["VM.GPU.A10.2"] = 0
    assert "request an increase" in launching(oci_cloud)
    oci_cloud.cloud.limits.clear()
    oci_cloud.cloud.fail("launch", ApiError(400, "QuotaExceeded", "quota"))
    assert "have its administrator raise it" in launching(oci_cloud)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shpae": "x"}, "node_config: 'shpae' is not known; did you mean 'shape'?"),
        (
            {"source_details": {"source_type": "image", "image": "x"}},
            "node_config.source_details: 'image' is not known",
        ),
        ({"source_details": {"image_id": "x"}}, "node_config.source_details.source_type: missing"),
        ({"source_details": None}, "node_config.source_details: missing"),
        ({"source_details": {"source_type": "image"}}, "operating_system and operating_system_version"),
        ({"source_details": {"source_type": "bootVolume", "boot_volume_id": "x"}}, "only 'image'"),
        ({"agent_config": {"plugins_config": {"name": "x"}}}, "node_config.agent_config.plugins_config"),
        ({"agent_config": {"plugins_config": [{"nam": "x"}]}}, "plugins_config[0]: 'nam' is not known"),
        ({"shape": None}, "node_config.shape: missing"),
        ({"freeform_tags": {"a": "1", "b": "2"}}, "give at most one"),
        ({"capacity_reservation_id": "ocid1.x.FILL-IN"}, "node_config.capacity_reservation_id: fill in"),
    ],
)
def test_wrong_node_config_is_refused_before_anything_is_asked(
    oci_cloud: Cloud, changes: dict[str, Any], words: str
) -> None:
    cluster = {
        "provider": oci_cloud.section(),
        "auth": {},
        "available_node_types": {"a10": {"node_config": {**copy.deepcopy(NODE_CONFIG), **changes}}},
    }
    text = message(lambda: OCINodeProvider.bootstrap_config(cluster))
    assert words in text
    assert text.startswith("available_node_types.a10.node_config")
    assert oci_cloud.cloud.log == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compartment": "x"}, "provider: 'compartment' is not known; did you mean 'compartment_id'?"),
        ({"compartment_id": "ocid1.compartment.oc1..FILL-IN"}, "provider.compartment_id: fill in"),
        ({"auth": "password"}, "provider.auth"),
        ({"cache_stopped_nodes": True}, "provider.cache_stopped_nodes"),
        ({"availability_domains": []}, "provider.availability_domains"),
    ],
)
def test_wrong_provider_section(oci_cloud: Cloud, changes: dict[str, Any], words: str) -> None:
    assert words in message(lambda: config.parse(oci_cloud.section(**changes)))


def test_missing_compartment(oci_cloud: Cloud) -> None:
    section = oci_cloud.section()
    del section["compartment_id"]
    assert message(lambda: config.parse(section)).startswith("provider.compartment_id: ")


def test_ssh_key_must_exist(oci_cloud: Cloud, tmp_path: Path) -> None:
    cluster = {"provider": oci_cloud.section(), "auth": {"ssh_private_key": str(tmp_path / "id")}}
    assert f"ssh-keygen -t ed25519 -f {tmp_path}/id" in message(lambda: config.bootstrap(cluster))
    cluster["auth"]["ssh_public_key"] = "x"
    assert "leave it out" in message(lambda: config.bootstrap(cluster))


def test_bootstrap_fills_in_key_and_token(oci_cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "id").write_text("SECRET")
    (tmp_path / "id.pub").write_text("ssh-ed25519 KEY\n")
    node = {key: value for key, value in NODE_CONFIG.items() if key != "metadata"}
    cluster = {
        "provider": oci_cloud.section(),
        "auth": {"ssh_private_key": str(tmp_path / "id")},
        "available_node_types": {"a10": {"node_config": node}},
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
    }
    done = OCINodeProvider.bootstrap_config(cluster)
    assert done["available_node_types"]["a10"]["node_config"]["metadata"] == {"ssh_authorized_keys": "ssh-ed25519 KEY"}
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    first = token.read_text()
    assert len(first) == 64
    OCINodeProvider.bootstrap_config(cluster)
    assert token.read_text() == first
    assert "SECRET" not in json.dumps(done)
    assert first not in json.dumps(done)


def test_head_uses_its_own_identity(oci_cloud: Cloud) -> None:
    provider = oci_cloud.provider()
    head = provider.prepare_for_head_node({"provider": oci_cloud.section(profile="lab", config_file="x")})
    assert head["provider"]["auth"] == "instance_principal"
    assert "config_file" not in head["provider"]
    assert "profile" not in head["provider"]


def test_instance_principal_signs_in_and_is_refused(oci_cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: metadata service, certificate, federation, signed request."""
    import socket

    sock = socket.create_server(("127.0.0.1", 0))
    oci_cloud.api.serve(sock, instance="ocid1.instance.oc1.iad.head")
    monkeypatch.setenv("OCI_METADATA_BASE_URL", f"http://127.0.0.1:{sock.getsockname()[1]}/opc/v2")
    provider = oci_cloud.provider(auth="instance_principal")
    assert provider.non_terminated_nodes({}) == []
    assert provider.session.region == "us-ashburn-1"
    oci_cloud.cloud.fail("list", ApiError(401, "NotAuthenticated", "no"), times=9)
    assert "dynamic group" in message(lambda: provider.non_terminated_nodes({}))


def test_tokens_are_told_apart_from_other_text() -> None:
    from raybench.oci.session import _refuse_expired

    _refuse_expired("no token", "p")
    body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 60}).encode()).decode().rstrip("=")
    _refuse_expired(f"a.{body}.b", "p")
