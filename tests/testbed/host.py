"""A switch, and the machines on it: hosts as a cloud image boots them, and a laptop that is none of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.testbed.namespaces import PATH, Namespace

REPOSITORY = Path(__file__).resolve().parents[2]
PREPARED = "/opt/raybench/venv"  # a custom image with everything installed has it here; ours is this interpreter's
SSHD = "/etc/ssh/sshd_testbed"
_VISIBLE = [str(REPOSITORY), sys.prefix, sys.base_prefix]


class Switch:
    """An Ethernet segment that routes between the private, the public and the laptop's network, and nowhere else."""

    PRIVATE, PUBLIC, OUTSIDE = "10.77.0", "203.0.113", "198.51.100"

    def __init__(self) -> None:
        self._namespace = Namespace("testbed-switch", ["sleep", "infinity"], size="16m")
        self._lock = threading.Lock()
        self._ports = 0
        self._namespace.go()
        self._namespace.sh(
            f"""
            ip link set lo up
            ip link add br0 type bridge
            ip link set br0 up
            ip addr add {self.PRIVATE}.1/24 dev br0
            ip addr add {self.OUTSIDE}.1/24 dev br0
            mount -o remount,rw /proc/sys 2>/dev/null || true
            echo 1 > /proc/sys/net/ipv4/ip_forward
            ip route add unreachable default
            """
        )

    def attach(self, host: Namespace, address: str, gateway: str, public: str | None = None) -> None:
        """Plug `host` in: eth0 with `address`, everything else through `gateway`, `public` routed to it."""
        with self._lock:
            self._ports += 1
            port = f"port{self._ports}"
            self._namespace.sh(
                f"""
                ip link add {port} type veth peer name up{self._ports}
                ip link set {port} master br0 up
                """
            )
            # Both ends are made in the switch; the peer is handed over by the process id seen from outside.
            enter = ["nsenter", "-t", str(self._namespace.pid), "-n"]
            move = [*enter, "ip", "link", "set", f"up{self._ports}", "netns", str(host.pid), "name", "eth0"]
            subprocess.run(move, check=True, capture_output=True, text=True)
            if public:
                self._namespace.run("ip", "route", "add", f"{public}/32", "via", address)
        host.sh(
            f"""
            ip link set lo up
            ip link set eth0 up
            ip addr add {address}/24 dev eth0
            ip route add default via {gateway}
            """
        )
        if public:
            host.sh(f"ip addr add {public}/32 dev lo")

    def detach(self, public: str | None) -> None:
        """Forget a host's public address (its link went with it)."""
        if public:
            self._namespace.run("ip", "route", "del", f"{public}/32", check=False)

    @property
    def pid(self) -> int:
        return self._namespace.pid

    def close(self) -> None:
        self._namespace.close()


