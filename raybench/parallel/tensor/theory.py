"""What tensor parallelism has to send and keep, from sizes alone: what the recorder and the meter are held against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from raybench.suite.track import Workload

Strategy = Literal["megatron", "sequence"]
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """One kind of collective, over a tensor group."""

    calls: int
    payload_bytes: int
    """Of all calls together: size of the whole tensor that each is about."""


def block_traffic(strategy: Strategy, workload: Workload) -> dict[str, Traffic]:
    """Of one block and micro-batch, forward and backward, without recomputation.

    `megatron`: an all-reduce of batch · sequence · width after each of the two pairs of matrices, and one of each
    pair's input gradient. `sequence`: each of the four is a reduce-scatter and an all-gather; backward gathers the
    inputs of both pairs again, since only parts are kept.
    """
    hidden = _hidden_bytes(workload)
    if strategy == "megatron":
        return {"all_reduce": Traffic(4, 4 * hidden)}
    return {"reduce_scatter": Traffic(4, 4 * hidden), "all_gather": Traffic(4 + 2, 6 * hidden)}


def step_traffic(strategy: Strategy, workload: Workload, size: int) -> dict[str, Traffic]:
    """Of one step of a data rank over its tensor group, fp32, without recomputation and grouped heads.

    The blocks; the embedding's output; the head's input gradient; three numbers a token and rank for the loss; and with
    `sequence`, once a step, the gradients of norms and positions.
    """
    model, hidden = workload.model, _hidden_bytes(workload)
    tokens = workload.micro_batch_size * workload.sequence_length
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()

    def add(kind: str, number: int, num_bytes: int) -> None:
        calls[kind] += number
        payload[kind] += number * num_bytes

    for _ in range(workload.num_micro_batches):
        for kind, traffic in block_traffic(strategy, workload).items():
            add(kind, model.num_layers * traffic.calls, traffic.payload_bytes // traffic.calls)
        add("all_gather", 1, size * 3 * tokens * FLOAT_BYTES)
        if strategy == "megatron":
            add("all_reduce", 2, hidden)
        else:
            add("reduce_scatter", 2, hidden)  # embedding forward, head backward
            add("all_gather", 3, hidden)  # embedding backward; head forward and once again
    if strategy == "sequence":
        num_norms = 1 + (2 * model.num_layers if model.name == "gpt" else 0)
        norms = num_norms * 2 * model.width
        add("all_reduce", 1, (norms + workload.sequence_length * model.width) * FLOAT_BYTES)
    return {kind: Traffic(calls[kind], payload[kind]) for kind in calls}


def block_activation_bytes(strategy: Strategy, workload: Workload, size: int) -> int:
    """Bytes that one block keeps for backward on one rank, fp32, no dropout, fused attention.

    Korthikanti et al. (2022), equations 2 and 4, whose sbh · (10 + 24/t + …) and sbh/t · (34 + …) count two bytes a
    value, one-byte dropout masks (2 of the 10) and the scores of attention (…), which a fused kernel does not keep.
    With a feed-forward width f: four inputs (norms and first matrices) of b·s·h, and of what is cut queries, keys,
    values, attention's output, and both sides of GELU.
    """
    model = workload.model
    tokens = workload.micro_batch_size * workload.sequence_length
    kv_width = 2 * model.width // model.num_heads * max(model.kv_heads, size)
    cut = (2 * model.width + kv_width + 2 * model.ffn_width) // size
    inputs = 4 * model.width // (size if strategy == "sequence" else 1)
    return tokens * FLOAT_BYTES * (inputs + cut)


def _hidden_bytes(workload: Workload) -> int:
    return workload.micro_batch_size * workload.sequence_length * workload.model.width * FLOAT_BYTES
