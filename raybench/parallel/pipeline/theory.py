"""The bubble that each schedule has on paper: no transfers, and the same times on every stage.

With p ranks, m micro-batches, v chunks a rank, and F, I, W the times of forward, input and weight gradient
of one stage, a rank is busy m v (F + I + W). What a step takes beyond that, divided by the step, is the
bubble.
"""

from __future__ import annotations

from raybench.parallel.pipeline.actions import Schedule


def theory_bubble(
    schedule: Schedule, *, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> float:
    """The idle fraction of the step in theory, for these times of a stage (only their ratios matter)."""
    p, m, v = schedule.num_ranks, schedule.num_micro_batches, schedule.num_chunks
    busy = m * v * (forward + input_gradient + weight_gradient)
    match schedule.name:
        case "naive":
            step = p * busy  # one rank works at a time
        case "gpipe" | "one-f-one-b" | "interleaved":
            step = _flushed_step(p, m, v, forward + input_gradient + weight_gradient)
        case "zero-bubble":
            step = _zero_bubble_step(p, m, forward, input_gradient, weight_gradient)
        case "zero-bubble-v":
            step = _zero_bubble_v_step(p, m, forward, input_gradient, weight_gradient)
        case _:
            raise ValueError(f"no theory of the bubble is known for {schedule.name!r}")
    return 1.0 - busy / step


def _flushed_step(p: int, m: int, v: int, whole: float) -> float:
    """GPipe, 1F1B and interleaved 1F1B: the bubble is (p - 1) / (m v + p - 1).

    The last rank begins p - 1 forwards late and the first ends p - 1 backwards later, of a stage that is
    1/v of a rank's layers (Narayanan et al. 2021, section 2.2). With fewer than p micro-batches a rank also
    waits p - m slots at each of its v - 1 changes of chunk, because micro-batch 0 is still on its way
    round.
    """
    return (m * v + (p - 1) + (v - 1) * max(0, p - m)) * whole


def _zero_bubble_step(p: int, m: int, forward: float, input_gradient: float, weight_gradient: float) -> float:
    """ZB-H1: the bubble of a rank is (p - 1)(F + I - W) (Qi et al. 2023, table 2).

    The way down and back up over p - 1 other ranks leaves a gap of (p - 1)(F + I), into which p - 1 weight
    gradients go, or m - 1 if that is less. However long these are, the last rank cannot begin before
    (p - 1) F.
    """
    busy = m * (forward + input_gradient + weight_gradient)
    gap = (p - 1) * (forward + input_gradient) - (min(m, p) - 1) * weight_gradient
    return busy + max(gap, (p - 1) * forward)


def _zero_bubble_v_step(p: int, m: int, forward: float, input_gradient: float, weight_gradient: float) -> float:
    """ZB-V: no gap within any rank's work if F = I = W and m >= p (Qi et al. 2023, section 6).

    What is left is that rank p - 1 cannot begin before (p - 1) F: the paper lets it run into the next step,
    here it is part of the step. Few micro-batches are bounded by the last stage: it begins after 2p - 1
    forwards, does m of both, and the last gradient has 2p - 1 stages to go, with one weight gradient after
    it.
    """
    both = forward + input_gradient
    return max(
        (p - 1) * forward + 2 * m * (both + weight_gradient),
        (2 * p - 1 + m) * both + weight_gradient,
    )
