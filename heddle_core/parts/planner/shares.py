"""Engines of several TP degrees in fixed shares of the GPUs: Libra's shipped configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from heddle_core.ids import EngineShape
from heddle_core.parts.planner.fixed import FixedPlan
from heddle_core.plans import PlanProblem, ResourcePlan
from heddle_core.policy import PolicyContext, TrajectoryView

LIBRA_SHARES: Final[Mapping[int, float]] = {4: 0.5, 2: 0.25, 1: 0.25}
"""Of a node's 8 GPUs one engine at TP 4, one at TP 2 and two at TP 1 (Libra, August 2026)."""


class SharesPlan:
    """`context.mix` if it is given, else half of the GPUs at TP 4, a quarter at TP 2 and TP 1 each.

    Widest first. A degree that the model cannot run at is replaced by the next wider one that it
    can, or by the widest. GPUs that a share has left over go to the next share, and those that the
    last one leaves over to narrower engines.
    """

    needs_all = False

    def __init__(
        self, context: PolicyContext, *, shares: Mapping[int, float] = LIBRA_SHARES
    ) -> None:
        """Divide the GPUs.

        Raises:
            ValueError: they cannot all be used.
        """
        mix = context.mix or mix_of(context, shares)
        self._plan = FixedPlan(replace(context, mix=mix))

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the same plan for any trajectories."""
        return self._plan.plan(ts, remaining)


def mix_of(context: PolicyContext, shares: Mapping[int, float]) -> tuple[EngineShape, ...]:
    """Shapes of engines on all GPUs, by these shares of the GPUs of each class.

    Raises:
        ValueError: some would be left over.
    """
    return tuple(
        shape
        for unplanned in (context.shape, *context.other_shapes)
        for shape in _of_class(context, unplanned, shares)
    )


def _of_class(
    context: PolicyContext, unplanned: EngineShape, shares: Mapping[int, float]
) -> tuple[EngineShape, ...]:
    """The same on the GPUs of one class; `unplanned` is its engines' shape without a choice."""
    gpu = unplanned.gpu
    gpus = context.pools[gpu]
    choices = [s for s in context.shape_choices if s.gpu == gpu and s.gpus <= gpus]
    of_width = {s.gpus: s for s in choices or [unplanned]}
    known = sorted(of_width)
    tps: list[int] = []
    given = 0.0
    for degree in sorted(shares, reverse=True):
        given += shares[degree] * gpus
        tp = next((tp for tp in known if tp >= degree), known[-1])
        tps += [tp] * max(0, int((given - sum(tps)) // tp))
    for tp in reversed(known):
        tps += [tp] * ((gpus - sum(tps)) // tp)
    if sum(tps) < gpus:
        raise ValueError(
            f"engines of TP {', '.join(map(str, known))} leave {gpus - sum(tps)} of {gpus} {gpu} "
            f"GPUs over: take a multiple of {known[0]} GPUs, or name the engines as cluster.mix"
        )
    return tuple(of_width[width] for width in sorted(tps, reverse=True))
