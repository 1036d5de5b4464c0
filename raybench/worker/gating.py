"""Runs the gate inside a job: one control for all cases that share a global batch, smaller where it would not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from raybench.data.batches import Batches
from raybench.models.flops import num_parameters
from raybench.parallel.strategy import OptimizerFactory, Strategy
from raybench.suite.track import Case, Workload
from raybench.worker.build import build_control, build_strategy
from raybench.worker.gate import (
    NUM_STEPS,
    GateResult,
    Reference,
    bf16_errors,
    check,
    check_bf16,
    compute_reference,
)
from raybench.worker.mesh import Mesh
from raybench.worker.recorder import Recorder
from raybench.worker.rendezvous import Rendezvous

CONTROL_BYTES_PER_PARAMETER = 16
"""Parameters, gradients and two moments in fp32."""
REFERENCE_BYTES_PER_PARAMETER = 16
"""What the reference keeps in host memory: gradients, initial values, two sets of updates."""
MEMORY_SHARE = 0.5
"""Part of a memory that the control's states may take; activations need the rest."""


@dataclass
class GateKeeper:
    """Gates the cases of one job, seen from one rank. The first rank keeps the references."""

    device: torch.device
    recorder: Recorder
    rendezvous: Rendezvous
    references: dict[str, tuple[Reference, dict[str, float] | None]] = field(default_factory=dict)

    def run(self, workload: Workload, case: Case, mesh: Mesh) -> tuple[GateResult, dict[str, Any]]:
        """The result, and the gate's columns of `runs`; the same on every rank of the case."""
        gated = gate_workload(workload, self.device)
        batches = Batches(gated, case.layout.data)
        key = f"{gated.hash}/{case.layout.data}"
        reference, allowed = None, None
        if mesh.all.index == 0:
            if key not in self.references:
                self.recorder.marks.mark("control of the gate")
                self.references[key] = self._reference(gated, batches, mesh.all.ranks[0])
            reference, allowed = self.references[key]
        self.rendezvous.meet(mesh.all, f"reference {case.name}")
        own = [batches.batch(step, mesh.data.index).to(self.device) for step in range(NUM_STEPS)]

        def build(precise: Workload, factory: OptimizerFactory | None) -> Strategy:
            return build_strategy(precise, case, mesh, self.device, factory)

        fp32 = gated.model_copy(update={"precision": "fp32"})
        result = check(lambda factory: build(fp32, factory), own, reference, mesh.all)
        if gated.precision == "bf16" and result.passed:
            result = check_bf16(result, lambda factory: build(gated, factory), own[0], reference, allowed, mesh.all)
        scope = "full" if gated.model.num_layers == workload.model.num_layers else "reduced"
        return result, {
            "gate": "passed" if result.passed else "failed",
            "gate_scope": scope,
            "gate_worst_parameter": result.worst_parameter,
            "gate_worst_error": result.worst_error,
            "environment": {"null_parameters": result.null_parameters},
        }

    def _reference(self, workload: Workload, batches: Batches, rank: int) -> tuple[Reference, dict[str, float] | None]:
        global_batches = [batches.global_batch(step).to(self.device) for step in range(NUM_STEPS)]
        plain = workload.model_copy(update={"recompute": "none", "compile": False})

        def build(precise: Workload, factory: OptimizerFactory | None) -> Strategy:
            return build_control(precise, rank, self.device, self.recorder, factory)

        fp32 = plain.model_copy(update={"precision": "fp32"})
        reference = compute_reference(lambda factory: build(fp32, factory), global_batches, workload.clip_gradient_norm)
        if workload.precision == "fp32":
            return reference, None
        return reference, bf16_errors(lambda factory: build(plain, factory), global_batches[0], reference)


def gate_workload(workload: Workload, device: torch.device) -> Workload:
    """What is gated: without dropout and TF32, and with fewer layers where the control would not fit."""
    model = workload.model.model_copy(update={"dropout": 0.0})
    plain = workload.model_copy(update={"model": model, "tf32": False})
    while not control_fits(plain, device) and model.num_layers > 1:
        model = model.model_copy(update={"num_layers": model.num_layers // 2})
        plain = plain.model_copy(update={"model": model})
    return plain


def control_fits(workload: Workload, device: torch.device) -> bool:
    """Whether one process can hold the whole model's states (for a model of one's own: assumed)."""
    parameters = num_parameters(workload)
    if parameters is None:
        return True
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return parameters * CONTROL_BYTES_PER_PARAMETER <= memory * MEMORY_SHARE
    return parameters * (CONTROL_BYTES_PER_PARAMETER + REFERENCE_BYTES_PER_PARAMETER) <= host * MEMORY_SHARE
