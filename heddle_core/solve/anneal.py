"""Sort-initialised simulated annealing over the mix of TP degrees, as published.

Algorithm 2 of Heddle (arXiv 2603.28101): a state is a list of degrees that use up the GPUs, sorted
descending; its cost is the makespan of the presorted placement with the i-th longest group on the
i-th largest engine. Start from random degrees at a temperature equal to their cost; while the
temperature is above `eps`, move, sort, evaluate, accept by Metropolis, remember the best, and
multiply the temperature by `a`. Moves:

* redistribute: two to four engines exchange GPUs, their number unchanged;
* split: one engine becomes two;
* merge: two engines become one.

The paper leaves `a` and `eps` open. ``a = 0.95`` and ``eps = cost / 800`` make 131 evaluations,
which at its 38 ms for a placement are its 5 s.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations_with_replacement
from math import exp
from typing import TypeAlias

import numpy as np

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.ids import EngineShape
from heddle_core.solve.group_plan import GroupPlan, one_class
from heddle_core.solve.presorted import Partition, search_partition

Place: TypeAlias = Callable[[Sequence[SegmentCost]], Partition]
Degrees: TypeAlias = tuple[int, ...]


def anneal_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    *,
    seed: int,
    cooling: float = 0.95,
    stop_ratio: float = 1 / 800,
    place: Place | None = None,
) -> GroupPlan:
    """Best mix of the search that `seed` starts; `stop_ratio` is `eps` over the initial cost.

    `place` solves one placement for engines in order, by default with `search_partition`; the paper
    uses the presorted DP. Raises ValueError when no shape fits `pools` or there are several GPU
    classes.
    """
    if not 0 < cooling < 1 or not 0 < stop_ratio < 1:
        raise ValueError(f"cooling {cooling} and stop_ratio {stop_ratio} must be between 0 and 1")
    solve = place or (lambda engines: search_partition(engines, trajectories, tolerance=1e-6))
    gpus = one_class(pools, costs)
    of_degree = {shape.gpus: shape for shape in costs}
    degrees = tuple(sorted(of_degree))
    rng = np.random.default_rng(seed)

    def evaluate(state: Degrees) -> Partition:
        return solve([costs[of_degree[tp]] for tp in state])

    state = random_degrees(degrees, gpus, rng)
    now = evaluate(state)
    best_state, best = state, now
    temperature, eps = now.makespan_s, now.makespan_s * stop_ratio
    while temperature > eps:
        moved = move(state, degrees, rng)
        tried = evaluate(moved)
        worse_s = tried.makespan_s - now.makespan_s
        if worse_s <= 0 or rng.random() < exp(-worse_s / temperature):
            state, now = moved, tried
            if now.makespan_s < best.makespan_s:
                best_state, best = state, now
        temperature *= cooling
    return GroupPlan(
        shapes=tuple(of_degree[tp] for tp in best_state),
        bounds=(0, *accumulate(best.sizes)),
        makespan_s=best.makespan_s,
    )


def random_degrees(degrees: Degrees, gpus: int, rng: np.random.Generator) -> Degrees:
    """Degrees drawn until no more fit on `gpus`, sorted descending."""
    if not degrees or degrees[0] > gpus:
        raise ValueError(f"no TP degree of {list(degrees)} fits on {gpus} GPUs")
    state: list[int] = []
    left = gpus
    while left >= degrees[0]:
        fitting = [tp for tp in degrees if tp <= left]
        state.append(fitting[int(rng.integers(len(fitting)))])
        left -= state[-1]
    return _sorted(state)


def move(state: Degrees, degrees: Degrees, rng: np.random.Generator) -> Degrees:
    """Apply one of the three moves, drawn at random among those this state allows."""
    moves = (redistribute, split, merge)
    for index in rng.permutation(len(moves)).tolist():
        moved = moves[index](state, degrees, rng)
        if moved is not None:
            return moved
    return state


def redistribute(state: Degrees, degrees: Degrees, rng: np.random.Generator) -> Degrees | None:
    """Give two to four engines other degrees of the same sum.

    Two are not enough where degrees are powers of two, as no other pair has their sum.
    """
    for count in (2, 3, 4)[: max(0, len(state) - 1)]:
        picked = rng.choice(len(state), size=count, replace=False).tolist()
        old = tuple(sorted(state[i] for i in picked))
        others = [
            new
            for new in combinations_with_replacement(degrees, count)
            if sum(new) == sum(old) and new != old
        ]
        if others:
            kept = [tp for i, tp in enumerate(state) if i not in picked]
            return _sorted([*kept, *others[int(rng.integers(len(others)))]])
    return None


def split(state: Degrees, degrees: Degrees, rng: np.random.Generator) -> Degrees | None:
    ways = [
        (i, part)
        for i, tp in enumerate(state)
        for part in degrees
        if 2 * part <= tp and tp - part in degrees
    ]
    if not ways:
        return None
    i, part = ways[int(rng.integers(len(ways)))]
    return _sorted([*state[:i], *state[i + 1 :], part, state[i] - part])


def merge(state: Degrees, degrees: Degrees, rng: np.random.Generator) -> Degrees | None:
    # By degree, not by engine: thousands of engines have few degrees, and pairs are quadratic.
    kinds = sorted(set(state))
    ways = [
        (a, b)
        for a, b in combinations_with_replacement(kinds, 2)
        if a + b in degrees and (a != b or state.count(a) > 1)
    ]
    if not ways:
        return None
    a, b = ways[int(rng.integers(len(ways)))]
    kept = list(state)
    kept.remove(a)
    kept.remove(b)
    return _sorted([*kept, a + b])


def _sorted(state: list[int]) -> Degrees:
    return tuple(sorted(state, reverse=True))
