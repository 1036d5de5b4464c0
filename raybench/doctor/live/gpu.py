"""A node's GPUs: `nvidia-smi -q -x` in full, and what torch brings for them."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from typing import Final

from raybench.doctor.live.facts import Gpu
from raybench.doctor.live.pci import iommu_type

TIMEOUT_S = 20.0
"""A driver in trouble lets nvidia-smi hang."""
_HARMFUL: Final = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for lower clocks that are no sign of work; idling and a power cap under load are."""


def run_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints, or None where it is missing, fails or hangs."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_smi(xml: str | None) -> tuple[list[Gpu], dict[str, str | None]]:
    """The GPUs in the answer of `nvidia-smi -q -x`, and the versions `driver` and `driver_cuda`."""
    try:
        root = ET.fromstring(xml or "<none/>")
    except ET.ParseError:
        root = ET.Element("none")
    versions = {"driver": _text(root, "driver_version"), "driver_cuda": _text(root, "cuda_version")}
    return [_gpu(index, element) for index, element in enumerate(root.findall("gpu"))], versions


def torch_versions() -> dict[str, str | None]:
    """The CUDA and NCCL that torch was built with. Imports torch."""
    import torch

    if not torch.version.cuda:
        return {"cuda": None, "nccl": None}
    found = torch.cuda.nccl.version()
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, found))}


def _gpu(index: int, element: ET.Element) -> Gpu:
    bus_id = element.get("id", "")
    widths = "pci/pci_gpu_link_info/link_widths/"
    return {
        "index": index,
        "name": _text(element, "product_name") or "unknown",
        "bus_id": bus_id,
        "memory_bytes": _mebibytes(element, "fb_memory_usage/total"),
        "used_bytes": _mebibytes(element, "fb_memory_usage/used"),
        "processes": [_process(process) for process in element.findall("processes/process_info")],
        "uncorrected_errors": _uncorrected(element.find("ecc_errors/volatile")),
        "pending_repair": any(
            (_text(element, place) or "").lower() in ("yes", "pending")
            for place in ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
        ),
        "slowdowns": _slowdowns(element),
        "temperature_c": _number(_text(element, "temperature/gpu_temp")),
        "link_width": _number(_text(element, f"{widths}current_link_width")),
        "max_link_width": _number(_text(element, f"{widths}max_link_width")),
        "iommu": iommu_type(bus_id),
    }


def _process(element: ET.Element) -> str:
    parts = [_text(element, "process_name"), _text(element, "used_memory")]
    return " ".join([f"pid {_text(element, 'pid')}", *(part for part in parts if part)])


def _uncorrected(volatile: ET.Element | None) -> int | None:
    """All uncorrectable errors: newer drivers count them by kind of memory, older ones give a total."""
    if volatile is None:
        return None
    counts = [
        number
        for child in volatile.iter()
        if child.tag in ("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity")
        or child.tag == "sram_uncorrectable_secded"
        if (number := _number(child.text)) is not None
    ]
    total = _number(_text(volatile, "double_bit/total"))
    return sum(counts) if counts else total


def _slowdowns(element: ET.Element) -> list[str]:
    """`clocks_event_reasons` since driver 535, `clocks_throttle_reasons` or `throttle_reasons` before."""
    active = {
        re.sub(r"^clocks_(?:event|throttle)_reason_", "", reason.tag)
        for group in element
        if group.tag in ("clocks_event_reasons", "clocks_throttle_reasons")
        for reason in group
        if (reason.text or "").strip() == "Active"
    }
    return [name for name in _HARMFUL if name in active]


def _text(element: ET.Element, place: str) -> str | None:
    text = (element.findtext(place) or "").strip()
    return None if text in ("", "N/A", "[N/A]") else text


def _number(text: str | None) -> int | None:
    match = re.match(r"\d+", (text or "").strip())
    return int(match.group()) if match else None


def _mebibytes(element: ET.Element, place: str) -> int | None:
    number = _number(_text(element, place))
    return None if number is None else number * 2**20
