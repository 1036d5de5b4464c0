"""Judging GPUs: are they all there, alike, free, healthy, and may they talk to each other and to the NICs directly?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from raybench.doctor.live.facts import Collective, Examination, Gpu, Node
from raybench.doctor.live.finding import LiveFinding, about, from_reader, size, some
from raybench.doctor.live.judge_hosts import by_value, odd_ones, told
from raybench.doctor.topo import read_topo

LARGEST_USE: Final = 1 << 30
"""The driver and a display take less."""
_DMA_BUF_KERNEL: Final = (5, 12)
_ISOLATION: Final = "p2p-hang-risk"


def judge_gpus(found: Examination) -> list[LiveFinding]:
    """All findings about GPUs; none where there are none."""
    nodes = found["nodes"]
    judged = [*_alike(nodes), *(each for node in nodes for each in _node(node))]
    for node in nodes:
        worked = _worked_within(found["collectives"], node["address"])
        judged += _topology(node, worked)
        judged += _isolation(node, worked)
    return judged


def _node(node: Node) -> list[LiveFinding]:
    address, gpus, judged = node["address"], node["gpus"], []
    if node["num_pci_gpus"] > len(gpus):
        judged.append(
            about(
                [address],
                "driver-not-working",
                f"{address} has {node['num_pci_gpus']} NVIDIA GPUs on its PCI bus, and nvidia-smi shows {len(gpus)}.",
                f"{address}: {node['num_pci_gpus']} on PCI, {len(gpus)} by nvidia-smi",
                [
                    "`nvidia-smi` on that node says why; `dmesg | grep -i -e nvrm -e xid` shows a GPU that fell off "
                    "the bus.",
                    "No driver at all: take an image that carries it (docs/clusters.md). After a kernel update: "
                    "reboot.",
                ],
            )
        )
    promised = node.get("ray_gpus", 0)
    if promised > len(gpus):
        judged.append(
            about(
                [address],
                "gpu-missing",
                f"Ray gives away {promised} GPUs of {address}, and the node shows {len(gpus)}: ranks on the others "
                "fail.",
                f"{address}: Ray {promised}, nvidia-smi {len(gpus)}",
                ["Start Ray with --num-gpus as many as there are; the cluster file's `resources` says otherwise."],
            )
        )
    if gpus:
        judged += _software(node)
    for code, judge in _GPU.items():
        bad = [(gpu, why) for gpu in gpus if (why := judge(gpu))]
        if bad:
            meaning, advice = _TEXTS[code]
            lines = [f"GPU {gpu['index']} ({gpu['name']}) {why}" for gpu, why in bad]
            judged.append(
                about([address], code, f"{address}: {some(lines)}. {meaning}", f"{address}: {lines[0]}", advice)
            )
    return judged


def _software(node: Node) -> list[LiveFinding]:
    address, versions = node["address"], node["versions"]
    cuda, driver_cuda = versions.get("cuda"), versions.get("driver_cuda")
    if cuda is None:
        return [
            about(
                [address],
                "torch-without-cuda",
                f"{address} has GPUs, and torch {versions.get('torch')} is a build without CUDA.",
                f"{address}: torch {versions.get('torch')}, no CUDA",
                ["pip install torch without the CPU index; on the nodes `ray up` does so."],
            )
        ]
    if driver_cuda is not None and _major(cuda) > _major(driver_cuda):
        return [
            about(
                [address],
                "driver-too-old",
                f"The driver {versions.get('driver')} of {address} runs programs of CUDA {driver_cuda} at most, and "
                f"torch is built for CUDA {cuda}.",
                f"{address}: driver {versions.get('driver')} (CUDA {driver_cuda}), torch for CUDA {cuda}",
                [
                    f"A newer driver, or a torch built for CUDA {_major(driver_cuda)}: pip install torch --index-url "
                    f"https://download.pytorch.org/whl/cu{_major(driver_cuda)}…, on every node."
                ],
            )
        ]
    return []


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match.group()) if match else 0


def _alike(nodes: Sequence[Node]) -> list[LiveFinding]:
    judged = []
    models = by_value(nodes, _model)
    if len(models) > 1:
        judged.append(
            about(
                odd_ones(models),
                "gpus-differ",
                f"Nodes have different GPUs: {told(models)}. Every step waits for the slowest.",
                told(models),
                ["Name the tracks' layouts so that they use one kind, or rent one kind."],
            )
        )
    drivers = by_value(nodes, lambda node: node["versions"].get("driver"))
    if len(drivers) > 1:
        judged.append(
            about(
                odd_ones(drivers),
                "driver-differs",
                f"The NVIDIA driver differs between nodes: {told(drivers)}. NCCL mostly works so; features that only "
                "one of them has (NVLS, cuMem, DMA-BUF) make ranks choose differently.",
                told(drivers),
                ["Use one image for all nodes."],
            )
        )
    return judged


def _model(node: Node) -> str | None:
    counts = Counter(gpu["name"] for gpu in node["gpus"])
    return ", ".join(f"{number} × {name}" for name, number in sorted(counts.items())) or None  # a head may have none


def _in_use(gpu: Gpu) -> str | None:
    used, total = gpu["used_bytes"], gpu["memory_bytes"]
    if used is None or used <= LARGEST_USE:
        return None
    by = f" by {some(gpu['processes'])}" if gpu["processes"] else ""
    return f"has {size(used)}{f' of {size(total)}' if total else ''} in use{by}"


def _memory_errors(gpu: Gpu) -> str | None:
    if gpu["uncorrected_errors"]:
        return f"has {gpu['uncorrected_errors']} memory errors that ECC could not correct"
    return "has memory that waits to be remapped" if gpu["pending_repair"] else None


def _throttled(gpu: Gpu) -> str | None:
    if not gpu["slowdowns"]:
        return None
    heat = "" if gpu["temperature_c"] is None else f" at {gpu['temperature_c']} °C"
    return f"is slowed down{heat}: {', '.join(gpu['slowdowns'])}"


def _narrow(gpu: Gpu) -> str | None:
    width, most = gpu["link_width"], gpu["max_link_width"]
    return f"uses {width} of {most} PCIe lanes" if width and most and width < most else None


_GPU: Final[dict[str, Callable[[Gpu], str | None]]] = {
    "gpu-in-use": _in_use,
    "gpu-memory-errors": _memory_errors,
    "gpu-throttled": _throttled,
    "gpu-link-degraded": _narrow,
}
_TEXTS: Final[dict[str, tuple[str, list[str]]]] = {
    "gpu-in-use": (
        "What is measured there is shared, and the largest micro-batch smaller.",
        ["End those processes, or wait for them; nobody there: `nvidia-smi --gpu-reset` with the GPU idle."],
    ),
    "gpu-memory-errors": (
        "Results may be wrong and kernels fail with Xid 48, 63, 64 or 94.",
        ["Reset the GPU or reboot, and have it exchanged if errors come back: `nvidia-smi -q -d ECC,ROW_REMAPPER`."],
    ),
    "gpu-throttled": (
        "Its ranks hold all others up.",
        ["Cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`; in the cloud take another instance."],
    ),
    "gpu-link-degraded": (
        "Traffic through host memory and to NICs is that much slower.",
        ["Reseat the card or riser, look at the slot's bifurcation in the BIOS; in the cloud take another instance."],
    ),
}


def _worked_within(collectives: Sequence[Collective], address: str) -> bool | None:
    """Whether the all-reduce between two GPUs of a node worked; None if there was none."""
    for each in collectives:
        if each["stage"] == "within" and each["backend"] == "nccl" and set(each["nodes"]) == {address}:
            return each["status"] == "ok"
    return None


def _topology(node: Node, worked: bool | None) -> list[LiveFinding]:
    """What the reader of `nvidia-smi topo -m` finds; a hang that has just not happened is no risk any more."""
    if not node["topology"]:
        return []
    answer = read_topo(node["topology"])
    judged = []
    for each in answer.get("findings", ()):
        if each["code"] == _ISOLATION and worked:
            continue
        mend = {}
        if each["code"] == "mixed-nvlink-pcie":
            mend = {"NCCL_P2P_LEVEL": "NVL"}
        elif each["code"] == _ISOLATION and worked is False:
            mend = {"NCCL_P2P_DISABLE": "1"}
        judged.append(from_reader(each, [node["address"]], mend))
    return judged


def _isolation(node: Node, worked: bool | None) -> list[LiveFinding]:
    """ACS, the IOMMU, and the module that lets NICs reach GPU memory."""
    address, judged = node["address"], []
    mend = {"NCCL_P2P_DISABLE": "1"} if worked is False else {}
    tested = "" if worked is None else " It worked just now." if worked else " It did not work just now."
    if len(node["gpus"]) > 1 and node["acs_bridges"]:
        judged.append(
            about(
                [address],
                "acs-enabled",
                f"{len(node['acs_bridges'])} PCI bridges of {address} have Access Control Services on: traffic "
                f"between two GPUs goes up to the CPU and back, slowly, or never arrives.{tested}",
                f"{address}: ReqRedir+ on {some(node['acs_bridges'])}",
                [
                    "On bare metal: ACS off in the BIOS, or `setpci -s BRIDGE ECAP_ACS+6.w=0` for each at every boot.",
                    "In a virtual machine it is the provider's: NCCL_P2P_DISABLE=1 where the all-reduce hangs "
                    "(through shared memory then, slower).",
                ],
                mend,
            )
        )
    translating = [gpu for gpu in node["gpus"] if (gpu["iommu"] or "").startswith("DMA")]
    if len(node["gpus"]) > 1 and translating:
        judged.append(
            about(
                [address],
                "iommu-not-passthrough",
                f"The IOMMU of {address} translates the addresses of GPUs, with which peer-to-peer can hang or "
                f"corrupt.{tested}",
                f"{address}: iommu_group type {translating[0]['iommu']} of {translating[0]['bus_id']}",
                ["Boot with iommu=pt (and intel_iommu=on or amd_iommu=on), or switch VT-d / AMD-Vi off in the BIOS."],
                mend,
            )
        )
    active = [port["name"] for port in node["rdma"] if port["is_active"]]
    if node["gpus"] and active and not _gpudirect(node):
        judged.append(
            about(
                [address],
                "no-gpudirect-rdma",
                f"{address} has RDMA adapters ({some(active)}), and no way for them to reach GPU memory: every byte "
                "is copied through host memory.",
                f"{address}: nvidia_peermem is not loaded, the driver's modules are "
                f"{'open' if node['has_open_driver'] else 'closed'}, kernel {node['kernel']}",
                [
                    "sudo modprobe nvidia-peermem, at every boot (/etc/modules-load.d); or the driver's open modules "
                    "on Linux 5.12."
                ],
            )
        )
    return judged


def _gpudirect(node: Node) -> bool:
    """By its module, or through DMA-BUF, which the open modules offer from Linux 5.12 on."""
    kernel = tuple(int(part) for part in re.findall(r"\d+", node["kernel"])[:2])
    return "nvidia_peermem" in node["modules"] or (node["has_open_driver"] and kernel >= _DMA_BUF_KERNEL)
