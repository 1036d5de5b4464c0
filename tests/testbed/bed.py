"""Everything together: a switch, a laptop, a cloud whose instances are hosts, and hosts of one's own."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import yaml

from tests.testbed.cloud import COMPARTMENT, SUBNET, FakeCloud, Instance
from tests.testbed.host import REPOSITORY, Background, Host, Laptop, Switch
from tests.testbed.server import ApiServer, Listener

PORT = 18700
ENDPOINT = f"http://127.0.0.1:{PORT}"  # the API is on every machine's own loopback
METADATA = "169.254.169.254"


class Testbed:
    """Up when made, gone when closed."""

    __test__ = False

    def __init__(self) -> None:
        self.cloud = FakeCloud(self)
        self.api = ApiServer(self.cloud)
        self.hosts: dict[str, Host] = {}  # by instance OCID, or by name where they are no instances
        self.failures: list[BaseException] = []
        self._listeners: dict[str, list[Listener]] = {}
        self._work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="testbed")
        self._closing = threading.Event()
        self._numbers = iter(range(11, 250))
        self.switch = Switch()
        try:
            self.laptop = Laptop(self.switch)
            self.api.serve(self.laptop.namespace.listen("127.0.0.1", PORT))
            key = self.laptop.write(".oci/key.pem", self.api.identity.user_key)
            self.laptop.write(".oci/config", self.api.identity.config_file(key))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Instances (the cloud's backend)

    def boot(self, instance: Instance) -> None:
        self._submit(lambda: self._boot(instance))

    def shut(self, instance: Instance) -> None:
        self._submit(lambda: self._shut(instance))

    def _submit(self, job: Any) -> None:
        def done(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                self.failures.append(error)

        self._work.submit(job).add_done_callback(done)

    def _boot(self, instance: Instance) -> None:
        if self._closing.is_set() or instance.state != "PROVISIONING":
            return
        image = self.cloud.images[instance.details["sourceDetails"]["imageId"]]
        user = "opc" if image["operatingSystem"] == "Oracle Linux" else "ubuntu"
        keys = (instance.details.get("metadata") or {}).get("ssh_authorized_keys", "")
        host = Host(f"instance-{instance.number}", self.switch, next(self._numbers), user=user, authorized_keys=keys)
        self.hosts[instance.id] = host
        host.run("ip", "addr", "add", f"{METADATA}/32", "dev", "lo")
        self._listeners[instance.id] = [
            self.api.serve(host.namespace.listen("127.0.0.1", PORT)),
            self.api.serve(host.namespace.listen(METADATA, 80), instance.id),
        ]
        with self.cloud.lock:
            instance.private_ip, instance.public_ip = host.internal_ip, host.external_ip
            if instance.state == "PROVISIONING":
                instance.state = "RUNNING"
                instance.etag += 1

    def _shut(self, instance: Instance) -> None:
        self.pull(instance.id)
        with self.cloud.lock:
            instance.state = "TERMINATED"

    def pull(self, name: str) -> None:
        """The host dies at once; an instance goes on existing in the cloud."""
        for listener in self._listeners.pop(name, []):
            listener.close()
        host = self.hosts.pop(name, None)
        if host is not None:
            host.close()

    def instance_hosts(self) -> list[Host]:
        return [self.hosts[instance.id] for instance in self.cloud.alive() if instance.id in self.hosts]

    # Hosts of one's own

    def add_host(self, name: str, user: str = "ubuntu") -> Host:
        """A machine that no API knows: it runs, and lets the laptop's key in."""
        keys = self.laptop.public_key
        host = Host(name, self.switch, next(self._numbers), user=user, authorized_keys=keys)
        self.hosts[name] = host
        return host

    # Cluster files

    def cluster_file(self, name: str, changes: dict[str, Any]) -> str:
        """`clusters/NAME.yaml` with `changes` (dotted keys), put down on the laptop; its path there."""
        config = yaml.safe_load((REPOSITORY / "clusters" / f"{name}.yaml").read_text())
        changed = copy.deepcopy(config)
        for dotted, value in changes.items():
            *parents, last = dotted.split("/")
            place = changed
            for parent in parents:
                place = place[parent]
            place[last] = value
        return self.laptop.write(f"{name}.yaml", yaml.safe_dump(changed, sort_keys=False))

    def tunnel(self, cluster_file: str) -> Background:
        """`ray dashboard` as a person leaves it running; jobs go to 127.0.0.1:8265 then."""
        tunnel = self.laptop.start("ray", "dashboard", cluster_file)
        deadline = time.monotonic() + 180
        probe = (
            "import urllib.error, urllib.request\n"
            "try:\n"
            "    urllib.request.urlopen('http://127.0.0.1:8265/api/version', timeout=10)\n"
            "except urllib.error.HTTPError:\n"
            "    pass  # it asks for the token: it is there\n"
        )
        while (tried := self.laptop.run("python", "-c", probe, check=False)).returncode != 0:
            if time.monotonic() > deadline:
                said = tunnel.output
                tunnel.close()
                raise RuntimeError(f"no tunnel to the dashboard:\n{said}\n{tried.stderr}")
            time.sleep(1)
        return tunnel

    def close(self) -> None:
        self._closing.set()
        self._work.shutdown(wait=True)
        for name in list(self.hosts):
            self.pull(name)
        self.api.close()
        if hasattr(self, "laptop"):
            self.laptop.close()
        self.switch.close()


OCI_FILL_IN = {"provider/compartment_id": COMPARTMENT, "provider/subnet_id": SUBNET}
