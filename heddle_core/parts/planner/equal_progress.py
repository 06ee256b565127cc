"""Engines of one shape or two by the lengths of history, to be widened as trajectories end.

Of several GPU classes each has a shape of its own: all combinations are tried, and beside the best
of them two shapes on one class at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from statistics import NormalDist
from typing import TypeAlias

from heddle_core.estimate.equal_progress import RatesBeyond, equal_progress_s
from heddle_core.estimate.history import History
from heddle_core.ids import EngineId, EngineShape
from heddle_core.parts.planner.searched import SearchedPlan
from heddle_core.plans import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import PolicyContext, TrajectoryView
from heddle_core.solve.group_plan import check_classes, shapes_of
from heddle_core.solve.tail import first_search_at

_TIE = 0.03
"""Of makespans this near to the least, that of the widest single shape is taken: some trajectory
may be longer than any in history, and decodes fastest there."""

_SHARES = (0.125, 0.25, 0.5)
"""Of the GPUs that may have wide engines beside narrow ones."""

_SPREAD = 0.65
_MEDIANS = (100.0, 300.0, 1_000.0, 3_000.0, 10_000.0)
ASSUMED_HISTORIES = tuple(
    History(
        output_quantiles=tuple(
            median * math.exp(_SPREAD * NormalDist().inv_cdf((i + 0.5) / 50)) for i in range(50)
        ),
        appended_per_output=0.6,
        tool_s_per_output=0.0,
        step_output_tokens=512.0,
    )
    for median in _MEDIANS
)
"""Without a history, lengths are log-normal and their median is unknown. In five published traces
of agents the median is 113 to 3,593 tokens, and the 99th percentile 3.9 to 4.9 medians: a standard
deviation of logarithms of 0.58 to 0.68."""

Mix: TypeAlias = Mapping[EngineShape, int]
"""Engines by shape."""


class EqualProgressPlan:
    """The engines that end first if all trajectories advance alike: of one shape, or of two.

    The `portfolio` cuts a mix of shapes for lengths, by ranks. Where ranks are wrong, long
    trajectories are held on narrow engines and short ones crowd the wide ones: on synthetic math
    its mix loses to the best single shape. So it plans only where predictions vary as lengths did.
    Here nothing is taken for known but the distribution of lengths, by history. Without one, the
    shape is taken whose makespan is nearest to the least one over lengths of several scales.
    `TailConsolidation` widens the engines later, when it is seen who is long.
    """

    needs_all = True

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._mixed = SearchedPlan(context, solver="portfolio")

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the engines without homes, or the portfolio's problem."""
        context = self._context
        if not ts or self._lengths_known(remaining):
            return self._mixed.plan(ts, remaining)
        by_shape = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        fitting = self._fitting(by_shape)
        if not fitting:
            return self._mixed.plan(ts, remaining)
        filled = [
            [_filled(shape, shapes, context.pools[gpu]) for shape in shapes]
            for gpu, shapes in fitting.items()
        ]
        single = [_joined(mixes) for mixes in product(*filled)]
        makespan_s: float | None = None
        if context.history is None:
            estimates = [self.makespans_s(h, single, ts) for h in ASSUMED_HISTORIES]
            mix = single[_least_regret(estimates)]
        else:
            mixes = single
            if len(fitting) > 1:
                makespans_s = self.makespans_s(context.history, single, ts)
                others = single[_simplest_near_least(makespans_s, single=len(single))]
            else:
                others = {}
            for gpu, shapes in fitting.items():
                beside = {shape: n for shape, n in others.items() if shape.gpu != gpu}
                partly = (m for wide in shapes for m in _partly(wide, shapes, context.pools[gpu]))
                mixes = [*mixes, *({**beside, **mix} for mix in partly)]
            makespans_s = self.makespans_s(context.history, mixes, ts)
            chosen = _simplest_near_least(makespans_s, single=len(single))
            mix, makespan_s = mixes[chosen], makespans_s[chosen]
        widest_first = sorted(mix, key=lambda shape: -shape.gpus)
        engines = [shape for shape in widest_first for _ in range(mix[shape])]
        return ResourcePlan(
            engines=tuple(
                EngineSpec(engine=EngineId(f"e{i}"), shape=shape, max_running=context.max_running)
                for i, shape in enumerate(engines)
            ),
            estimated_makespan_s=makespan_s,
        )

    def _fitting(self, by_shape: Iterable[EngineShape]) -> dict[str, list[EngineShape]]:
        """Shapes of each class that its pool has GPUs for, narrowest first."""
        check_classes(self._context.pools, self._context.shape_choices)
        found = {
            gpu: sorted((s for s in shapes_of(gpu, by_shape) if s.gpus <= gpus), key=_gpus)
            for gpu, gpus in self._context.pools.items()
        }
        return {gpu: shapes for gpu, shapes in found.items() if shapes}

    def _lengths_known(self, remaining: Sequence[float]) -> bool:
        history = self._context.history
        if len(remaining) < 2:
            return False
        if history is None:  # only an oracle spreads its predictions so
            return ASSUMED_HISTORIES[0].predictions_vary(remaining)
        return history.lengths_known(remaining)

    def makespans_s(
        self,
        history: History,
        mixes: Sequence[Mix],
        ts: Sequence[TrajectoryView],
        *,
        beyond: RatesBeyond | None = None,
    ) -> list[float]:
        """Estimate the makespan of each mix in seconds, where lengths are as in `history`.

        Late in the rollout the engines may change to the widest shapes of the context. `beyond` is
        of `equal_progress_s`.
        """
        context = self._context
        by_shape = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        widest = _joined(
            [
                _filled(shapes[-1], shapes, context.pools[gpu])
                for gpu, shapes in self._fitting(by_shape).items()
            ]
        )
        return equal_progress_s(
            history,
            by_shape,
            mixes,
            widened=widest,
            trajectories=len(ts),
            prompt_tokens=sum(t.context_tokens for t in ts) / len(ts),
            max_running=context.max_running,
            start_s=context.start_s(max(by_shape, key=lambda shape: shape.gpus)),
            widened_at=first_search_at(sum(s.gpus * n for s, n in widest.items())),
            beyond=beyond,
        )


