"""A two-host cluster to play with: `python -m tests.testbed up`, then `shell`, `status`, `down`.

`up` leaves the testbed running in the background with the OCI cluster of clusters/oci-a10.yaml on it (2 CPU ranks a
host); `shell` is the laptop: there `ray job submit`, `ray exec ~/oci-a10.yaml`, `ray attach` work as they do at home.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.testbed.bed import ENDPOINT, OCI_FILL_IN, Testbed
from tests.testbed.host import REPOSITORY
from tests.testbed.namespaces import why_unavailable

STATE = Path("/run/raybench-testbed.json")
LOG = Path("/run/raybench-testbed.log")


def running() -> dict[str, Any] | None:
    """The testbed that `up` left, if its process is still that one."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text())
        started = Path(f"/proc/{state['pid']}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return state if started == state["started"] else None


def serve() -> None:
    """The background process: it holds everything, and everything goes with it."""
    with Testbed() as bed:
        kinds = ("a10", "a10-worker")
        resources = {f"available_node_types/{kind}/resources": {"CPU": 2} for kind in kinds}
        file = bed.cluster_file("oci-a10", {**OCI_FILL_IN, "provider/service_endpoint": ENDPOINT, **resources})
        environment = {**bed.laptop.environment(), "RAY_AUTH_MODE": "token", "RAY_ADDRESS": "http://127.0.0.1:8265"}
        started = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
        shell = bed.laptop.namespace.enter(["bash"], environment, str(REPOSITORY))
        stop = bed.laptop.namespace.enter(["ray", "down", "--yes", file], environment, str(REPOSITORY))
        state = {"pid": os.getpid(), "started": started, "shell": shell, "stop": stop, "ready": False}
        STATE.write_text(json.dumps(state))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            print(bed.laptop.run("ray", "up", "--yes", file, timeout=600).stdout, flush=True)
            deadline = time.monotonic() + 600
            while sum(any("raylet" in line for line in host.processes()) for host in bed.instance_hosts()) < 2:
                if time.monotonic() > deadline:
                    raise RuntimeError("the worker did not start Ray within 10 minutes")
                time.sleep(2)
            tunnel = bed.tunnel(file)
            STATE.write_text(json.dumps({**state, "ready": True}))
            try:
                while True:
                    time.sleep(3600)
            finally:
                tunnel.close()
        finally:
            STATE.unlink(missing_ok=True)


def up() -> int:
    if running():
        print("the testbed is up already: `python -m tests.testbed shell`, or `down`")
        return 0
    reason = why_unavailable()
    if reason:
        print(f"no testbed here: {reason}", file=sys.stderr)
        return 1
    STATE.unlink(missing_ok=True)
    with LOG.open("w") as log:
        command = [sys.executable, "-m", "tests.testbed", "serve"]
        holder = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    print("bringing two hosts up (a minute or two) ...", flush=True)
    while not (running() or {}).get("ready"):
        if holder.poll() is not None:
            print(f"it did not come up:\n{LOG.read_text()[-3000:]}", file=sys.stderr)
            return 1
        time.sleep(1)
    print("up: `python -m tests.testbed shell` is a laptop with the tunnel open; in it, for example")
    print("    ray job submit -- raybench run-all --scale smoke")
    print("    ray rsync-down ~/oci-a10.yaml '~/raybench/results/' results/")
    print("and `python -m tests.testbed down` ends it all")
    return 0


def down() -> int:
    state = running()
    if not state:
        print("no testbed is up")
        return 0
    if state["ready"]:
        subprocess.run(state["stop"], check=False, timeout=300)
    os.kill(state["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 60
    while running() and time.monotonic() < deadline:
        time.sleep(0.2)
    if running():
        os.kill(state["pid"], signal.SIGKILL)
    print("gone")
    return 0


def shell() -> int:
    state = running()
    if not state:
        print("no testbed is up: `python -m tests.testbed up`", file=sys.stderr)
        return 1
    return subprocess.run(state["shell"], check=False).returncode


def status() -> int:
    state = running()
    print("down" if not state else "up" if state["ready"] else f"coming up (see {LOG})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    actions = {"up": up, "down": down, "shell": shell, "status": status}
    parser.add_argument("action", choices=[*actions, "serve"])
    action = parser.parse_args().action
    if action == "serve":
        serve()
        return 0
    return actions[action]()


if __name__ == "__main__":
    sys.exit(main())
