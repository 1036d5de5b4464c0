"""Jobs started by Ray Train: one `TorchTrainer` a job, retrying nothing."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2.api.exceptions import WorkerGroupError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raybench.suite.job import RankJob, read_job
from raybench.suite.placement import Placement
from raybench.worker.heap import ONE_ARENA
from raybench.worker.identity import Identity
from raybench.worker.main import GROUP_TIMEOUT_S, LOOP, run, wait_until_done
from raybench.worker.network import choose_interface

UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")
NSIGHT = {
    "t": "cuda,nvtx",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "kill": "none",
    "o": "'raybench_%h_%p'",
}
"""How nsys is started around a worker: it records the traced steps alone."""
STOP_S = 30.0
"""How long Ray may take to end a job."""
PATIENCE_S = 5.0
"""How long ranks that follow a lost one may take to say so before Ray ends them."""


class RayLauncher:
    """Starts jobs on the Ray cluster that this process is connected to."""

    def __init__(self, *, loop: str = LOOP) -> None:
        self._loop = loop

    def start(self, job: RankJob, placement: Placement) -> RayJob:
        return RayJob(job, placement, self._loop)


class RayJob:
    """A job under Ray Train, in a thread of its own."""

    def __init__(self, job: RankJob, placement: Placement, loop: str) -> None:
        self._end: str | None = None
        self._storage = tempfile.mkdtemp(prefix="raybench-ray-")
        self._trainer = _Trainer(
            _run_rank,
            train_loop_config={"job": job.model_dump_json(), "loop": loop},
            torch_config=_Config(backend=job.backend, timeout_s=GROUP_TIMEOUT_S),
            scaling_config=ScalingConfig(
                num_workers=placement.num_ranks,
                use_gpu=placement.use_gpu,
                resources_per_worker=_resources(placement),
                placement_strategy=placement.strategy,
                label_selector=_node_selectors(placement),
            ),
            run_config=RunConfig(
                storage_path=self._storage,
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
                worker_runtime_env=_runtime_environment(job),
            ),
        )
        self._thread = threading.Thread(target=self._fit, name="ray-train-job", daemon=True)
        self._thread.start()

    def poll(self) -> str | None:
        return None if self._thread.is_alive() else self._end

    def wait(self, timeout: float) -> str | None:
        self._thread.join(timeout)
        return self.poll()

    def stop(self) -> None:
        end = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < end:
            self._trainer.kill()
            self._thread.join(1.0)
        self._trainer.release()
        shutil.rmtree(self._storage, ignore_errors=True)

    def _fit(self) -> None:
        try:
            self._trainer.fit()
            self._end = ""
        except BaseException as error:
            self._end = _one_line(error)


def _runtime_environment(job: RankJob) -> dict[str, Any]:
    """What Ray starts a rank's process with."""
    heap = ONE_ARENA if job.backend == "gloo" else {}
    return {"env_vars": {**heap, **job.environment}, **({"nsight": NSIGHT} if job.with_nsys else {})}


def _resources(placement: Placement) -> dict[str, float]:
    resources = {"CPU": placement.cpus_per_rank} if placement.cpus_per_rank else {}
    return {"GPU": 1, **resources} if placement.use_gpu else resources


def _node_selectors(placement: Placement) -> list[dict[str, str]] | None:
    """For every rank the label of the node that it must be on."""
    selectors = [{} if name is None else {ray._raylet.RAY_NODE_ID_KEY: name} for name in placement.node_ids]
    return selectors if any(selectors) else None


def _run_rank(config: dict[str, str]) -> None:
    """What Ray calls on every rank."""
    context = ray.train.get_context()
    identity = Identity(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        node=ray.util.get_node_ip_address(),
    )
    run(read_job(config["job"]), identity, loop=config["loop"])


def _one_line(error: BaseException) -> str:
    """Why a fit failed, as one line: the first rank's error where ranks failed."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, cause = min(error.worker_failures.items())
        return f"rank {rank}: {_last_line(cause)}"
    return _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}"[:400] if lines else type(error).__name__


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """A trainer whose controller can be ended, without the helper actors of Ray Train that a job has no use for.

    The placement-group cleaner asks the dashboard about the controller. Without a dashboard, or with the address of
    another Ray, every question ends in a warning, and the end of the fit waits for the last; `release` does its work.
    The others serve Ray datasets, and ask the autoscaler for nodes, for which the placement group asks already.
    """

    _controller: Any = None

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        return [c for c in callbacks if type(c).__name__ not in UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """As in the base class, keeping the controller."""
        environment = get_env_vars_to_propagate()
        environment.setdefault(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        controller_class = ray.remote(num_cpus=0, label_selector=here, runtime_env={"env_vars": environment})(
            TrainController
        )
        self._controller = controller_class.remote(**{**arguments, "scaling_policy": _Fixed(self.scaling_config)})
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())

    def kill(self) -> None:
        """End the controller, and with it its workers."""
        if self._controller is not None:
            ray.kill(self._controller)

    def release(self) -> None:
        """Remove the placement group that a killed controller leaves until the driver's end, with its resources."""
        if self._controller is None or not ray.is_initialized():
            return
        for data in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
            group = PlacementGroupTableData.FromString(data)
            if group.creator_actor_id == self._controller._actor_id.binary():
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


class _Fixed(FixedScalingPolicy):  # type: ignore[misc]
    """Ray's own, without an actor that asks the autoscaler."""

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Ray's own, with the network interface chosen before the group is made; ranks close the group themselves."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_choose_interface)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        futures = worker_group.execute_async(wait_until_done, PATIENCE_S)
        ray.wait(futures, num_returns=len(futures), timeout=PATIENCE_S + 1)


def _choose_interface() -> None:
    choose_interface(ray.util.get_node_ip_address())


@dataclass
class _Config(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend
