"""How far engines of several GPU classes get within a makespan: one budget of GPUs for each class.

For two classes the table of `exact` has two indices,

    far[g, h] = max(far[g - 1, h], far[g, h - 1],
                    max over shapes of the first class of  end(far[g - gpus, h], shape, C),
                    max over shapes of the second class of end(far[g, h - gpus], shape, C))

and the same argument holds for it: ``end`` does not fall with the start, so that getting further
with the GPUs of a state is never a loss for what follows. So it is exact for contiguous groups of
one order. It has as many states as the product of the pools. Where these are more than
`MOST_STATES`, or classes more than two, each class takes one contiguous part of the order instead;
every order of the classes is tried, of more than three classes the one given and its reverse.

Contiguous groups are no longer without loss: where classes rank trajectories differently, as one
prefills and the other decodes quickly, a plan that gives each class its own kind may end earlier.
`class_shares` makes such plans.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Final, TypeAlias

import numpy as np

from heddle_core.estimate.group_cost import IntArray, SegmentCost
from heddle_core.ids import EngineShape

MOST_STATES: Final = 20_000
"""States of the table over two budgets: 20 ms for 3,000 of them and one makespan."""

_ALL_ORDERS: Final = 3
"""Classes up to which every order of them is tried."""

Groups: TypeAlias = tuple[tuple[EngineShape, ...], tuple[int, ...]]
"""Shapes, and the bounds of their groups."""

Reach: TypeAlias = Callable[[int, float], int]


class TwoBudgets:
    """The table ``far[g, h]`` of two classes; which states follow which does not depend on `C`."""

    def __init__(self, costs: Mapping[EngineShape, SegmentCost], pools: Mapping[str, int]) -> None:
        (first, rows), (_, columns) = pools.items()
        self._shapes = list(costs)
        self._costs = list(costs.values())
        self._states = (rows + 1) * (columns + 1)
        self._steps = [
            shape.gpus * (columns + 1 if shape.gpu == first else 1) for shape in self._shapes
        ]
        self._units = (columns + 1, 1)
        """Distance to the state with one GPU less, of each class."""
        number = np.arange(self._states).reshape(rows + 1, columns + 1)
        left = np.stack(np.divmod(number, columns + 1))
        self._diagonals: list[tuple[IntArray, list[IntArray], list[IntArray]]] = []
        for gpus in range(1, rows + columns + 1):
            here = np.fliplr(number).diagonal(columns - gpus)
            at = left.reshape(2, -1)[:, here]
            after_idle = [np.flatnonzero(at[k] >= 1) for k in (0, 1)]
            after = [
                np.flatnonzero(at[0 if shape.gpu == first else 1] >= shape.gpus)
                for shape in self._shapes
            ]
            self._diagonals.append((here, after_idle, after))

    def plan(self, first: int, trajectories: int, limit_s: float) -> Groups | None:
        """A plan of ``first:trajectories`` within `limit_s` on the fewest GPUs; None without."""
        far = np.full(self._states, first, dtype=np.int64)
        used = np.full(self._states, -1, dtype=np.int64)
        for here, after_idle, after in self._diagonals:
            best = np.full(len(here), first, dtype=np.int64)
            chosen = np.full(len(here), -1, dtype=np.int64)
            for unit, idle in zip(self._units, after_idle, strict=True):
                best[idle] = np.maximum(best[idle], far[here[idle] - unit])
            for k, (cost, mine) in enumerate(zip(self._costs, after, strict=True)):
                stop = cost.reaches(far[here[mine] - self._steps[k]], limit_s)
                further = stop > best[mine]
                best[mine[further]] = stop[further]
                chosen[mine[further]] = k
            far[here], used[here] = best, chosen
            ends = int(best.argmax())
            if best[ends] >= trajectories:
                return self._trace(far, used, int(here[ends]))
        return None

    def _trace(self, far: IntArray, used: IntArray, state: int) -> Groups:
        shapes: list[EngineShape] = []
        bounds = [int(far[state])]
        while bounds[-1] > far[0]:
            kind = int(used[state])
            # No GPU is idle in between: the plan was found on the fewest.
            assert kind >= 0
            shapes.append(self._shapes[kind])
            state -= self._steps[kind]
            bounds.append(int(far[state]))
        return tuple(reversed(shapes)), tuple(reversed(bounds))


class OneAfterAnother:
    """Each class takes one contiguous part of the order, in the best order of the classes."""

    def __init__(self, costs: Mapping[EngineShape, SegmentCost], pools: Mapping[str, int]) -> None:
        self._reaches = {
            gpu: [
                (shape.gpus, shape, cost.reach) for shape, cost in costs.items() if shape.gpu == gpu
            ]
            for gpu in pools
        }
        self._pools = pools
        names = tuple(pools)
        self._orders: Sequence[tuple[str, ...]] = (names, names[::-1])
        if len(names) <= _ALL_ORDERS:
            self._orders = list(permutations(names))

    def plan(self, first: int, trajectories: int, limit_s: float) -> Groups | None:
        """A plan of ``first:trajectories`` within `limit_s`; None without."""
        for order in self._orders:
            shapes: tuple[EngineShape, ...] = ()
            bounds: tuple[int, ...] = (first,)
            for gpu in order:
                more, further = furthest(
                    self._reaches[gpu], bounds[-1], trajectories, self._pools[gpu], limit_s
                )
                shapes, bounds = (*shapes, *more), (*bounds, *further[1:])
                if bounds[-1] >= trajectories:
                    return shapes, bounds
        return None


def furthest(
    reaches: Sequence[tuple[int, EngineShape, Reach]],
    first: int,
    trajectories: int,
    gpus: int,
    limit_s: float,
) -> Groups:
    """How far the GPUs of one class get from `first` within `limit_s`, on the fewest of them.

    `reaches` lists GPUs, shape and reach of each shape, fewest GPUs first.
    """
    far, used = [first], list[EngineShape | None]([None])
    for g in range(1, gpus + 1):
        stop_here, chosen = far[g - 1], None
        for width, shape, reach in reaches:
            if width > g:
                break
            stop = reach(far[g - width], limit_s)
            if stop > stop_here:
                stop_here, chosen = stop, shape
        far.append(stop_here)
        used.append(chosen)
        if stop_here >= trajectories:
            break
    return _trace(far, used, len(far) - 1)


def _trace(far: list[int], used: list[EngineShape | None], g: int) -> Groups:
    shapes: list[EngineShape] = []
    bounds: list[int] = [far[g]]
    while g:
        shape = used[g]
        if shape is None:
            g -= 1
            continue
        shapes.append(shape)
        g -= shape.gpus
        bounds.append(far[g])
    return tuple(reversed(shapes)), tuple(reversed(bounds))
