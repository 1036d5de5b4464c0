"""Runs one step of any schedule on one rank: its actions from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from raybench.data.batches import Batch, MicroBatch
from raybench.errors import RequestError
from raybench.parallel.execution import BackwardObserver, LossSum
from raybench.parallel.pipeline.actions import COMPUTE, FREES_ACTIVATION, SENDS, Action, Kind
from raybench.parallel.pipeline.backward import Pass, SplitPass, leaf
from raybench.parallel.pipeline.plan import Plan
from raybench.parallel.pipeline.release import releases
from raybench.parallel.pipeline.stage import Stage
from raybench.suite.track import Precision
from raybench.worker.channel import Transfer
from raybench.worker.mesh import Mesh

SPANS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input_gradient",
    Kind.WEIGHT_GRADIENT: "weight_gradient",
}
"""What each action is called in the table of operations."""

Like = tuple[torch.Size, torch.dtype]
"""Shape and dtype of what passes between stages."""


class ScheduleRunner:
    """An execution that follows a schedule.

    Receives are posted where the schedule says and waited for by the action that uses them; sends are begun at once and
    their tensors let go as soon as the plan itself tells that they arrived. All state of a step is in `_Step`, made
    anew for each, so that nothing of one step can reach another.
    """

    recorded = True

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], mesh: Mesh, loss_sum: LossSum, precision: Precision
    ) -> None:
        schedule = self.schedule = plan.schedule
        self.place = mesh.pipeline.index
        self.stages = {stage.index: stage for stage in stages}
        self.mesh = mesh
        self.loss_sum = loss_sum
        self.precision = precision
        self.device = mesh.recorder.device
        self.actions = schedule.actions[self.place]
        self.releases = releases(schedule, self.place)
        self.completing = self._completing()
        self.is_split = any(action.kind is Kind.WEIGHT_GRADIENT for action in self.actions)
        self.gradient_kind = Kind.INPUT_GRADIENT if self.is_split else Kind.BACKWARD
        self._like: dict[object, Like] = {}
        mesh.open_channels()

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        batch = recut(batch, self.schedule.num_micro_batches)
        step = _Step(self, batch, observer, [self._passes_on(micro_batch) for micro_batch in batch.micro_batches])
        for action in self.actions:
            step.do(action)
        step.end()
        return step.loss

    def _completing(self) -> set[Action]:
        """The backward passes after which no parameter that they reach gets more: each stage's last one.

        Where two stages of this rank share a parameter (both ends of a V), the earlier of their last passes is none.
        """
        last = {action.stage: (i, action) for i, action in enumerate(self.actions) if action.kind in FREES_ACTIVATION}
        own = {index: set(stage.parameters()) for index, stage in self.stages.items()}
        return {
            action
            for place, action in last.values()
            if not any(later > place and own[action.stage] & own[other.stage] for later, other in last.values())
        }

    def _passes_on(self, micro_batch: MicroBatch) -> Like:
        """Shape and dtype of the hidden states of a micro-batch.

        The rank of the first stage tells them for each shape of inputs that is new; all ranks see the same
        micro-batches.
        """
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(micro_batch.inputs.items()))
        if key not in self._like:
            own: Like | None = None
            if 0 in self.stages:
                with torch.no_grad(), self.autocast(), torch.random.fork_rng(self._devices()):
                    hidden = self.stages[0].embed(micro_batch.inputs)
                own = (hidden.shape, hidden.dtype)
            self._like[key] = self.mesh.pipeline.gather_objects(own)[self.schedule.placement[0]]
        return self._like[key]

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def random_state(self) -> list[Tensor]:
        """The state of every generator that a forward pass may draw from."""
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices())]

    @contextmanager
    def random_state_of(self, state: Sequence[Tensor]) -> Iterator[None]:
        """Draw once more what was drawn from `state` on; afterwards the generators stand where they stood."""
        with torch.random.fork_rng(self._devices()):
            torch.set_rng_state(state[0])
            for device, own in zip(self._devices(), state[1:], strict=True):
                torch.cuda.set_rng_state(own, device)
            yield


class _Step:
    """One step: what has been received, computed and sent so far."""

    def __init__(self, runner: ScheduleRunner, batch: Batch, observer: BackwardObserver, like: Sequence[Like]) -> None:
        self.runner = runner
        self.schedule = runner.schedule
        self.batch = batch
        self.observer = observer
        self.like = like
        self.loss = torch.zeros((), device=runner.device)
        self._passes: dict[tuple[int, int], Pass | SplitPass] = {}
        """By stage and micro-batch, forward passes whose backward is to come."""
        self._outputs: dict[Action, Tensor] = {}
        """By the action that made it, what is to be sent or handed over."""
        self._receives: dict[Action, Transfer] = {}
        self._sends: dict[Action, Transfer] = {}

    def do(self, action: Action) -> None:
        if action.kind in SENDS:
            self._send(action)
        elif action.kind in COMPUTE:
            self._compute(action)
        else:
            self._receive(action)

    def end(self) -> None:
        """Return once all that this rank sent has arrived."""
        for transfer in self._sends.values():
            transfer.wait(", at the end of the step")

    # Transfers

    def _send(self, action: Action) -> None:
        receive = action.matching_receive()
        kind = Kind.FORWARD if action.kind is Kind.SEND_ACTIVATION else self.runner.gradient_kind
        tensor = self._outputs.pop(Action(kind, action.stage, action.micro_batch)).contiguous()
        shape, dtype = self.like[action.micro_batch]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise RequestError(
                f"stage {action.stage} gives {tensor.dtype} of shape {list(tensor.shape)}, but the embedding gave "
                f"{dtype} of shape {list(shape)}: stages can only pass on tensors alike"
            )
        channel = self.runner.mesh.channel(self.runner.place, self.schedule.placement[receive.stage])
        self._sends[action] = channel.send(tensor, label=_label(action))

    def _receive(self, action: Action) -> None:
        send = action.matching_send()
        shape, dtype = self.like[action.micro_batch]
        buffer = torch.empty(shape, dtype=dtype, device=self.runner.device)
        channel = self.runner.mesh.channel(self.schedule.placement[send.stage], self.runner.place)
        self._receives[action] = channel.receive(buffer, label=_label(send))

    def _take_input(self, action: Action, neighbour: int) -> Tensor:
        """What the stage `neighbour` made for `action`, received or handed over on this rank."""
        receive = self.schedule.input_of(action)
        if receive is not None:
            return self._receives.pop(receive).wait(f", to compute {action}")
        return self._outputs.pop(Action(action.kind, neighbour, action.micro_batch))

    # Computation

    def _compute(self, action: Action) -> None:
        """Wait for the input, then compute under the action's name."""
        given: Tensor | None = None
        if action.kind is Kind.FORWARD and action.stage > 0:
            given = self._take_input(action, action.stage - 1)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            is_last = action.stage == self.schedule.num_stages - 1
            given = torch.ones_like(self.loss) if is_last else self._take_input(action, action.stage + 1)
        for send in self.runner.releases.get(action, ()):
            self._sends.pop(send).wait(f", before {action}")
        recorder = self.runner.mesh.recorder
        kind = SPANS[action.kind]
        recorder.marks.mark(f"stage {action.stage}: {kind.replace('_', ' ')} of micro-batch {action.micro_batch}")
        with recorder.spans.span(kind, str(action)), _named_range(action, self.runner.device):
            match action.kind:
                case Kind.FORWARD:
                    self._forward(action, given)
                case Kind.WEIGHT_GRADIENT:
                    self._weight_gradient(action)
                case _:
                    assert given is not None
                    self._backward(action, given)

    def _forward(self, action: Action, given: Tensor | None) -> None:
        passed: Pass | SplitPass
        if self.runner.is_split:
            passed, output = self._split_forward(action, given)
        else:
            entry = None if given is None else leaf(given)
            output = self._rest(action, entry, recompute=None)
            passed = Pass(entry, output)
        self._passes[action.stage, action.micro_batch] = passed
        if self.runner.stages[action.stage].is_last:
            self.loss += output.detach()
        else:
            self._outputs[action] = output.detach()

    def _split_forward(self, action: Action, given: Tensor | None) -> tuple[SplitPass, Tensor]:
        """The pass, and the output; with recomputation only the stage's input is kept of it."""
        runner, stage = self.runner, self.runner.stages[action.stage]
        embedded: Tensor | None = None
        if given is None:
            with runner.autocast():
                given = embedded = stage.embed(self.batch.micro_batches[action.micro_batch].inputs)
        entry = leaf(given)
        if not stage.recompute:
            output = self._rest(action, entry, recompute=False)
            return SplitPass(entry, output, embedded=embedded), output
        state = runner.random_state()
        with torch.no_grad():
            output = self._rest(action, entry, recompute=False)

        def again() -> Tensor:
            with runner.random_state_of(state):
                return self._rest(action, entry, recompute=False)

        return SplitPass(entry, None, forward=again, embedded=embedded), output

    def _rest(self, action: Action, entry: Tensor | None, *, recompute: bool | None) -> Tensor:
        """The stage's output from its entry: hidden states, or the last stage's share of the loss."""
        runner, stage = self.runner, self.runner.stages[action.stage]
        micro_batch = self.batch.micro_batches[action.micro_batch]
        if stage.is_last:
            summed = runner.loss_sum(
                lambda **inputs: stage(entry, inputs, recompute=recompute), micro_batch.inputs, micro_batch.labels
            )
            return summed / self.batch.num_tokens
        with runner.autocast():
            output: Tensor = stage(entry, micro_batch.inputs, recompute=recompute)
        return output

    def _backward(self, action: Action, given: Tensor) -> None:
        """Whole, or the input gradient alone."""
        place = (action.stage, action.micro_batch)
        forward = self._passes[place]
        gradient: Tensor | None
        if isinstance(forward, SplitPass):
            gradient = forward.input_gradient(given)
        else:
            del self._passes[place]
            last = action in self.runner.completing
            self.observer.before_backward(last)
            gradient = forward.backward(given)
            self.observer.after_backward(last)
        if action.stage > 0:
            assert gradient is not None
            self._outputs[action] = gradient.detach()

    def _weight_gradient(self, action: Action) -> None:
        forward = self._passes.pop((action.stage, action.micro_batch))
        assert isinstance(forward, SplitPass)
        last = action in self.runner.completing
        self.observer.before_backward(last)
        forward.weight_gradient()
        self.observer.after_backward(last)


