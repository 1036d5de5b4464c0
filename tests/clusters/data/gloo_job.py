"""A job as small as one can be that still needs every host: four gloo ranks, one all-reduce, one file of results."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer


def loop(config: dict[str, Any]) -> None:
    tensor = torch.full((config["elements"],), float(dist.get_rank() + 1))
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(config["repeats"]):
        total = tensor.clone()
        dist.all_reduce(total)
    seconds = (time.perf_counter() - begin) / config["repeats"]
    assert bool((total == 10.0).all())
    mine = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "node_rank": get_context().get_node_rank(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "nccl_env": os.environ.get("RAYBENCH_NCCL_ENV"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "seconds": seconds,
    }
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    report({"rows": json.dumps(rows)})
    if dist.get_rank() == 0:
        print("ROWS " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    trainer = TorchTrainer(
        loop,
        train_loop_config={"elements": int(os.environ.get("ELEMENTS", "1000000")), "repeats": 3},
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo", timeout_s=120),
    )
    trainer.fit()
    results = Path.home() / "raybench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "job.json").write_text(json.dumps({"finished": time.time()}))
    print("JOB DONE", flush=True)
