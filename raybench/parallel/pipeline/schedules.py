"""Pipeline schedules as data: one pure function each, from numbers of ranks and micro-batches to a plan.

Each function here gives only the order in which every rank computes; `build` adds the transfers. They
follow

- `gpipe`: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks" (arXiv 1811.06965);
- `one-f-one-b`: Narayanan et al. 2019, "PipeDream" (arXiv 1806.03377), in its flushed form (arXiv
  2006.09503);
- `interleaved`: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training" (arXiv 2104.04473),
  section 2.2;
- `zero-bubble` and `zero-bubble-v`: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241),
  ZB-H1 of section 2 and ZB-V of section 6.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raybench.errors import RequestError, unknown
from raybench.parallel.pipeline.actions import (
    Action,
    Kind,
    Orders,
    Schedule,
    ScheduleError,
    folded,
    looped,
)
from raybench.parallel.pipeline.transfers import with_transfers

MAX_FORWARDS = 100_000  # a step over all ranks; more is a slip of the finger, and would take minutes to plan

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


def naive(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """One micro-batch at a time: forward through all stages, back through all stages, then the next."""
    return [
        [Action(kind, rank, micro_batch) for micro_batch in range(num_micro_batches) for kind in (F, B)]
        for rank in range(num_ranks)
    ]


def gpipe(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """All forwards, then all backwards: every rank holds the activations of all micro-batches."""
    return [
        [Action(kind, rank, micro_batch) for kind in (F, B) for micro_batch in range(num_micro_batches)]
        for rank in range(num_ranks)
    ]


def one_f_one_b(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """After min(m, p - rank - 1) warm-up forwards, one forward and one backward in turn, the forward first.

    The warm-up is one forward short of what fills the pipeline, because the steady state opens with a
    forward: so min(m, p - rank) activations are in flight, and the rate is that of one micro-batch a
    forward and a backward.
    """
    return [_forward_first_1f1b(rank, num_ranks, num_micro_batches, backward=B) for rank in range(num_ranks)]


def _forward_first_1f1b(rank: int, num_ranks: int, num_micro_batches: int, *, backward: Kind) -> list[Action]:
    num_warmup = min(num_micro_batches, num_ranks - rank - 1)
    forwards = [Action(F, rank, micro_batch) for micro_batch in range(num_micro_batches)]
    backwards = [Action(backward, rank, micro_batch) for micro_batch in range(num_micro_batches)]
    return _alternate(forwards, backwards, num_warmup)


def _alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """Warm-up, steady state and cool-down of any 1F1B."""
    order = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - num_warmup :]


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Orders:
    """1F1B over v chunks a rank: a group of micro-batches passes a chunk, and then the rank's next one.

    The paper's groups are of p micro-batches, so their number must be a multiple of p. Here m micro-batches
    make floor(m / p) groups of sizes that differ by at most one: a group never falls short of p, which
    would leave a gap at each change of chunk. The step is then as short as that of a multiple, for the
    memory of up to (v - 1)(p - 1) more chunks in flight; fewer than p micro-batches are one group, with the
    gaps that nothing could fill.
    """
    num_groups = max(1, num_micro_batches // num_ranks)
    bounds = [num_micro_batches * group // num_groups for group in range(num_groups + 1)]
    groups = [range(begin, end) for begin, end in pairwise(bounds)]
    largest = max(len(group) for group in groups)
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = [Action(F, stage, k) for group in groups for stage in stages for k in group]
        backwards = [Action(B, stage, k) for group in groups for stage in reversed(stages) for k in group]
        num_warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * largest
        orders.append(_alternate(forwards, backwards, min(num_warmup, len(forwards))))
    return orders


def zero_bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Orders:
    """ZB-H1: 1F1B whose backward is split, with the weight gradients in its gaps.

    At most p micro-batches are between their forward and their weight gradient on any rank: the memory of
    1F1B's first rank.
    """
    critical = [_forward_first_1f1b(rank, num_ranks, num_micro_batches, backward=I) for rank in range(num_ranks)]
    return fill_gaps(critical, num_stages=num_ranks, capacity=num_ranks)


def zero_bubble_v(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Orders:
    """ZB-V: two chunks a rank, folded, with the memory of 1F1B's first rank (2p chunks, which are p stages).

    A rank takes in 2(p - rank) - 1 micro-batches, then also those that come back up to it, then runs forward and
    backward of each chunk in turn, so that it is never idle once it has begun. That takes 2p - 1 micro-batches; of
    fewer, the weight gradients go where the others leave a gap, as they do for all in the cool-down.
    """
    critical = [_folded_1f1b(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    return fill_gaps(critical, num_stages=2 * num_ranks, capacity=2 * num_ranks)


def _folded_1f1b(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    num_full = 2 * num_ranks - 1  # micro-batches that fill the pipeline
    down, up = rank, num_full - rank  # the rank's two stages
    backward_down, backward_up = [(I, down)], [(I, up)]
    if num_micro_batches >= num_full:
        backward_down, backward_up = [(I, down), (W, down)], [(I, up), (W, up)]
    # Warm-up: fill the way down; let in what comes back up; begin to empty the way up.
    pattern = [(F, down)] * (num_full - 2 * rank)
    pattern += [(F, up), (F, down)] * rank
    pattern += [(F, up), *backward_up] * (num_ranks - rank)
    # Steady state: one forward and one backward of either chunk.
    num_steady = max(num_micro_batches, num_full) - (num_full - rank)
    pattern += [(F, down), *backward_down, (F, up), *backward_up] * num_steady
    # Cool-down: the last forwards on the way up, and then input gradients alone.
    pattern += [*backward_down, (F, up), *backward_up] * (num_ranks - rank - 1)
    pattern += [(I, down), (I, up)] * rank
    pattern += [(I, down)] * (num_ranks - rank)
    order: list[Action] = []
    counts: Counter[tuple[Kind, int]] = Counter()
    for kind, stage in pattern:
        if counts[kind, stage] < num_micro_batches:
            order.append(Action(kind, stage, counts[kind, stage]))
        counts[kind, stage] += 1
    return order


def fill_gaps(critical: Orders, *, num_stages: int, capacity: int) -> Orders:
    """Put each rank's weight gradients where its forwards and input gradients leave it idle, in unit time.

    A rank takes the next action of its critical order as soon as its inputs are there; while they are not,
    or while `capacity` activations are held, it computes its oldest weight gradient. In unit time that
    never delays another rank's critical actions, since a gap is always a whole number of units.
    """
    fixed = {action for order in critical for action in order if action.kind is W}  # these stay where they are
    done: set[Action] = set()
    waiting = [deque(order) for order in critical]
    owed: list[deque[Action]] = [deque() for _ in critical]
    in_flight = [0 for _ in critical]
    orders: list[list[Action]] = [[] for _ in critical]
    while any(waiting) or any(owed):
        started: list[tuple[int, Action]] = []  # in this unit of time
        for rank, order in enumerate(waiting):
            full = in_flight[rank] >= capacity
            if order and _ready(order[0], done, num_stages) and not (full and order[0].kind is F):
                started.append((rank, order.popleft()))
            elif owed[rank]:
                started.append((rank, owed[rank].popleft()))
        if not started:
            raise ScheduleError(f"{capacity} activations in flight are too few for this order")
        for rank, action in started:
            done.add(action)
            orders[rank].append(action)
            in_flight[rank] += (action.kind is F) - (action.kind is W)
            weight_gradient = Action(W, action.stage, action.micro_batch)
            if action.kind is I and weight_gradient not in fixed:
                owed[rank].append(weight_gradient)
    return orders


def _ready(action: Action, done: set[Action], num_stages: int) -> bool:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is F:
        return stage == 0 or Action(F, stage - 1, micro_batch) in done
    if action.kind is W:
        return Action(I, stage, micro_batch) in done
    last = stage == num_stages - 1
    return Action(F, stage, micro_batch) in done and (last or Action(I, stage + 1, micro_batch) in done)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a schedule is made, and how many chunks a rank may hold under it."""

    orders: Callable[[int, int, int], Orders]
    chunks: Sequence[int] = (1,)  # allowed; the first is the default
    folded: bool = False