class Host:
    """A machine as its cloud image boots it: a user with sudo and a key, sshd, a firewall that lets only SSH in."""

    def __init__(
        self,
        name: str,
        switch: Switch,
        number: int,
        *,
        user: str,
        authorized_keys: str,
        firewall: bool = True,
        public: bool = True,
        size: str = "3g",
    ) -> None:
        self.name, self.user, self._switch = name, user, switch
        self.internal_ip = f"{Switch.PRIVATE}.{number}"
        self.external_ip = f"{Switch.PUBLIC}.{number}" if public else None
        self.namespace = Namespace(name, ["/usr/sbin/sshd", "-D", "-e", "-f", SSHD], size=size, keep=_VISIBLE)
        try:
            self._bake(authorized_keys)
            switch.attach(self.namespace, self.internal_ip, f"{Switch.PRIVATE}.1", self.external_ip)
            if firewall:
                self._close_firewall()
            self.namespace.go()
        except BaseException:
            self.close()
            raise

    def _bake(self, authorized_keys: str) -> None:
        home, user = f"/home/{self.user}", self.user
        keys = "\n".join(line for line in authorized_keys.splitlines() if line.strip())
        # Ubuntu's cloud images name the host 127.0.1.1 in /etc/hosts, which is what misleads gloo.
        self.namespace.sh(
            f"""
            printf '127.0.0.1 localhost\\n127.0.1.1 {self.name}\\n' > /etc/hosts
            : > /etc/resolv.conf
            rm -rf /etc/xdg/pip
            printf '[global]\nno-index = true\n' > /etc/pip.conf
            sed -i '/^[^:]*:[^:]*:1000:/d' /etc/passwd /etc/group
            echo '{user}:x:1000:1000:testbed:{home}:/bin/bash' >> /etc/passwd
            echo '{user}:*:19000:0:99999:7:::' >> /etc/shadow
            echo '{user}:x:1000:' >> /etc/group
            echo '{user} ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/90-cloud-init-users
            chmod 440 /etc/sudoers.d/90-cloud-init-users
            mkdir -p {home}/.ssh
            cp /etc/skel/.bashrc /etc/skel/.profile {home}/
            printf '%s\\n' {shlex.quote(keys)} > {home}/.ssh/authorized_keys
            chmod 700 {home} {home}/.ssh
            chmod 600 {home}/.ssh/authorized_keys
            chown -R 1000:1000 {home}
            mkdir -p $(dirname {PREPARED})
            ln -sfn {shlex.quote(sys.prefix)} {PREPARED}
            site=$({shlex.quote(sys.executable)} -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
            chown 1000:1000 "$site" {shlex.quote(sys.prefix)} {shlex.quote(sys.prefix)}/bin
            for own in "$site"/raybench* "$site"/*raybench*.pth {shlex.quote(sys.prefix)}/bin/raybench; do
                [ ! -e "$own" ] || chown -R 1000:1000 "$own"
            done
            rm -f /etc/ssh/testbed_key /etc/ssh/testbed_key.pub
            ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/testbed_key
            printf '%s\\n' 'HostKey /etc/ssh/testbed_key' 'UsePAM no' 'UseDNS no' 'MaxStartups 100' \\
                'MaxSessions 100' 'PermitRootLogin no' 'PasswordAuthentication no' 'PidFile none' \\
                'Subsystem sftp internal-sftp' > {SSHD}
            """
        )
        for path in _VISIBLE:  # a user's home may be closed to others, the interpreter in it must not be
            parents = " ".join(shlex.quote(str(parent)) for parent in Path(path).parents)
            self.namespace.sh(f"chmod o+x {parents}")

    def _close_firewall(self) -> None:
        """The rules that Oracle's Ubuntu images come with: SSH in, all else refused."""
        self.namespace.sh(
            """
            iptables -A INPUT -m state --state RELATED,ESTABLISHED -j ACCEPT
            iptables -A INPUT -p icmp -j ACCEPT
            iptables -A INPUT -i lo -j ACCEPT
            iptables -A INPUT -p tcp -m state --state NEW -m tcp --dport 22 -j ACCEPT
            iptables -A INPUT -j REJECT --reject-with icmp-host-prohibited
            iptables -A FORWARD -j REJECT --reject-with icmp-host-prohibited
            """
        )

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.namespace.run(*command, **options)

    def shape(self, rate: str | None) -> None:
        """Limit what leaves the host to `rate` (as tc says it: 1gbit), or lift the limit."""
        self.run("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        if rate:
            limit = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
            self.run("tc", "qdisc", "add", "dev", "eth0", "root", *limit)

    def bytes_sent(self) -> int:
        return int(self.run("cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout)

    def processes(self) -> list[str]:
        return self.namespace.processes()

    @property
    def alive(self) -> bool:
        return self.namespace.alive

    def close(self) -> None:
        """Pull the plug."""
        self.namespace.close()
        self._switch.detach(self.external_ip)


class Laptop:
    """Where a person types: the checkout, this interpreter on PATH, a home of its own, the hosts' public side."""

    HOME = "/home/person"

    def __init__(self, switch: Switch) -> None:
        self.namespace = Namespace("testbed-laptop", ["sleep", "infinity"], size="2g", keep=_VISIBLE)
        switch.attach(self.namespace, f"{Switch.OUTSIDE}.2", f"{Switch.OUTSIDE}.1")
        self.namespace.sh(
            f"""
            printf '127.0.0.1 localhost testbed-laptop\\n' > /etc/hosts
            : > /etc/resolv.conf
            sed -i 's#^root:[^:]*:0:0:[^:]*:[^:]*:#root:*:0:0:person:{self.HOME}:#' /etc/passwd
            mkdir -p {self.HOME}/.ssh
            chmod 700 {self.HOME} {self.HOME}/.ssh
            ssh-keygen -q -t ed25519 -N '' -C person@laptop -f {self.HOME}/.ssh/id_ed25519
            """
        )
        self.namespace.go()

    @property
    def public_key(self) -> str:
        return self.namespace.path(f"{self.HOME}/.ssh/id_ed25519.pub").read_text().strip()

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        path = f"{sys.prefix}/bin:{PATH}"
        base = {"HOME": self.HOME, "USER": "root", "LOGNAME": "root", "PATH": path, "TERM": "dumb", "COLUMNS": "200"}
        return {**base, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONDONTWRITEBYTECODE": "1", **(extra or {})}

    def write(self, path: str, text: str, mode: int = 0o600) -> str:
        """Put a file down, under the home unless the path is absolute; its path inside."""
        inside = path if path.startswith("/") else f"{self.HOME}/{path}"
        self.namespace.run("mkdir", "-p", str(Path(inside).parent))
        target = self.namespace.path(inside)
        target.touch()
        target.chmod(mode)
        target.write_text(text)
        return inside

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 300,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        return self.namespace.run(
            *command, env=self.environment(env), cwd=cwd or str(REPOSITORY), timeout=timeout, check=check
        )

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Background:
        return Background(self.namespace.enter(command, self.environment(env), str(REPOSITORY)))

    def close(self) -> None:
        self.namespace.close()


class Background:
    """A command that goes on, its output kept; ends with `close`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True
        )

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def wait_for(self, text: str, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"never said {text!r}:\n{self.output}")
            time.sleep(0.2)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all that the command started, as Ctrl-C would
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._output.close()