def recut(batch: Batch, num_micro_batches: int) -> Batch:
    """The same samples in this many micro-batches of equal size.

    Raises:
        RequestError: the samples cannot be shared out equally.
    """
    if len(batch.micro_batches) == num_micro_batches:
        return batch
    labels = torch.cat([m.labels for m in batch.micro_batches])
    if len(labels) % num_micro_batches:
        raise RequestError(f"{len(labels)} samples cannot be cut into {num_micro_batches} equal micro-batches")
    names = batch.micro_batches[0].inputs
    inputs = {name: torch.cat([m.inputs[name] for m in batch.micro_batches]) for name in names}
    chunks = {name: tensor.chunk(num_micro_batches) for name, tensor in inputs.items()}
    micro_batches = [
        MicroBatch({name: chunks[name][index] for name in names}, part)
        for index, part in enumerate(labels.chunk(num_micro_batches))
    ]
    return Batch(micro_batches, batch.num_tokens)


def _label(send: Action) -> str:
    """What both ends call a transfer: whose output it is, `0F3` or `1B3`."""
    kind = Kind.FORWARD if send.kind is Kind.SEND_ACTIVATION else Kind.BACKWARD
    return str(Action(kind, send.stage, send.micro_batch))


def _named_range(action: Action, device: torch.device) -> AbstractContextManager[object]:
    """An NVTX range in the profile of a GPU."""
    if device.type != "cuda":
        return nullcontext()
    ranged: AbstractContextManager[object] = torch.cuda.nvtx.range(str(action))
    return ranged
