"""Placement: the recurrence, lemma 5.1, aggregation, and the search that needs no table."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.estimate.group_cost import FloatArray, IntArray, SegmentCost
from heddle_core.estimate.paper_cost import SizeCost, size_cost
from heddle_core.solve.presorted import aggregate_short, every_cut, presorted_dp, search_partition

lengths_st = st.lists(st.integers(1, 50), min_size=1, max_size=12).map(
    lambda values: np.array(sorted(values, reverse=True), dtype=np.float64)
)
steps_st = st.lists(st.integers(0, 6), min_size=13, max_size=13)


def curve(steps: Sequence[int], base: float = 3.0) -> np.ndarray:
    """A per-token curve that never falls; index 0 is batch 0."""
    return np.concatenate(([0.0], base + np.cumsum(steps)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """Segment cost looked up in a matrix ``ends[start, stop]`` of shape ``(n + 1, n + 1)``."""

    ends: FloatArray

    def end_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds until each segment has ended."""
        found: FloatArray = self.ends[start, stop]
        return found

    def reach(self, start: int, limit_s: float) -> int:
        """Largest `stop` within `limit_s`."""
        return start + int(np.searchsorted(self.ends[start, start:], limit_s, side="right")) - 1


def simulated_table(lengths: FloatArray, tpot: FloatArray, cuts: IntArray) -> TableCost:
    """Simulated reading of `F` for every group that begins and ends at one of `cuts`.

    Members start together and leave when done: the longest of ``L_1 >= ... >= L_g`` ends after
    ``sum over b of tpot(b) * (L_b - L_{b+1})``. Segments count in cuts.
    """
    units = len(cuts) - 1
    ends = np.zeros((units + 1, units + 1))
    tokens_at_batch = lengths - np.append(lengths[1:], 0.0)
    after = np.append(lengths, 0.0)
    for u in range(units):
        first = int(cuts[u])
        size = cuts[u + 1 :] - first
        total = np.cumsum(tokens_at_batch[first:] * tpot[1 : len(lengths) - first + 1])
        # Trajectories behind the segment would have kept the batch larger: none does.
        ends[u, u + 1 :] = total[size - 1] + tpot[size] * after[cuts[u + 1 :]]
    return TableCost(ends=ends)


def end_of(cost: SegmentCost, start: int, stop: int) -> float:
    return float(cost.end_s(np.array([start]), np.array([stop]))[0])


def brute_contiguous(costs: Sequence[SegmentCost], count: int) -> float:
    best = np.inf
    for inner in combinations_with_replacement(range(count + 1), len(costs) - 1):
        bounds = (0, *inner, count)
        ends = [end_of(c, bounds[e], bounds[e + 1]) for e, c in enumerate(costs)]
        best = min(best, max(ends))
    return best


def recurrence(costs: Sequence[SegmentCost], count: int) -> float:
    """Least makespan by the recurrence, every `k` of every `i` looked at."""
    cuts = every_cut(count)
    best = costs[0].end_s(np.zeros_like(cuts), cuts)
    for cost in costs[1:]:
        worst = np.maximum(best[None, :], cost.end_s(cuts[None, :], cuts[:, None]))
        best = np.where(cuts[None, :] <= cuts[:, None], worst, np.inf).min(axis=1)
    return float(best[count])


def brute_any_groups(lengths: np.ndarray, curves: Sequence[np.ndarray]) -> float:
    """Least makespan over every assignment of trajectories to engines, contiguous or not."""
    best = np.inf
    for owners in product(range(len(curves)), repeat=len(lengths)):
        ends = [0.0]
        for engine, tpot in enumerate(curves):
            mine = [
                length for length, owner in zip(lengths, owners, strict=True) if owner == engine
            ]
            if mine:
                ends.append(max(mine) * tpot[len(mine)])
        best = min(best, max(ends))
    return best


def test_a_worked_example_by_hand() -> None:
    # Engine alone: 1 s per token, each further member adds 0.5 s. {10} ends at 10, {4, 3, 2} at
    # 4 * 2 = 8; {10, 4} would end at 15, {3, 2} at 4.5.
    cost = size_cost(np.array([10.0, 4.0, 3.0, 2.0]), np.array([0.0, 1.0, 1.5, 2.0, 2.5]))
    found = presorted_dp([cost, cost], every_cut(4))
    assert found.sizes == (1, 3)
    assert found.makespan_s == 10.0


