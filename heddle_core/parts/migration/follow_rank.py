"""Opportunistic migration as published: follow the rank of the newest prediction."""

from bisect import bisect_right
from itertools import accumulate

from heddle_core.estimate.ordered import longest_to
from heddle_core.estimate.paper_cost import seconds_per_token
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.migration.sorted_numbers import SortedNumbers
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View


class FollowRank:
    """Heddle (arXiv 2603.28101): the rank falls into a group, and its engine is the new home.

    Group sizes are those at the first call, scaled by the share of trajectories that is left
    (``s_i * n / n_0``). Trajectories are ranked by predicted total length. Ranked by remaining
    tokens, running ones would fall below waiting ones at every step, and progress alone would move
    them to other engines.

    With a `context`, a rank is followed only to where the trajectory would end earlier. That
    departs from the paper. A predictor that hedges raises the total of every trajectory that goes
    on, so survivors rank above those not predicted again, and all follow their ranks to the widest
    engine.
    """

    def __init__(self, context: PolicyContext | None = None) -> None:
        self._context = context
        self._value: dict[TrajectoryId, float] = {}
        self._ranking = SortedNumbers()
        self._engines: list[EngineId] = []
        """Widest first."""
        self._newest: EngineId | None = None
        self._edges: list[int] = []

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine whose group contains the rank of `t`, None if that is its home."""
        engines = view.engines
        # Engines join at the end, and ids are never used twice: the last and their number suffice.
        if len(self._engines) != len(engines) or self._newest != engines[-1].id:
            self._form_groups(view)
        value = t.output_tokens + remaining_tokens
        self._forget(t.id)
        longer = self._ranking.above(value)
        self._value[t.id] = value
        self._ranking.add(value)
        rank = longer * self._edges[-1] / len(self._ranking)
        found = self._engines[min(bisect_right(self._edges, rank), len(self._engines) - 1)]
        if found == t.home or not self._earlier(t, remaining_tokens, found, view):
            return None
        return found

    def finished(self, t: TrajectoryView) -> None:
        """Take a finished trajectory out of the ranking."""
        self._forget(t.id)

    def _earlier(
        self, t: TrajectoryView, remaining_tokens: float, found: EngineId, view: View
    ) -> bool:
        """Whether `t` would end earlier there, after the transfer that its tool does not hide."""
        context = self._context
        if context is None or t.home is None:
            return True
        home, there = view.engine(t.home), view.engine(found)
        # The mean tool call so far stands for this one, which is over when a prediction is awaited.
        hidden_s = t.tool_s / t.step if t.step and t.phase == "tool" else 0.0
        price_s = max(context.cost.transfer_s(t.context_tokens) - hidden_s, 0.0)
        stay_s = self._end_s(t, remaining_tokens, home, home.sessions)
        return self._end_s(t, remaining_tokens, there, there.sessions + 1) + price_s < stay_s

    def _end_s(
        self, t: TrajectoryView, remaining_tokens: float, engine: EngineView, members: int
    ) -> float:
        """``L * T * F(g)`` with the trajectory's own remaining tokens for `L`."""
        assert self._context is not None
        return remaining_tokens * seconds_per_token(
            self._context.cost.by_shape[engine.shape],
            members,
            context_tokens=t.context_tokens + remaining_tokens / 2,
            max_running=engine.max_running,
        )

    def _form_groups(self, view: View) -> None:
        """Read the groups from the homes, widest engine first."""
        shapes = dict.fromkeys(e.shape for e in view.engines)
        costs = self._context.cost.by_shape if self._context is not None else {}
        key = longest_to(shapes, costs)
        engines = sorted(view.engines, key=lambda e: key(e.shape) if costs else -e.shape.gpus)
        self._engines = [e.id for e in engines]
        self._newest = view.engines[-1].id
        self._edges = list(accumulate(e.sessions for e in engines))
        self._value = {
            other.id: other.output_tokens + other.remaining_tokens
            for other in view.trajectories.values()
        }
        self._ranking = SortedNumbers(self._value.values())

    def _forget(self, trajectory: TrajectoryId) -> None:
        value = self._value.pop(trajectory, None)
        if value is not None:
            self._ranking.remove(value)