SCHEDULES: dict[str, Recipe] = {
    "naive": Recipe(naive),
    "gpipe": Recipe(gpipe),
    "one-f-one-b": Recipe(one_f_one_b),
    "interleaved": Recipe(interleaved, chunks=range(2, 1025)),
    "zero-bubble": Recipe(zero_bubble),
    "zero-bubble-v": Recipe(zero_bubble_v, chunks=(2,), folded=True),
}


def build(name: str, *, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of this name over `stages` ranks, or a refusal that names the nearest sizes that work."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    recipe = SCHEDULES[name]
    for field, value in (("stages", stages), ("micro-batches", micro_batches)):
        if value < 1:
            raise RequestError(f"{field}: {value} is too few; the least is 1")
    if chunks is None:
        chunks = recipe.chunks[0]
    if chunks not in recipe.chunks:
        nearest = min(recipe.chunks, key=lambda allowed: abs(allowed - chunks))
        other = "; one-f-one-b is the schedule of 1 chunk" if name == "interleaved" and chunks == 1 else ""
        raise RequestError(f"chunks: {chunks} does not work for {name}; the nearest that does is {nearest}{other}")
    num_forwards = stages * chunks * micro_batches
    if num_forwards > MAX_FORWARDS:
        most = MAX_FORWARDS // (stages * chunks)
        field, value = ("micro-batches", micro_batches) if most else ("stages", stages)
        raise RequestError(
            f"{field}: {value} is too many; stages x chunks x micro-batches are {num_forwards}, over the limit of "
            f"{MAX_FORWARDS}, and the nearest that works is {most or MAX_FORWARDS // chunks}"
        )
    return with_transfers(
        name,
        recipe.orders(stages, micro_batches, chunks),
        placement=folded(stages) if recipe.folded else looped(stages, chunks),
        num_micro_batches=micro_batches,
    )
