"""From what a log shows to findings: errors in the order in which they happened, then what the facts imply."""

from __future__ import annotations

import re
from typing import Final

from raybench.doctor.findings import SEVERITY, Finding, finding
from raybench.doctor.nccl_advice import parse_version, text_of
from raybench.doctor.nccl_log import Log

_WRONG_INTERFACE = re.compile(r"(?:veth|docker|virbr|cni|ip6tnl)\S*|br-[0-9a-f]{6,}\S*|lo")
# Codes that other errors bring about: after an earlier error they are its followers.
_FOLLOWERS: Final = ("peer-closed", "connection-refused", "connection-timeout", "peer-unreachable", "size-mismatch")


def conclude(log: Log) -> list[Finding]:
    """All findings of a log."""
    if log.empty:
        return [_not_recognised()]
    found = _from_signs(log)
    codes = {item["code"] for item in found}
    if "mixed-versions" not in codes:
        found += _versions(log)
    found += _interfaces(log)
    found += _network(log)
    found += _gpu_direct(log)
    found += _link_layers(log)
    found += _hang_risk(log)
    return found


def _not_recognised() -> Finding:
    return finding(
        "not-recognised",
        "There is no line of NCCL's (or RCCL's) log in this file.",
        None,
        ["Run with NCCL_DEBUG=INFO (NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log keeps it apart) and give that file."],
    )


def _from_signs(log: Log) -> list[Finding]:
    version = parse_version(next(iter(log.versions), None))
    signs = sorted(log.signs.found.values(), key=lambda sign: sign.number)
    signs = [sign for sign in signs if sign.code != "wrong-interface"]
    errors = [sign for sign in signs if SEVERITY[sign.code] == "error"]
    found: list[Finding] = []
    for sign in signs:
        message, advice = text_of(sign.code, version)
        if errors and sign in errors[1:]:
            likely = "It follows" if sign.code in _FOLLOWERS else "It comes after"
            message += (
                f" {likely} line {errors[0].number} ({errors[0].code}): of several warnings the first is the cause."
            )
        if sign.count > 1:
            message += f" ({sign.count} such lines.)"
        found.append(finding(sign.code, message, sign.evidence, advice))
    return found


def _versions(log: Log) -> list[Finding]:
    distinct = {parse_version(printed): printed for printed in reversed(log.versions)}
    if len(distinct) < 2:
        return []
    message, advice = text_of("mixed-versions", None)
    names = " and ".join(printed for printed in log.versions if printed in distinct.values())
    return [finding("mixed-versions", f"{message} Here: {names}.", list(log.versions.values())[1], advice)]


def _interfaces(log: Log) -> list[Finding]:
    wrong = [name for name in log.interfaces if _WRONG_INTERFACE.fullmatch(name)]
    if wrong:
        return [_wrong_interface(f"{', '.join(wrong[:4])} is in use", log.interfaces[wrong[0]])]
    if log.link_local:
        return [_wrong_interface("an fe80:: address is in use", log.link_local)]
    peer = log.signs.found.get("wrong-interface")
    return [_wrong_interface("a peer has an fe80:: address", peer.evidence)] if peer else []


def _wrong_interface(what: str, evidence: str) -> Finding:
    return finding(
        "wrong-interface",
        f"NCCL uses an interface that leads to no other host: {what}. Bridges, container links, tunnels, loopback and "
        "link-local addresses exist on one machine only.",
        evidence,
        [
            "NCCL_SOCKET_IFNAME=<the interface that routes between the hosts>, or exclude: "
            "NCCL_SOCKET_IFNAME=^veth,docker,lo",
            "NCCL_SOCKET_FAMILY=AF_INET where IPv6 has only link-local addresses.",
        ],
    )


def _network(log: Log) -> list[Finding]:
    if (log.network or log.net_name) != "Socket":
        return []
    disabled = log.environment.get("NCCL_IB_DISABLE")
    advice = ["Harmless on one host. With RDMA NICs in the hosts: `ibv_devinfo` must list them inside the container."]
    if disabled not in (None, "0"):
        advice.insert(0, f"NCCL_IB_DISABLE={disabled} is set in this run: unset it to use InfiniBand or RoCE.")
    else:
        advice.append("NCCL_IB_DISABLE must not be 1, and NCCL_IB_HCA must name NICs that exist.")
    return [
        finding(
            "socket-fallback",
            "Traffic between hosts goes over TCP sockets: NCCL found, or was told to use, no RDMA network.",
            log.network_line or next((line for line in log.interfaces.values()), None),
            advice,
        )
    ]


def _gpu_direct(log: Log) -> list[Finding]:
    if log.gdrdma is not False:
        return []
    version = parse_version(next(iter(log.versions), None))
    module = "`modprobe nvidia-peermem` (nv_peer_mem on old drivers)"
    if version is None or version >= (2, 12, 0):
        module += ", or DMA-BUF (kernel 5.12, CUDA 11.7, open driver modules)"
    return [
        finding(
            "no-gpudirect-rdma",
            "Network traffic is copied through host memory: GPUDirect RDMA is not in use here. Decide over the logs "
            "of all ranks: a single rank far from its NIC is normal. (`GDR 1` after `Connected all rings` does not "
            "mean that a NIC is used.)",
            log.gdr_off_line or log.rdma_line,
            [
                module[0].upper() + module[1:] + ".",
                "The NIC should hang on the GPU's own PCIe switch (PIX or PXB in `nvidia-smi topo -m`).",
                "Where it does not, NCCL_NET_GDR_LEVEL=PHB (or SYS), kept only if a measurement is faster.",
            ],
        )
    ]


def _link_layers(log: Log) -> list[Finding]:
    if not log.mixed_layers:
        return []
    names = list(log.ib_devices)
    counts = {layer: [name for name in names if f"/{layer}" in name] for layer in ("IB", "RoCE")}
    few = min(counts.values(), key=len)
    odd = few[0].split("/")[0] if few else "mlx5_bond_0:1"
    return [
        finding(
            "mixed-link-layers",
            "One list of NICs holds InfiniBand and RoCE ports. They cannot reach each other; often one of them is a "
            "storage or management port.",
            log.mixed_layers,
            [f"Name the compute NICs in NCCL_IB_HCA, or leave one out: NCCL_IB_HCA=^{odd}"],
        )
    ]


def _hang_risk(log: Log) -> list[Finding]:
    if not (log.first_p2p and log.rings_connected and log.num_warnings == 0):
        return []
    return [
        finding(
            "p2p-hang-risk",
            "All connections came up without a warning, and GPUs talk peer-to-peer. If the run hangs right after "
            "this, and the GPUs are joined by PCIe rather than NVLink, PCIe ACS or an IOMMU is the usual cause: it "
            "hangs without a message.",
            log.first_p2p,
            [
                "`nvidia-smi topo -m`: PIX or PXB pairs are the ones at risk; NVLink (NV#) pairs are not.",
                "Test once with NCCL_P2P_DISABLE=1 (slower). On one host it moves traffic to shared memory, not to "
                "the NIC.",
                "Disable ACS on the PCIe bridges and VT-d/IOMMU, or boot with iommu=pt.",
            ],
        )
    ]
