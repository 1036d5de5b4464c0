"""Peak speeds of GPUs, dense and without sparsity, each with where it was read. A device that is not here has none."""

from __future__ import annotations

import re
from dataclasses import dataclass

A10 = "NVIDIA A10 datasheet"
A100 = "NVIDIA A100 datasheet"
ML_ENGINEERING = "stas00/ml-engineering, compute/accelerator"
LIGHTNING = "Lightning, fabric/utilities/throughput.py"


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of one GPU in matrix products; None where it has no such unit, or no figure was found."""

    pattern: str
    """Regular expression that a whole word of torch's device name begins with."""
    source: str
    fp32: float
    tf32: float | None
    bf16: float | None


PEAKS = (
    Peak(r"GB300", ML_ENGINEERING, 80, 1250, 2500),
    Peak(r"GB200", ML_ENGINEERING, 80, 1250, 2500),
    Peak(r"B300", ML_ENGINEERING, 80, 1125, 2250),
    Peak(r"B200", ML_ENGINEERING, 80, 1125, 2250),
    Peak(r"GH200|H200", ML_ENGINEERING, 67, 494.5, 989),
    Peak(r"H100 PCIe", ML_ENGINEERING, 51, 378, 756),
    Peak(r"H100 80GB HBM3", ML_ENGINEERING, 67, 494.5, 989),
    Peak(r"A100", A100, 19.5, 156, 312),
    Peak(r"L40S", ML_ENGINEERING, 91.6, 183, 362),
    Peak(r"A10(?!\w)", A10, 31.2, 62.5, 125),
    Peak(r"V100-SXM", LIGHTNING, 15.7, None, None),
    Peak(r"V100-PCIE", LIGHTNING, 14.0, None, None),
    Peak(r"T4(?!\w)", LIGHTNING, 8.1, None, None),
    Peak(r"L4(?!\w)", "NVIDIA L4 datasheet", 30.3, 60, 121),
    Peak(r"MI300X", ML_ENGINEERING, 163.4, 653.7, 1300),
)


def peak_of(device: str, precision: str, tf32: bool) -> tuple[float, str] | None:
    """FLOP/s of one device at a precision, and the figure's source; None for an unknown device, never a guess.

    Args:
        device: torch's name of it; several different devices have no common peak.
        precision: `fp32` or `bf16`.
        tf32: whether fp32 products may use TF32 units; devices without them run in fp32.
    """
    for peak in PEAKS:
        if "," not in device and re.search(rf"(?<!\w)(?:{peak.pattern})", device):
            fp32, name = (peak.tf32, "tf32") if tf32 and peak.tf32 else (peak.fp32, "fp32")
            speed = peak.bf16 if precision == "bf16" else fp32
            return None if speed is None else (speed * 1e12, f"{peak.source}, {precision if speed != fp32 else name}")
    return None
