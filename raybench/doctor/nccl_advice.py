"""What to do about each thing an NCCL log shows, right for the version at hand, and what not to do."""

from __future__ import annotations

import re
from typing import Final

Version = tuple[int, int, int]

_ONE_HOST = (
    "On one host NCCL_P2P_DISABLE=1 moves traffic to shared memory, not to the NIC; NCCL_IB_* change nothing there."
)
_FIRST_ERROR = (
    "Look for the first error of every other rank: this one is usually what the others see when one of them fails."
)

# code -> (what it means, what to do)
TEXTS: Final[dict[str, tuple[str, list[str]]]] = {
    "peer-access-unsupported": (
        "A process cannot open another one's GPU memory: each process or container sees only its own GPU, or the "
        "driver offers no peer access between these two.",
        [
            "Show all GPUs of the host to every process (the same CUDA_VISIBLE_DEVICES) and pick one by LOCAL_RANK.",
            "Containers that share a host: --ipc=host --pid=host.",
            "Otherwise NCCL_P2P_DISABLE=1. " + _ONE_HOST,
        ],
    ),
    "p2p-disabled": (
        "The driver offers no peer-to-peer between some GPUs. NCCL uses shared memory instead: slower, not a cause of "
        "a hang.",
        ["Nothing to set; NCCL_IGNORE_DISABLED_P2P=1 only hides the message. /dev/shm has to be large enough."],
    ),
    "ib-local-protection": (
        "A NIC was not allowed to access its own buffer (local protection error, status 4).",
        [
            "With GPUDirect RDMA: disable PCIe ACS on the bridges and the IOMMU (or boot with iommu=pt).",
            "Test with NCCL_NET_GDR_LEVEL=LOC, which copies through host memory: if it then runs, it was this.",
        ],
    ),
    "memlock-too-low": (
        "A NIC could not lock memory: the limit on locked memory of this process is too low.",
        [
            "`ulimit -l` must say unlimited inside the job itself, not only in a login shell.",
            "Set `* soft memlock unlimited` and `* hard memlock unlimited` in /etc/security/limits.conf, and "
            "LimitMEMLOCK=infinity for the daemon that starts jobs (slurmd, kubelet, ray).",
            "Containers: docker run --ulimit memlock=-1.",
        ],
    ),
    "shm-too-small": (
        "/dev/shm is full or too small (a container has 64 MB unless told otherwise).",
        [
            "docker run --shm-size=1g or --ipc=host; in a pod an emptyDir with medium: Memory on /dev/shm.",
            "Remove what killed runs left: rm /dev/shm/nccl-* (with no run alive).",
            "NCCL_SHM_DISABLE=1 avoids it and is slow.",
        ],
    ),
    "duplicate-gpu": (
        "Two ranks of one communicator use the same GPU.",
        [
            "Call torch.cuda.set_device(LOCAL_RANK) before the first collective.",
            "Start no more ranks on a host than it has visible GPUs.",
        ],
    ),
    "connection-refused": (
        "Nobody listens at the address that NCCL was given: the peer has died, the address is stale, or it is the "
        "wrong host (127.0.0.1 handed to another machine).",
        [
            _FIRST_ERROR,
            "Delete an old init file, and check MASTER_ADDR: it must be an address that the other hosts can reach.",
        ],
    ),
    "connection-timeout": (
        "A TCP connection got no answer: a firewall drops it, or it goes out through the wrong interface.",
        [
            "Open the ephemeral ports between the hosts (`cat /proc/sys/net/ipv4/ip_local_port_range`): NCCL takes "
            "any of them.",
            "NCCL_SOCKET_IFNAME=<the interface that routes between the hosts>.",
        ],
    ),
    "peer-unreachable": (
        "The network rejected the connection: a firewall, or no route between the two addresses.",
        [
            "Open all TCP ports between the hosts; test with `nc -l 12345` on one and `nc -zv HOST 12345` on the "
            "other.",
            "NCCL_SOCKET_IFNAME=<the interface that routes between the hosts>.",
        ],
    ),
    "size-mismatch": (
        "Two ranks meet in one operation with different sizes: they issue different calls, or differ in NCCL version "
        "or NCCL_PROTO / NCCL_ALGO.",
        [
            "Print the operation and its sizes on every rank just before it; TORCH_DISTRIBUTED_DEBUG=DETAIL checks "
            "this for you.",
            "All ranks of a tensor-parallel group need the same batch; same NCCL and same NCCL_* on every host.",
        ],
    ),
    "mixed-versions": (
        "Ranks run different versions of NCCL, which cannot talk to each other.",
        [
            "Install the same NCCL (so the same torch) on every host; look for a second libnccl.so in LD_LIBRARY_PATH "
            "or LD_PRELOAD."
        ],
    ),
    "net-plugin-failed": (
        "The network plugin finds no device that it can use.",
        [
            "Containers: docker run --device /dev/infiniband/uverbs0 ... (all of them), --ulimit memlock=-1.",
            "`fi_info -p efa` (or your provider) must list the NICs inside the container.",
            "With NCCL_NET naming a plugin NCCL does not fall back: unset it to see whether plain IB or Socket works.",
        ],
    ),
    "nvls-fabric-manager": (
        "NVLink SHARP could not be set up: the state of the fabric manager or of the NVSwitches is broken.",
        [
            "Restart it with no process on the GPUs: `systemctl restart nvidia-fabricmanager`, else reboot the host.",
            "NCCL_NVLS_ENABLE=0 to go on without it (all-reduce inside a host is then slower).",
        ],
    ),
    "iommu-not-passthrough": (
        "RCCL found the kernel booted without IOMMU passthrough, with which peer-to-peer can hang or corrupt.",
        [
            "Boot with iommu=pt (on AMD CPUs also amd_iommu=on): add it to GRUB_CMDLINE_LINUX.",
            "NCCL_P2P_DISABLE=1 as a workaround. " + _ONE_HOST,
        ],
    ),
}


