"""Assigns samples to ranks and micro-batches, under a token cap and with balanced cost.

A mini-batch (one optimizer step) is split into micro-batches of at most `cap_tokens` tokens, the
same number for every dp_rank, so that ranks which synchronize in every micro-batch (pipeline,
experts) wait little for each other. A sequence of L tokens costs ``a L + b L^2``, for linear layers
and attention.

Source: longest processing time first (Graham 1969) on cost, with the cap as a constraint. Bins are
then assigned in order of cost, so that micro-batches that run at the same time cost about the same.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from yatt.records.message import MiniBatchPlan, SampleFact


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one sequence in seconds or any other unit: ``a`` per token, ``b`` per pair of tokens."""

    a: float = 1.0
    b: float = 0.0

    def of(self, num_tokens: int) -> float:
        """Returns the cost of a sequence of that length."""
        return self.a * num_tokens + self.b * num_tokens * num_tokens


MIN_SAMPLES = 32
"""Minimum number of measured micro-batches for a fit."""

FORGETTING = 0.9
"""Factor for the weight of all earlier iterations, applied once per iteration."""


@dataclass(frozen=True, slots=True)
class CostFit:
    """A least-squares fit to measured micro-batches; newer iterations have more weight.

    The model: a micro-batch of lengths L_i takes ``a sum(L_i) + b sum(L_i^2)`` seconds. In the names of the
    sums, n is tokens, q is squared lengths and s is seconds.
    """

    count: float = 0.0
    nn: float = 0.0
    nq: float = 0.0
    qq: float = 0.0
    ns: float = 0.0
    qs: float = 0.0

    def after(self, measured: Iterable[tuple[int, int, float]]) -> "CostFit":
        """Returns the fit with an iteration's micro-batches: (tokens, sum of squared lengths, seconds)."""
        kept = [FORGETTING * getattr(self, field.name) for field in fields(self)]
        for n, q, s in measured:
            for index, term in enumerate((1.0, n * n, n * q, q * q, n * s, q * s)):
                kept[index] += term
        return CostFit(*kept)

    def cost(self) -> Cost:
        """Returns the cost relative to one token's linear part; without attention until there is enough data.

        Neither coefficient can be negative. A fit with a negative one has seen too little variety of lengths,
        and that coefficient is set to 0.
        """
        if self.count < MIN_SAMPLES:
            return Cost()
        spread = self.nn * self.qq - self.nq * self.nq
        if (
            spread <= 1e-9 * self.nn * self.qq
        ):  # all micro-batches are alike, so their cost cannot be related to lengths
            return Cost()
        a = (self.ns * self.qq - self.qs * self.nq) / spread
        b = (self.qs * self.nn - self.ns * self.nq) / spread
        if b <= 0.0:
            return Cost()
        return Cost(1.0, b / a) if a > 0.0 else Cost(0.0, 1.0)


