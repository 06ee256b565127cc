"""Which engines to merge for the last trajectories, and which homes move, by estimated ends.

A *window* is a set of narrow engines whose GPUs make one engine of a wider degree. The search
compares the present engines, after the best moves of homes, with merging the 1, 2, 3, ... windows
with the least work, for each wider degree. The cost of merging is included: trajectories with a
home on merged engines slow the others down for `start_s` and prefill again, or wait for so long
where all engines are merged. Only the work left by then gains.

GPUs of a merged engine are of one class and must be neighbours. Engines are assumed to lie side by
side, widest first, as planners list them; then any `width` GPUs from a multiple of `width` on are
neighbours.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import IntArray, Work
from heddle_core.estimate.tail import TailModel, last_end_s
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec, ResourcePlan

_LEAST_MOVE_GAIN_S = 0.2
"""A move must bring the end forward by this much, since it may need a preemption."""


_PER_GPU = 8
_AT_MOST = 512
"""Trajectories left, per GPU and in all, at which the first search begins: with more, engines are
full of short ones, and the search, quadratic in their number, takes long."""


def first_search_at(gpus: int) -> int:
    """Return with how many trajectories left the first search begins."""
    return min(_AT_MOST, _PER_GPU * gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailProblem:
    """Engines and homes for what is left of a rollout.

    From `trajectories` to `tool_s_per_output` all sequences have one entry per trajectory; `homes`
    are positions in `engines`.
    """

    engines: tuple[EngineSpec, ...]
    trajectories: tuple[TrajectoryId, ...]
    homes: tuple[int, ...]
    output_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    appended_per_output: tuple[float, ...]
    tool_s_per_output: tuple[float, ...]
    by_shape: Mapping[EngineShape, StepCost]
    start_s: float
    """Estimated seconds until a new engine is ready."""
    start_s_by_shape: Mapping[EngineShape, float] = field(default_factory=dict)
    """The same for shapes where it is known."""
    min_gain_s: float
    margin: float
    """Least gain for which engines are merged: seconds, and share of the estimated end."""
    charged_s: float

    def solve(self) -> ResourcePlan:
        """Return the engines from now on and the homes that move; deterministic."""
        work = self._work()
        model = self._model(work, np.asarray(self.homes, dtype=np.int64), self._shapes())
        model.relocate(least_gain_s=_LEAST_MOVE_GAIN_S)
        unmerged_s = best_s = model.end_s()
        best = ResourcePlan(engines=self.engines)
        least_gain_s = max(self.min_gain_s, self.margin * unmerged_s)
        for shape in self._wider():
            windows = self._windows(work, shape)
            before_s = unmerged_s
            for count in _counts(len(windows)):
                merged = windows[:count]
                end_s, homes = self._merge(work, merged, shape)
                if end_s >= before_s:
                    break
                if end_s < best_s and unmerged_s - end_s > least_gain_s:
                    best, best_s = self._plan(merged, homes, shape), end_s
                before_s = end_s
        return best

    def _shapes(self) -> list[EngineShape]:
        return [engine.shape for engine in self.engines]

    def _wider(self) -> list[EngineShape]:
        """Shapes into which present engines could be merged, widest first."""
        least: dict[str, int] = {}
        for engine in self.engines:
            gpu, gpus = engine.shape.gpu, engine.shape.gpus
            least[gpu] = min(least.get(gpu, gpus), gpus)
        wider = (s for s in self.by_shape if s.gpu in least and s.gpus > least[s.gpu])
        return sorted(wider, key=lambda s: -s.gpus)

    def _work(self) -> Work:
        output = np.asarray(self.output_tokens)
        appended = np.asarray(self.appended_per_output) * output
        return Work(
            output_tokens=output,
            context_tokens=np.asarray(self.context_tokens),
            appended_tokens=appended,
            prefill_tokens=appended,
            tool_s=np.asarray(self.tool_s_per_output) * output,
        )

    def _model(self, work: Work, homes: IntArray, shapes: Sequence[EngineShape]) -> TailModel:
        slots = self.engines[0].max_running
        return TailModel(work, homes, shapes, self.by_shape, max_running=slots)

    def _windows(self, work: Work, shape: EngineShape) -> list[tuple[int, ...]]:
        """Engines that together have the GPUs of one of `shape`, least work first."""
        width = shape.gpus
        alike = [e for e, engine in enumerate(self.engines) if engine.shape.gpu == shape.gpu]
        left = np.bincount(self.homes, work.output_tokens, len(self.engines))
        windows: list[tuple[int, ...]] = []
        inside: list[int] = []
        used = 0
        for e in sorted(alike, key=lambda e: -self.engines[e].shape.gpus):
            inside.append(e)
            used += self.engines[e].shape.gpus
            if used >= width:
                if used == width and len(inside) > 1:
                    windows.append(tuple(inside))
                inside, used = [], 0
        return sorted(windows, key=lambda window: float(left[list(window)].sum()))

    def _merge(
        self, work: Work, merged: Sequence[tuple[int, ...]], shape: EngineShape
    ) -> tuple[float, Sequence[int]]:
        """Estimated end if each of `merged` becomes one engine of `shape`, and homes then.

        New engines are numbered after the present ones, in the order of `merged`.
        """
        shapes, wide = self._shapes(), [shape] * len(merged)
        start_s = self.start_s_by_shape.get(shape, self.start_s)
        stays = np.ones(len(shapes), dtype=np.bool_)
        stays[[e for window in merged for e in window]] = False
        kept = np.flatnonzero(stays).tolist()
        if not kept:  # all wait for the new engines
            model = self._model(work, np.full(len(work), -1, dtype=np.int64), wide)
            model.assign_unplaced()
            model.relocate(least_gain_s=_LEAST_MOVE_GAIN_S)
            return last_end_s(start_s + model.ends), (model.homes + len(shapes)).tolist()
        place = np.full(len(shapes), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        model = self._model(work, place[np.asarray(self.homes)], [shapes[e] for e in kept])
        model.assign_unplaced()
        ends, homes = np.minimum(model.ends, start_s), model.homes.copy()
        then_left = model.after(start_s)
        still = np.flatnonzero(then_left.output_tokens > 0.0)
        if len(still):
            after = [*(shapes[e] for e in kept), *wide]
            then = self._model(then_left.take(still), homes[still], after)
            then.relocate(least_gain_s=_LEAST_MOVE_GAIN_S)
            ends[still], homes[still] = start_s + then.ends, then.homes
        numbers = [*kept, *range(len(shapes), len(shapes) + len(merged))]
        return last_end_s(ends), [numbers[k] for k in homes.tolist()]

    def _plan(
        self, merged: Sequence[tuple[int, ...]], homes: Sequence[int], shape: EngineShape
    ) -> ResourcePlan:
        gone = {e: None for window in merged for e in window}
        engines = {k: engine for k, engine in enumerate(self.engines) if k not in gone}
        taken = {engine.engine for engine in engines.values()}
        for window in merged:
            # Of two lives of a name one may stay, and the other be merged.
            own = (EngineId(self.engines[e].engine.name) for e in window)
            others = (EngineId(f"e{k}") for k in itertools.count())
            name = next(each for each in itertools.chain(own, others) if each not in taken)
            taken.add(name)
            engines[len(engines) + len(gone)] = EngineSpec(
                engine=name, shape=shape, max_running=self.engines[window[0]].max_running
            )
        movers: dict[int, list[TrajectoryId]] = {}
        for t, before, after in zip(self.trajectories, self.homes, homes, strict=True):
            if after != before:
                movers.setdefault(int(after), []).append(t)
        return ResourcePlan(
            engines=tuple(engines.values()),
            homes=tuple((engines[k].engine, tuple(ts)) for k, ts in sorted(movers.items())),
        )


def _counts(most: int) -> Iterator[int]:
    """Counts of windows to try: 1, 2, 3, 4, 6, 9, ... and `most`."""
    count = 1
    while count < most:
        yield count
        count = max(count + 1, count * 3 // 2)
    if most:
        yield most
