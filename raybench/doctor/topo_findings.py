"""What a topology means for NCCL: which pairs it takes peer-to-peer, which through the host, where a hang lurks."""

from __future__ import annotations

from itertools import combinations
from typing import Final

from raybench.doctor.findings import Finding, Result, finding
from raybench.doctor.topo_table import Table

_FAR: Final = ("PHB", "NODE", "SYS")
_NEAR: Final = ("PIX", "PXB")


def judge(facts: Result, table: Table, peers: list[Table]) -> list[Finding]:
    """All findings of one host."""
    found: list[Finding] = []
    if not facts["complete"]:
        found.append(truncated(_what_is_missing(table)))
    if len(facts["gpus"]) == 1:
        found.append(_single_gpu(table))
    links: dict[str, str] = facts["links"]
    if any(link.startswith("NV") for link in links.values()):
        found += _mixed(facts, table)
    else:
        found += _through_host_bridge(links, table)
        found += _hang_risk(links, table)
    found += _peer_to_peer_off(peers)
    found += _far_nics(facts, table)
    return found


def not_recognised(text: str) -> Finding:
    """Nothing of a topology in the text; the first line shows what it is instead."""
    refused = next((line for line in text.splitlines() if "-i command line argument" in line), None)
    start = next((line for line in text.splitlines() if line.strip()), None)
    return finding(
        "not-recognised",
        "There is no line of `nvidia-smi topo -m` in this file"
        + (": `topo -m` takes no `-i`, nvidia-smi refused and printed no matrix." if refused else "."),
        refused or start,
        ["Run `nvidia-smi topo -m > topo.txt` (without `-i`: the matrix always covers all GPUs) on the host itself."],
    )


def truncated(what: str) -> Finding:
    """Answers are given for what is there."""
    return finding(
        "truncated-input",
        f"The matrix is not whole: {what}. What follows is about the part that is here.",
        None,
        ["Send the whole output of `nvidia-smi topo -m`, redirected to a file rather than copied from a terminal."],
    )


def _what_is_missing(table: Table) -> str:
    if table.rebuilt:
        return "its header line is missing"
    lost = [name for name in table.devices if name not in table.rows]
    cut = [name for name, row in table.rows.items() if not row.whole]
    parts = []
    if lost:
        parts.append(f"no row of {_some(lost)}")
    if cut:
        parts.append(f"cells are missing in the row of {_some(cut)}")
    return ", ".join(parts) or "its header line is missing"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _single_gpu(table: Table) -> Finding:
    return finding(
        "single-gpu",
        "One GPU is listed, so there is no pair of GPUs to judge (MIG slices are not listed here).",
        _line_of(table, None),
    )


def _through_host_bridge(links: dict[str, str], table: Table) -> list[Finding]:
    pairs = [pair for pair, link in links.items() if link in _FAR]
    if not pairs:
        return []
    return [
        finding(
            "p2p-through-host-bridge",
            f"{_some([f'{pair} ({links[pair]})' for pair in pairs])}: these pairs reach each other only through the "
            "CPU's host bridge, and there is no NVLink. NCCL normally uses shared memory between them (before 2.23 it "
            "took peer-to-peer up to SYS on AMD CPUs; since 2.23 there only with at most 2 GPUs). That is slow, not a "
            "hang: a SYS link by itself does not hang, and may even stand between GPUs of one NUMA node.",
            _line_of(table, pairs[0]),
            [
                "Do not force peer-to-peer over these pairs (NCCL_P2P_LEVEL=SYS or PHB).",
                "If a run hangs here all the same, test with NCCL_P2P_DISABLE=1: on one host it moves traffic to "
                "shared memory, not to the NIC.",
                "On an SXM board NVLink should be there: `nvidia-smi nvlink -s`, and `systemctl status "
                "nvidia-fabricmanager` where there is an NVSwitch.",
            ],
        )
    ]


