"""prime-rl: as many trajectories at once as all KV holds, by what they need in the end."""

from collections.abc import Mapping, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, StickyLeastSessions
from heddle_core.policy import PolicyContext, TrajectoryView, View

FIRST_TOKENS: Final = 32_768
"""Context that a trajectory is taken to need before any has ended, without a history."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KvBudget(OneByOne):
    """prime-rl's adaptive concurrency (pull requests 3285, 3307, 3556), without cancellations.

    At most a limit of trajectories are under way, in tools too; the first steps of others wait. The
    limit begins at all KV over the context that a trajectory has in the end: the mean of those that
    ended, of which the newest counts a tenth; at first that of history. Every `review_s` seconds
    the highest share of KV in use on an engine changes it. Above `soft` it becomes `trim` over that
    share of those under way, which drain. Below, once as many have ended as the limit is, it grows
    by up to a fifth, the less the more KV is in use. A trajectory that starts goes to the engine
    with the fewest, and stays.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        first_tokens: int = FIRST_TOKENS,
        review_s: float = 5.0,
        soft: float = 0.8,
        trim: float = 0.7,
    ) -> None:
        """Set the first need without a history, the interval of reviews and the shares of KV.

        Raises:
            ValueError: an interval that is not above 0, or shares that are not 0 < trim <= soft.
        """
        if not (review_s > 0.0 and 0.0 < trim <= soft):
            raise ValueError("give review_s above 0, and 0 < trim <= soft")
        self.review_s, self._soft, self._trim = review_s, soft, trim
        history = context.history
        self._need = float(first_tokens)
        self._adds_prompt = history is not None
        if history is not None:
            self._need = history.mean_output_tokens() * (1.0 + history.appended_per_output)
        self._limit = 0.0
        self._under_way: dict[TrajectoryId, None] = {}
        self._ended = 0
        self._next_review_s: float | None = None
        self._engines = StickyLeastSessions()

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine of a trajectory that is under way or may start."""
        if self._next_review_s is None:
            self._next_review_s = view.now_s + self.review_s
            if self._adds_prompt:
                self._need += t.prompt_tokens
            kv = sum(e.kv_capacity_tokens for e in view.engines)
            self._limit = max(kv / self._need, float(len(view.engines)))
        if t.id not in self._under_way:
            if len(self._under_way) >= self._limit:
                return None
            self._under_way[t.id] = None
        return self._engines.place(t, view)

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Review the limit if that is due; start the first that waits if there is room."""
        if self._next_review_s is not None and view.now_s >= self._next_review_s:
            self._next_review_s = view.now_s + self.review_s
            self._review(view)
        for t in backlog.values():
            engine = self.place(t, view)
            return [] if engine is None else [(t.id, engine)]
        return []

    def finished(self, t: TrajectoryView) -> None:
        if t.id in self._under_way:
            del self._under_way[t.id]
            self._ended += 1
            self._need += 0.1 * (t.context_tokens - self._need)

    def _review(self, view: View) -> None:
        used = max(e.reported_kv_used_tokens / e.kv_capacity_tokens for e in view.engines)
        count, least = len(self._under_way), float(len(view.engines))
        if used > self._soft:
            self._limit = max(min(self._limit, count * self._trim / used), least)
            self._ended = 0
        elif self._ended >= self._limit and count >= 0.9 * self._limit:
            self._limit *= 1.0 + 0.2 * (1.0 - used / self._soft)
            self._ended = 0
