"""Presorted placement: longest trajectories together, on the widest engines.

Heddle (arXiv 2603.28101): trajectories sorted by predicted length are cut into one contiguous group
per engine, for the least estimated makespan. The cut is exact (`search_partition`); the published
dynamic program (`presorted_dp`) gives the same under the published cost.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.estimate.group_cost import IntArray, work_of
from heddle_core.estimate.ordered import Cost, longest_to, ordered_costs
from heddle_core.ids import EngineId, GroupId
from heddle_core.policy import PolicyContext, TrajectoryView, View
from heddle_core.solve.presorted import search_partition

SHARED: Final = 0.01
"""Share of the makespan that samples of a prompt on one engine have to save in its prefill."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Presorted:
    """Groups for the whole rollout at once; homes stay until migration moves them."""

    needs_all = True

    def __init__(
        self, context: PolicyContext, *, cost: Cost = "context", shared: float = SHARED
    ) -> None:
        """Cut by an estimated `cost`; a share of 1 that samples have to save deals them always."""
        self._context, self._shared = context, shared
        self._cost: Cost = cost

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Cut `ts` into a group per engine, widest engine first, or the quickest of all classes.

        Predictions that do not vary as lengths did, less or more, are replaced by the mean of
        history. The samples of a prompt are then dealt to engines in turn; or they stay together,
        where that saves the share `shared` of the makespan in prefill.
        """
        context, history = self._context, self._context.history
        by_shape = {e.shape: context.cost.by_shape[e.shape] for e in view.engines}
        key = longest_to(by_shape, by_shape)
        engines = sorted(view.engines, key=lambda e: key(e.shape))
        varied = history is None or history.lengths_known(remaining)
        if history is None or varied:
            output = np.maximum(np.asarray(remaining, dtype=np.float64), 1.0)
        else:
            output = np.full(len(ts), history.mean_output_tokens())
        work = work_of(
            output,
            context_tokens=np.asarray([t.context_tokens for t in ts]),
            appended_tokens=output * (history.appended_per_output if history else 0.0),
            tool_s=output * (history.tool_s_per_output if history else 0.0),
        )
        order, costs = ordered_costs(work, by_shape, self._cost, max_running=context.max_running)
        cut = search_partition([costs[e.shape] for e in engines], len(ts), tolerance=1e-3)
        together = varied
        if not varied:
            order, copies = _by_prompt(ts, len(engines))
            prefill_s = by_shape[engines[0].shape].prefill_s
            together = copies * prefill_s >= self._shared * cut.makespan_s * len(engines)
        homes = [engines[0].id] * len(ts)
        blocks = np.repeat(np.arange(len(engines)), cut.sizes)
        indices = blocks if together else _interleaved(cut.sizes)
        for k, index in zip(order if together else range(len(ts)), indices, strict=True):
            homes[int(k)] = engines[int(index)].id
        return homes

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Stay at home; without one, join the engine with the fewest unfinished trajectories."""
        home = t.home
        if home is not None and view.engine(home).accepting:
            return home
        return min(view.engines, key=lambda e: e.sessions / e.shape.gpus).id

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: the ledger holds the homes."""


def _by_prompt(ts: Sequence[TrajectoryView], engines: int) -> tuple[IntArray, float]:
    """Order in which the samples of each prompt are neighbours; and the tokens of prompts that so
    many engines prefill more than once if each sample is on another."""
    first: dict[GroupId, int] = {}
    rank = np.array([first.setdefault(t.group, k) for k, t in enumerate(ts)], dtype=np.int64)
    samples = np.bincount(rank)
    prompts = np.array([t.prompt_tokens for t in ts])[: len(samples)]
    copies = np.maximum(np.minimum(samples, engines) - 1, 0)
    return np.argsort(rank, kind="stable"), float(copies @ prompts)


def _interleaved(sizes: Sequence[int]) -> IntArray:
    """Engine index of each trajectory, interleaved, so that samples of a group are spread.

    Member k of an engine's group stands at ``(k + 0.5) / size`` of the order; ties go by engine.
    """
    at = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in sizes])
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    interleaved: IntArray = blocks[np.argsort(at, kind="stable")]
    return interleaved
