"""prime-rl: as many trajectories at once as KV in use, waiting steps and preemptions allow."""

from collections.abc import Mapping, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, StickyLeastSessions
from heddle_core.policy import PolicyContext, TrajectoryView, View

MAX_MODEL_LEN: Final = 32_768
"""Tokens of the longest context, where it is not known."""
MOST: Final = 1024.0
GROWTH: Final = 1.2
"""Of the limit while as many end as are under way, with no KV in use."""
BINDING: Final = 0.9
SOFT: Final = 0.8
TARGET: Final = 0.7
QUEUE_RATIO: Final = 0.5
REVIEWS: Final = 6
"""From one trim to the next, of crowded queues before a cut, of harder cuts after one drained."""
QUEUE_CUT: Final = 0.9
PREEMPTION_CUT: Final = 0.8
ESCALATED_CUT: Final = 0.5
STALE_S: Final = 15.0


@mypyc_attr(allow_interpreted_subclasses=True)
class KvBudget(OneByOne):
    """prime-rl's adaptive concurrency, without cancellations.

    At most a limit of trajectories are under way, in tools too; the first steps of others wait. It
    begins at all KV over the longest context. Each end grows it while it binds, reports are fresh,
    no step waits and no engine preempts. Reviews lower it to a share of those under way; the excess
    drains. Preemptions, or waiting steps above `QUEUE_RATIO` of those running, cut it: not again
    before the excess has drained, and harder soon after. A new trajectory goes to the engine with
    the fewest, and stays.

    Source: prime-rl's `orchestrator/concurrency.py` of September 2026: pull requests 3285 (August),
    3307 (shares of KV), 3556 (`GROWTH` tapers to 1 at `SOFT`).
    """

    review_s: float = 5.0

    def __init__(self, context: PolicyContext) -> None:
        self._max_model_len = context.max_context or MAX_MODEL_LEN
        self._limit = 0.0
        self._growth = 1.0
        self._under_way: dict[TrajectoryId, None] = {}
        self._preemptions: dict[EngineId, int] = {}
        self._queued_reviews = self._until_trim = self._grace = 0
        self._draining = self._escalated = False
        self._next_review_s: float | None = None
        self._engines = StickyLeastSessions()

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine of a trajectory that is under way or may start."""
        if self._next_review_s is None:
            self._next_review_s = view.now_s + self.review_s
            kv = sum(e.kv_capacity_tokens for e in view.engines)
            self._limit = min(max(kv / self._max_model_len, 1.0), MOST)
        if t.id not in self._under_way:
            if len(self._under_way) >= int(self._limit):
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
            count = len(self._under_way)
            if count >= BINDING * int(self._limit):
                self._limit = min(self._limit * self._growth ** (1.0 / count), MOST)
            del self._under_way[t.id]

    def _review(self, view: View) -> None:
        engines, count = view.engines, len(self._under_way)
        used = max(e.reported_kv_used_tokens / e.kv_capacity_tokens for e in engines)
        running = sum(e.running_steps for e in engines)
        waiting = sum(e.in_flight - e.running_steps for e in engines)
        before = self._preemptions
        self._preemptions = {e.id: e.reported_preemptions for e in engines}
        preempted = any(n > before.get(name, n) for name, n in self._preemptions.items())
        crowded = 0 < QUEUE_RATIO * running < waiting
        self._queued_reviews = self._queued_reviews + 1 if crowded else 0
        queued = self._queued_reviews >= REVIEWS
        if self._draining and count <= int(self._limit) and not (preempted or queued):
            self._draining, self._grace = False, REVIEWS
        if self._escalated and not self._draining:
            self._grace -= 1
            self._escalated = self._grace > 0
        self._until_trim = max(self._until_trim - 1, 0)
        calm = not (waiting or preempted or self._draining)
        fresh = view.now_s - max(e.reported_s for e in engines) < STALE_S
        self._growth = 1.0 + (GROWTH - 1.0) * max(1.0 - used / SOFT, 0.0) if calm and fresh else 1.0
        if self._draining:
            return
        if preempted or queued:
            first = QUEUE_CUT if queued else PREEMPTION_CUT
            self._lower(count * (ESCALATED_CUT if self._escalated else first))
            self._queued_reviews = 0 if queued else self._queued_reviews
            self._draining = self._escalated = True
        elif used > SOFT and count and not self._until_trim:
            self._lower(count * TARGET / used)
            self._until_trim = REVIEWS

    def _lower(self, target: float) -> None:
        self._limit = float(min(max(int(target), 1), int(self._limit)))