@dataclass(slots=True)
class _Bin:
    cost: float
    tokens: int
    samples: list[int]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that share a micro-batch: one, or those of a prompt group."""

    tokens: int
    cost: float
    samples: tuple[int, ...]

    @classmethod
    def of(cls, facts: Sequence[SampleFact], cost: Cost) -> "_Unit":
        lengths = [fact.num_tokens for fact in facts]
        return cls(sum(lengths), sum(map(cost.of, lengths)), tuple(fact.sample_id for fact in facts))


def plan_iteration(
    facts: Sequence[SampleFact],
    *,
    groups_per_step: int,
    dp_size: int,
    cap_tokens: int,
    cost: Cost,
    keeps_groups: bool = False,
) -> tuple[MiniBatchPlan, ...]:
    """Returns mini-batches of whole prompt groups, in the order of `facts`, each split over the dp_ranks.

    Args:
        facts: samples; those of one prompt group are adjacent.
        cap_tokens: maximum number of tokens of a micro-batch, prompts and completions together.
        keeps_groups: samples of one prompt group share a micro-batch, since the loss compares them.
    """
    groups: dict[int, list[SampleFact]] = {}
    for fact in facts:
        groups.setdefault(fact.prompt_group, []).append(fact)
    ordered = list(groups.values())
    steps = [ordered[i : i + groups_per_step] for i in range(0, len(ordered), groups_per_step)]
    return tuple(
        deal_mini_batch(
            [fact for group in step for fact in group],
            dp_size=dp_size,
            cap_tokens=cap_tokens,
            cost=cost,
            keeps_groups=keeps_groups,
        )
        for step in steps
    )


def deal_mini_batch(
    samples: Sequence[SampleFact], *, dp_size: int, cap_tokens: int, cost: Cost, keeps_groups: bool = False
) -> MiniBatchPlan:
    """Splits one mini-batch over `dp_size` ranks; see `plan_iteration`."""
    together: dict[int, list[SampleFact]] = {}
    for fact in samples:
        together.setdefault(fact.prompt_group if keeps_groups else fact.sample_id, []).append(fact)
    units = [_Unit.of(facts, cost) for facts in together.values()]
    longest = max((unit.tokens for unit in units), default=0)
    assert longest <= cap_tokens, f"a sample of {longest} tokens is above the cap of {cap_tokens}"
    total = sum(unit.tokens for unit in units)
    # Two samples longer than half the cap do not fit into one micro-batch.
    large = sum(2 * unit.tokens > cap_tokens for unit in units)
    least = max(1, -(-total // (cap_tokens * dp_size)), -(-large // dp_size))
    ordered = sorted(units, key=lambda unit: (-unit.tokens, unit.samples))
    bins = _fewest_bins(ordered, least, dp_size, cap_tokens=cap_tokens)
    return MiniBatchPlan(_hand_out(bins, dp_size))


def _fewest_bins(ordered: Sequence[_Unit], least: int, dp_size: int, *, cap_tokens: int) -> list[_Bin]:
    """Returns the smallest set of bins that holds all samples, with at least `least` bins per rank.

    The search doubles its step, then bisects. It always ends, because one sample per bin fits.
    """
    tried: dict[int, list[_Bin] | None] = {}

    def fits(per_rank: int) -> bool:
        tried[per_rank] = _fill(ordered, per_rank * dp_size, cap_tokens)
        return tried[per_rank] is not None

    low, step = least - 1, 1  # `low` is too few
    while not fits(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    found = tried[high]
    assert found is not None, "`high` was seen to fit"
    return found


def _fill(ordered: Sequence[_Unit], num_bins: int, cap_tokens: int) -> list[_Bin] | None:
    """Puts each unit, longest first, into the cheapest bin with room; None if one does not fit.

    A bin without room for a sample moves to `full`, the emptiest first, until a sample is short enough for
    it. Lengths only fall, so a bin that returns has room until a sample is added to it: at most one move per
    sample, and S log(bins) for S samples.

    Args:
        ordered: longest first.
    """
    bins = [_Bin(0.0, 0, []) for _ in range(num_bins)]
    by_cost = [(0.0, index) for index in range(num_bins)]
    full: list[tuple[int, int]] = []  # tokens, index
    for unit in ordered:
        length = unit.tokens
        while full and full[0][0] + length <= cap_tokens:
            index = heapq.heappop(full)[1]
            heapq.heappush(by_cost, (bins[index].cost, index))
        while by_cost and bins[by_cost[0][1]].tokens + length > cap_tokens:
            index = heapq.heappop(by_cost)[1]
            heapq.heappush(full, (bins[index].tokens, index))
        if not by_cost:
            return None
        chosen = bins[by_cost[0][1]]
        chosen.cost += unit.cost
        chosen.tokens += length
        chosen.samples += unit.samples
        heapq.heapreplace(by_cost, (chosen.cost, by_cost[0][1]))
    return bins


def _hand_out(bins: list[_Bin], dp_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Assigns bins to ranks: bins of similar cost run together, the least loaded rank gets the costliest."""
    ordered = sorted(bins, key=lambda b: -b.cost)
    ranks: list[list[_Bin]] = [[] for _ in range(dp_size)]
    loads = [0.0] * dp_size
    for row in range(0, len(ordered), dp_size):
        by_load = sorted(range(dp_size), key=lambda r: (loads[r], r))
        for rank, bin_ in zip(by_load, ordered[row : row + dp_size], strict=True):
            ranks[rank].append(bin_)
            loads[rank] += bin_.cost
    return tuple(tuple(tuple(sorted(b.samples)) for b in rank) for rank in ranks)
