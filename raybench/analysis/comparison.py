"""Cases of one track against each other, paired by round, since rounds alternate over the cases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from raybench.analysis.statistics import Estimate, median_interval


@dataclass(frozen=True)
class Ratio:
    """Tokens/s of one case ÷ tokens/s of another."""

    case: str
    other: str
    estimate: Estimate

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 1 out."""
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and not low <= 1 <= high


def rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second of every ok round of one track in one suite: a row a round, a column a case."""
    measured = runs[(runs.status == "ok") & runs.window_ns.notna() & runs.tokens.notna()]
    rate = measured.tokens.astype("float64") / measured.window_ns.astype("float64") * 1e9
    table = pd.DataFrame({"round": measured["round"], "case": measured.case.astype(str), "rate": rate})
    return table.pivot_table(index="round", columns="case", values="rate", aggfunc="first", observed=True)


def ratio(rates: pd.DataFrame, case: str, other: str, *, per_rank: float = 1.0) -> Ratio | None:
    """The ratio of two columns of `rates` with its interval; None without a common round.

    Args:
        per_rank: ranks of `other` ÷ ranks of `case`, where it is speeds of one rank that are compared.
    """
    quotients = (rates[case] / rates[other] * per_rank).to_numpy(dtype=np.float64)
    estimate = median_interval(quotients)
    return None if estimate is None else Ratio(case, other, estimate)


@dataclass(frozen=True)
class Ranking:
    """The cases of a track that did the same work, or the most they could at once, on as many ranks; fastest first."""

    cases: tuple[str, ...]
    elsewhere: tuple[str, ...]
    """Cases of the same work and ranks on another number of nodes: as after a node died, at `smoke`."""
    over_second: Ratio | None
    over_peer: Ratio | None
    """Over the fastest peer, where the winner is no peer and the second is another case."""
    over_slowest: Ratio | None
    """None where the second is the slowest."""


def rank_cases(summary: pd.DataFrame, rates: pd.DataFrame) -> Ranking | None:
    """Rank one track's cases by throughput; None where none was measured.

    Cases of other sizes answer another question and are left out: the largest group of equal ranks and tokens a
    step is ranked. With `micro_batch: largest` the size that each case found is what is asked about, so there equal
    ranks are enough. Of the group, those on as many nodes as most of it are ranked; of two halves, those on more.
    """
    measured = summary[summary.tokens_per_s.notna() & summary.case.isin(rates.columns)]
    if measured.empty:
        return None
    tokens = measured.tokens_per_step.mask(measured.micro_batch.eq("largest").fillna(False))
    sizes = measured.groupby([measured.num_ranks, tokens], dropna=False)
    group = max((group for _, group in sizes), key=lambda g: (len(g), g.num_ranks.fillna(0).max()))
    on_nodes = group.groupby("num_nodes", dropna=False)
    together = max((part for _, part in on_nodes), key=lambda p: (len(p), p.num_nodes.fillna(0).max()))
    ranked = together.sort_values("tokens_per_s", ascending=False, kind="stable")
    cases = tuple(ranked.case)
    peers = ranked[ranked.peer.notna()].case
    is_peer = ranked.peer.notna().iloc[0]
    peer = None if is_peer or peers.empty or peers.iloc[0] in cases[:2] else peers.iloc[0]
    return Ranking(
        cases,
        elsewhere=tuple(group.case[~group.case.isin(cases)]),
        over_second=ratio(rates, cases[0], cases[1]) if len(cases) > 1 else None,
        over_peer=ratio(rates, cases[0], peer) if peer else None,
        over_slowest=ratio(rates, cases[0], cases[-1]) if len(cases) > 2 and cases[-1] != peer else None,
    )


def scaling(summary: pd.DataFrame, rates: pd.DataFrame) -> list[Ratio]:
    """Speed of a rank in larger layouts ÷ speed of a rank in the track's smallest of the same strategy."""
    found = []
    measured = summary[summary.tokens_per_s.notna() & summary.case.isin(rates.columns) & summary.num_ranks.notna()]
    strategies = ["data_strategy", "pipeline_strategy", "tensor_strategy"]
    for _, group in measured.groupby(strategies, dropna=False):
        base = group.sort_values("num_ranks", kind="stable").iloc[0]
        for case in group[group.num_ranks > base.num_ranks].itertuples(index=False):
            per_rank = float(base.num_ranks) / float(case.num_ranks)
            if (found_ratio := ratio(rates, str(case.case), str(base.case), per_rank=per_rank)) is not None:
                found.append(found_ratio)
    return found
