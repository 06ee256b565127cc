"""Tail consolidation: freed engines become wide ones, and the last trajectories move there."""

from heddle_core.ids import TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_core.policy import PolicyContext, TrajectoryView, View
from heddle_core.solve.tail import TailProblem, first_search_at

CHARGED_S = 1.0
"""Seconds of solver time that the simulator lets pass; measured at 512 trajectories on 32 engines,
rounded up."""

_FEWER = 0.9
"""Share of the trajectories left at which the next search begins: a tenth has ended."""

_LEAST_LEFT = 0.25
"""Least share of its estimate that a running step keeps: it has not ended."""


class TailConsolidation:
    """Returns the tail problem each time a tenth of the trajectories has ended, once no step waits.

    A rollout's last tenth may last as long as the rest, on engines planned for all trajectories,
    with most GPUs idle. The solution may stop engines whose GPUs together make one of the widest
    degree, and it moves homes. It changes nothing unless the estimated gain, engine starts
    included, is at least `min_gain_s` and the share `margin` of the remaining time. From the second
    rollout on the gain must pay for the start of the former engines too, which the next one needs.
    """

    def __init__(
        self, context: PolicyContext, *, min_gain_s: float = 2.0, margin: float = 0.05
    ) -> None:
        self._context = context
        self._min_gain_s, self._margin = min_gain_s, margin
        self._limit = first_search_at(sum(context.pools.values()))
        self._next = self._limit
        self._unfinished = 0
        self._rollouts = 0

    def consolidate(self, view: View) -> TailProblem | None:
        """Return the problem when a search is due; cheap while it is not."""
        unfinished = view.unfinished
        if unfinished > self._unfinished:  # others have arrived: another rollout
            self._next = self._limit
            self._rollouts += 1
        self._unfinished = unfinished
        if not 0 < unfinished <= self._next:
            return None
        if any(e.in_flight > e.running_steps for e in view.engines):
            return None
        self._next = min(unfinished - 1, int(_FEWER * unfinished))
        return self._problem(view)

    def _problem(self, view: View) -> TailProblem | None:
        context, engines = self._context, view.engines
        at = {e.id: k for k, e in enumerate(engines)}
        tpot_s = [
            context.cost.by_shape[e.shape].iteration_s(
                max(e.running_steps, 1), e.estimated_kv_tokens
            )
            for e in engines
        ]
        ids: list[TrajectoryId] = []
        homes: list[int] = []
        output: list[float] = []
        contexts: list[float] = []
        own: list[tuple[float, float]] = []
        for t in view.trajectories.values():
            home = at.get(t.home) if t.home is not None else None
            if home is None:
                continue
            made = 0.0
            if t.phase in ("running", "preempting"):
                made = (view.now_s - t.dispatched_s) / tpot_s[home]
                made = min(made, (1.0 - _LEAST_LEFT) * t.remaining_tokens)
            ids.append(t.id)
            homes.append(home)
            output.append(max(t.remaining_tokens - made, 1.0))
            contexts.append(t.context_tokens + made)
            own.append(_per_output(t))
        if not ids:
            return None
        return_s = max(context.start_s(e.shape) for e in engines) if self._rollouts > 1 else 0.0
        shapes = sorted({*context.shape_choices, *(e.shape for e in engines)})
        return TailProblem(
            engines=tuple(
                EngineSpec(engine=e.id, shape=e.shape, max_running=e.max_running) for e in engines
            ),
            trajectories=tuple(ids),
            homes=tuple(homes),
            output_tokens=tuple(output),
            context_tokens=tuple(contexts),
            appended_per_output=tuple(appended for appended, _ in own),
            tool_s_per_output=tuple(tool_s for _, tool_s in own),
            by_shape={shape: context.cost.by_shape[shape] for shape in shapes},
            start_s=context.engine_start_s,
            start_s_by_shape={shape: context.start_s(shape) for shape in shapes},
            min_gain_s=self._min_gain_s + return_s,
            margin=self._margin,
            charged_s=CHARGED_S,
        )


def _per_output(t: TrajectoryView) -> tuple[float, float]:
    """Tokens appended by tools and seconds in tools, for each token that `t` has made."""
    made = t.output_tokens
    if made == 0:
        return 0.0, 0.0
    return max(0.0, t.context_tokens - t.prompt_tokens - made) / made, t.tool_s / made