def text_of(code: str, version: Version | None) -> tuple[str, list[str]]:
    """Meaning and advice of a code that is read off one line."""
    special = {
        "roce-gid-or-route": _roce,
        "ib-retry-exceeded": _retry,
        "peer-closed": _closed,
        "interface-not-found": _interface,
    }.get(code)
    return special(version) if special else TEXTS[code]


def parse_version(printed: str | None) -> Version | None:
    """A printed version as numbers; torch 1.10 to 1.12 print 2.10.3 as 21.0.3."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", printed or "")
    if match is None:
        return None
    major, minor, patch = (int(part or 0) for part in match.groups())
    if 20 <= major < 30 and minor < 10:
        code = major * 1000 + minor * 100 + patch
        return code // 10_000, code // 100 % 100, code % 100
    return major, minor, patch


def _roce(version: Version | None) -> tuple[str, list[str]]:
    if version is None:
        gid = "NCCL_IB_GID_INDEX: unset since NCCL 2.21 (automatic); before, the RoCE v2 index of `show_gids`."
    elif version >= (2, 21, 0):
        gid = "Unset NCCL_IB_GID_INDEX: NCCL 2.21 and later choose it, and a copied value such as 3 is often wrong."
    else:
        gid = (
            "Set NCCL_IB_GID_INDEX to the RoCE v2 index that `show_gids` prints for the routed address (often 3; this "
            "NCCL does not choose it itself, 2.21 and later do)."
        )
    return (
        "Two RoCE NICs could not set up a connection: a wrong GID, or no route between these two NICs.",
        [
            gid,
            "NCCL_IB_HCA=<the NICs that are routed to each other>; where rails are separate networks also "
            "NCCL_CROSS_NIC=0.",
            "`ibv_rc_pingpong -g INDEX` between the two NICs shows it without NCCL.",
        ],
    )


def _retry(version: Version | None) -> tuple[str, list[str]]:
    default = (
        ""
        if version is None
        else f" ({'20' if version >= (2, 23, 0) else '18' if version >= (2, 14, 0) else '14'} here)"
    )
    return (
        "A NIC sent and was never acknowledged (retries exceeded, status 12): the two NICs cannot reach each other.",
        [
            "Check that they are on one network: GID index (RoCE), subnet, routing between rails, PFC/ECN, placement "
            "in the cloud.",
            f"NCCL_IB_TIMEOUT=22 instead of the default{default} only waits longer: it helps on a congested network, "
            "not without a route.",
            "NCCL_IB_DISABLE=1 to test: if it runs over TCP, the fault is in the RDMA network.",
        ],
    )


def _closed(version: Version | None) -> tuple[str, list[str]]:
    scan = "If there is none, something scans the port (monitoring, a security scanner)"
    if version is None:
        scan += "; NCCL 2.27.3 and later shrug that off."
    elif version < (2, 27, 3):
        scan += ": NCCL 2.27.3 and later shrug that off, this one does not."
    else:
        scan += "."
    return (
        "A peer closed the connection, because it failed or left first. This is usually a follower.",
        [_FIRST_ERROR, scan],
    )


def _interface(version: Version | None) -> tuple[str, list[str]]:
    del version
    return (
        "NCCL found no network interface that it may use: NCCL_SOCKET_IFNAME names none that exists here, or the "
        "container has no network.",
        [
            "`ip -br addr` on this very host: names differ between hosts.",
            "NCCL_SOCKET_IFNAME is a list of prefixes; a leading `=` asks for the exact name, `^` excludes.",
        ],
    )