def _hang_risk(links: dict[str, str], table: Table) -> list[Finding]:
    pairs = [pair for pair, link in links.items() if link in _NEAR]
    if not pairs:
        return []
    return [
        finding(
            "p2p-hang-risk",
            f"{_some([f'{pair} ({links[pair]})' for pair in pairs])}: NCCL really uses PCIe peer-to-peer here. With "
            "PCIe ACS or an IOMMU switched on, its first collective can hang without any message; these pairs, not "
            "the SYS ones, are where that happens.",
            _line_of(table, pairs[0]),
            [
                "Test once with NCCL_P2P_DISABLE=1: if the hang goes away, this was it (slower, so not the cure).",
                "Disable ACS on the PCIe bridges (`lspci -vvv | grep ACSCtl` shows `SrcValid+` where it is on) and "
                "VT-d/IOMMU in the BIOS, or boot with iommu=pt.",
            ],
        )
    ]


def _mixed(facts: Result, table: Table) -> list[Finding]:
    islands = _islands(facts["gpus"], facts["links"])
    if len(islands) < 2:
        return []
    crossing = next(
        (pair for pair, link in facts["links"].items() if not link.startswith("NV")),
        None,
    )
    shown = "; ".join(" + ".join(island) for island in islands[:6])
    return [
        finding(
            "mixed-nvlink-pcie",
            f"NVLink joins some GPUs only, in the groups {shown}; between the groups traffic goes over PCIe or the "
            "CPU.",
            _line_of(table, crossing),
            [
                "NCCL_P2P_LEVEL=NVL keeps NVLink inside the groups and avoids PCIe peer-to-peer between them. Not "
                "NCCL_P2P_DISABLE=1, which gives up NVLink as well.",
                "Put a tensor-parallel group inside one NVLink group.",
            ],
        )
    ]


def _islands(gpus: list[str], links: dict[str, str]) -> list[list[str]]:
    """GPUs that NVLink joins; a pair whose cell is missing may be NVLink, so it counts as joined."""
    group = {gpu: {gpu} for gpu in gpus}
    for one, other in combinations(gpus, 2):
        link = links.get(f"{one}-{other}") or links.get(f"{other}-{one}") or "NV?"
        if link.startswith("NV") and group[one] is not group[other]:
            merged = group[one] | group[other]
            for gpu in merged:
                group[gpu] = merged
    islands: list[list[str]] = []
    for gpu in gpus:
        members = [name for name in gpus if name in group[gpu]]
        if members not in islands:
            islands.append(members)
    return islands


def _peer_to_peer_off(peers: list[Table]) -> list[Finding]:
    for table in peers:
        for row in table.rows.values():
            states = [cell for cell in row.cells if cell not in (None, "X", "OK")]
            if states:
                return [
                    finding(
                        "p2p-disabled",
                        f"The driver offers no peer-to-peer between some GPUs (`{states[0]}`), as on GeForce cards or "
                        "in some virtual machines. NCCL then uses shared memory: slower, and not a cause of a hang.",
                        row.line,
                        [
                            "Nothing to set: NCCL_P2P_DISABLE=1 would change nothing here, /dev/shm has to be large "
                            "enough."
                        ],
                    )
                ]
    return []


def _far_nics(facts: Result, table: Table) -> list[Finding]:
    nics = [nic["name"] for nic in facts["nics"]]
    far = [
        gpu
        for gpu in facts["gpus"]
        if nics and all(facts["gpu_nic_links"].get(f"{gpu}-{nic}") == "SYS" for nic in nics)
    ]
    if not far:
        return []
    return [
        finding(
            "nic-far-from-gpu",
            f"{_some(far)} reach every NIC only over the link between CPU sockets (SYS). NCCL uses GPUDirect RDMA up "
            "to PXB by default, so their network traffic is copied through host memory. On Grace hosts this is usual.",
            table.rows[far[0]].line if far[0] in table.rows else _line_of(table, f"{far[0]}-{nics[0]}"),
            [
                "Use a NIC on the GPUs' own socket if the host has one (NCCL_IB_HCA names it).",
                "Otherwise try NCCL_NET_GDR_LEVEL=SYS and keep it only if a measurement is faster.",
            ],
        )
    ]


def _line_of(table: Table, pair: str | None) -> str | None:
    """The line that a pair was read from, else the first row."""
    if pair is not None:
        one, other = pair.split("-", 1)
        for name, column in ((one, other), (other, one)):
            row = table.rows.get(name)
            if row is not None and column in table.devices and row.cells[table.devices.index(column)]:
                return row.line
    return next((row.line for row in table.rows.values()), table.header or None)
