"""An OCI API on the loopback, and providers that talk to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raybench.oci.config import parse
from raybench.oci.provider import OCINodeProvider
from raybench.oci.session import Patience, Session
from tests.testbed.cloud import COMPARTMENT, SUBNET, FakeCloud
from tests.testbed.server import ApiServer

NODE_CONFIG: dict[str, Any] = {
    "shape": "VM.GPU.A10.2",
    "source_details": {
        "source_type": "image",
        "boot_volume_size_in_gbs": 200,
        "instance_source_image_filter_details": {
            "operating_system": "Oracle Linux",
            "operating_system_version": "8",
        },
    },
    "create_vnic_details": {"assign_public_ip": True},
    "metadata": {"ssh_authorized_keys": "ssh-ed25519 AAAA test"},
}
HEAD = {"ray-node-type": "head", "ray-node-name": "ray-test-head", "ray-user-node-type": "a10"}
WORKER = {"ray-node-type": "worker", "ray-node-name": "ray-test-worker", "ray-user-node-type": "a10-worker"}


class Cloud:
    """One fake cloud, its endpoint, and as many providers as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.cloud = FakeCloud()
        self.api = ApiServer(self.cloud)
        self.endpoint = self.api.local()
        self.slept: list[float] = []
        key = folder / "key.pem"
        key.write_text(self.api.identity.user_key)
        key.chmod(0o600)
        self.config_file = folder / "config"
        self.config_file.write_text(self.api.identity.config_file(str(key)))
        self.config_file.chmod(0o600)

    def section(self, **changes: Any) -> dict[str, Any]:
        """A `provider` section for this cloud."""
        return {
            "type": "external",
            "module": "raybench.oci.OCINodeProvider",
            "compartment_id": COMPARTMENT,
            "subnet_id": SUBNET,
            "config_file": str(self.config_file),
            "service_endpoint": self.endpoint,
            **changes,
        }

    def session(self, **changes: Any) -> Session:
        return Session(parse(self.section(**changes)), Patience(attempts=4, conflict_s=2.0), self.slept.append)

    def provider(self, cluster: str = "test", session: Session | None = None, **changes: Any) -> OCINodeProvider:
        return OCINodeProvider(self.section(**changes), cluster, session or self.session(**changes))


@pytest.fixture
def make_cloud(tmp_path: Path) -> Iterator[Callable[[], Cloud]]:
    made: list[Cloud] = []

    def make() -> Cloud:
        made.append(Cloud(tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.api.close()


@pytest.fixture
def oci_cloud(make_cloud: Callable[[], Cloud]) -> Cloud:
    return make_cloud()