def _gpus(shape: EngineShape) -> int:
    return shape.gpus


def _joined(mixes: Sequence[Mix]) -> Mix:
    """The engines of several classes."""
    return {shape: count for mix in mixes for shape, count in mix.items()}


def _filled(shape: EngineShape, shapes: Sequence[EngineShape], gpus: int) -> Mix:
    """Engines of `shape` on as many GPUs as possible, and on the rest of narrower `shapes`."""
    mix: dict[EngineShape, int] = {}
    for each in sorted((s for s in shapes if s.gpus <= shape.gpus), key=lambda s: -s.gpus):
        if gpus >= each.gpus:
            mix[each] = gpus // each.gpus
            gpus %= each.gpus
    return mix


def _partly(wide: EngineShape, shapes: Sequence[EngineShape], gpus: int) -> list[Mix]:
    """Mixes of `wide` engines on some of the GPUs, and of a narrower shape on the others."""
    counts = sorted({max(1, round(share * gpus / wide.gpus)) for share in _SHARES})
    return [
        {wide: count, **_filled(narrow, shapes, gpus - count * wide.gpus)}
        for count in counts
        for narrow in shapes
        if narrow.gpus < wide.gpus and count * wide.gpus + narrow.gpus <= gpus
    ]


def _simplest_near_least(makespans_s: Sequence[float], *, single: int) -> int:
    """Position of the last of the first `single`, the widest, near the least; else of the least."""
    limit_s = (1.0 + _TIE) * min(makespans_s)
    near = [k for k in range(single) if makespans_s[k] <= limit_s]
    return near[-1] if near else min(range(len(makespans_s)), key=lambda k: makespans_s[k])


def _least_regret(estimates: Sequence[Sequence[float]]) -> int:
    """Position of the least makespan over the least one, in the mean of the logarithms."""

    def regret(k: int) -> float:
        return sum(math.log(makespans_s[k] / min(makespans_s)) for makespans_s in estimates)

    return min(range(len(estimates[0])), key=regret)