@settings(max_examples=60)
@given(lengths=lengths_st, steps=steps_st, engines=st.integers(1, 4))
def test_the_recurrence_equals_brute_force_over_contiguous_groups(
    lengths: np.ndarray, steps: list[int], engines: int
) -> None:
    fast = size_cost(lengths, curve(steps))
    slow = size_cost(lengths, curve(steps, base=5.0))
    costs: list[SegmentCost] = [fast, *[slow] * (engines - 1)]
    expected = brute_contiguous(costs, len(lengths)) if len(lengths) < 9 else None
    scanned_s = recurrence(costs, len(lengths))
    bisect = presorted_dp(costs, every_cut(len(lengths)))
    searched = search_partition(costs, len(lengths))
    assert expected is None or scanned_s == expected
    assert bisect.makespan_s == scanned_s
    assert searched.makespan_s == pytest.approx(scanned_s, rel=1e-8)
    for found in (bisect, searched):
        assert sum(found.sizes) == len(lengths)
        bounds = np.concatenate(([0], np.cumsum(found.sizes)))
        ends = [end_of(c, int(bounds[e]), int(bounds[e + 1])) for e, c in enumerate(costs)]
        assert max(ends) == found.makespan_s


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    steps=steps_st,
    engines=st.integers(1, 3),
)
def test_no_assignment_beats_contiguous_groups_on_equal_engines(
    lengths: list[int], steps: list[int], engines: int
) -> None:
    descending = np.array(sorted(lengths, reverse=True), dtype=np.float64)
    cost = size_cost(descending, curve(steps))
    found = presorted_dp([cost] * engines, every_cut(len(lengths)))
    assert found.makespan_s == brute_any_groups(descending, [curve(steps)] * engines)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    steps=st.lists(steps_st, min_size=2, max_size=3),
    bases=st.lists(st.integers(1, 9), min_size=3, max_size=3),
)
def test_no_assignment_beats_contiguous_groups_on_unequal_engines_in_their_best_order(
    lengths: list[int], steps: list[list[int]], bases: list[int]
) -> None:
    descending = np.array(sorted(lengths, reverse=True), dtype=np.float64)
    curves = [curve(s, base) for s, base in zip(steps, bases, strict=False)]
    costs = [size_cost(descending, c) for c in curves]
    best = min(
        presorted_dp(order, every_cut(len(lengths))).makespan_s for order in permutations(costs)
    )
    assert best == brute_any_groups(descending, curves)


def test_simulated_groups_need_the_recurrence_and_bisection_solves_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 60, size=30))[::-1].astype(np.float64)
        tpot = np.concatenate(([0.0], 2.0 + np.cumsum(rng.integers(0, 4, size=30))))
        table = simulated_table(lengths, tpot, every_cut(30))
        costs = [table] * int(rng.integers(1, 6))
        scanned_s = recurrence(costs, 30)
        assert presorted_dp(costs, every_cut(30)).makespan_s == scanned_s
        searched = search_partition(costs, 30)
        assert searched.makespan_s == pytest.approx(scanned_s, rel=1e-8)


@settings(max_examples=60)
@given(
    lengths=lengths_st,
    steps=steps_st,
    factors=st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=5),
)
def test_factors_make_every_engine_that_many_times_slower(
    lengths: np.ndarray, steps: list[int], factors: list[float]
) -> None:
    alike = size_cost(lengths, curve(steps))
    found = search_partition([alike] * len(factors), len(lengths), factors=factors)
    slower = [size_cost(lengths, factor * curve(steps)) for factor in factors]
    expected = search_partition(slower, len(lengths))
    assert found.makespan_s == pytest.approx(expected.makespan_s, rel=1e-8)
    assert sum(found.sizes) == len(lengths)


def test_short_trajectories_move_in_units_and_cost_little() -> None:
    rng = np.random.default_rng(5)
    lengths = np.sort(np.minimum(rng.lognormal(7.5, 1.0, 2000), 40_000))[::-1]
    cuts = aggregate_short(lengths, below=3_000, unit=16)
    alone = int((lengths >= 3_000).sum())
    assert cuts[: alone + 1].tolist() == list(range(alone + 1))
    assert set(np.diff(cuts[alone:-1]).tolist()) == {16}
    assert cuts[-1] == 2000
    cost = size_cost(lengths, 0.01 + 0.0003 * np.arange(2001.0))
    fine = presorted_dp([cost] * 8, every_cut(2000))
    coarse = presorted_dp([cost] * 8, cuts)
    assert sum(coarse.sizes) == 2000
    assert fine.makespan_s <= coarse.makespan_s <= 1.02 * fine.makespan_s


def test_more_engines_than_trajectories_leave_engines_empty() -> None:
    cost = size_cost(np.array([4.0, 2.0]), np.array([0.0, 1.0, 9.0]))
    found = search_partition([cost] * 4, 2)
    assert sorted(found.sizes, reverse=True) == [1, 1, 0, 0]
    assert found.makespan_s == presorted_dp([cost] * 4, every_cut(2)).makespan_s == 4.0


def test_an_empty_rollout_and_no_engine() -> None:
    cost = size_cost(np.array([4.0]), np.array([0.0, 1.0]))
    assert search_partition([cost] * 2, 0).sizes == (0, 0)
    none: list[SizeCost] = []
    with pytest.raises(ValueError, match="at least one engine"):
        presorted_dp(none, every_cut(1))
    with pytest.raises(ValueError, match="at least one engine"):
        search_partition(none, 1)


def test_no_finite_makespan_is_said() -> None:
    cost = size_cost(np.array([1e308, 1e308]), np.array([0.0, 1.0, 1e10]))
    with pytest.raises(ValueError, match="no finite makespan"):
        search_partition([cost], 2)
