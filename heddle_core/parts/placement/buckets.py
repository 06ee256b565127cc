"""Libra's C-MLFQ: buckets by remaining length, each with its TP degrees; tool results move."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from heddle_core.estimate.state_tree import EndedPath, StateTree
from heddle_core.events import ToolReturned
from heddle_core.ids import EngineId, RolloutId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, pinned
from heddle_core.policy import TrajectoryView, View


@dataclass(frozen=True, slots=True)
class Bucket:
    """Trajectories with at most `limit_tokens` left, and their TP degrees, first ones first."""

    limit_tokens: float
    tps: tuple[int, ...]


SHORT_AND_LONG: Final = (Bucket(5_000, (1, 2)), Bucket(50_000, (4, 8)))
"""Defaults of Libra's code, August 2026."""

REBUILD_ROLLOUTS: Final = 50
RECENT_TRAJECTORIES: Final = 5_000


@dataclass(slots=True)
class _Member:
    bucket: int = 0
    moves: bool = False
    """Whether its bucket has changed since its last placement."""


class Buckets(OneByOne):
    """Libra's causality-driven multi-level feedback queue (arXiv 2606.03077).

    Every trajectory starts in the first bucket. When a tool returns, mean and 90th percentile of
    the remaining lengths at the deepest known prefix of its tool results (`StateTree`) each name
    the first bucket whose limit is not below them, or the last. It moves only if both name the
    same bucket and it is in another. Otherwise it stays on its engine.

    Inside a bucket: of the engines of its first TP degree the one with the fewest steps in flight,
    if these are fewer than `queue_limit`; then those of its further degrees; then those of the
    other buckets, degree by degree from the first bucket on; then any others. Where
    all have reached the limit, a trajectory with a home stays there, and one without waits for the
    first engine below it. With `exceed_limit` both go to the fewest in flight of all engines.

    The tree is rebuilt from the last 5,000 ended trajectories every 50 rollouts. Where none of its
    tool results is known, both lengths are total ones, and its output is subtracted from them
    unless `totals_when_unknown`.
    """

    review_s: float = 0.0

    def __init__(
        self,
        *,
        buckets: Sequence[Bucket] = SHORT_AND_LONG,
        queue_limit: int = 100,
        medium_tokens: int = 500,
        large_tokens: int = 5_000,
        exceed_limit: bool = False,
        totals_when_unknown: bool = False,
    ) -> None:
        """Set the buckets.

        Raises:
            ValueError: there are none, their limits do not ascend, or the queue limit is below 1.
        """
        limits = [bucket.limit_tokens for bucket in buckets]
        if not limits or any(a >= b for a, b in pairwise(limits)):
            raise ValueError(f"limits of buckets must ascend, not be {limits}")
        if queue_limit < 1:
            raise ValueError(f"queue_limit is {queue_limit}; give at least 1")
        self._buckets = tuple(buckets)
        self._queue_limit = queue_limit
        self._exceed_limit = exceed_limit
        self._totals_when_unknown = totals_when_unknown
        self._tree = StateTree(medium_tokens=medium_tokens, large_tokens=large_tokens)
        self._members: dict[TrajectoryId, _Member] = {}
        self._ended: deque[EndedPath] = deque(maxlen=RECENT_TRAJECTORIES)
        self._rollouts: dict[RolloutId, None] = {}
        """Rollouts since the tree was last rebuilt."""

    def bucket(self, t: TrajectoryView) -> int:
        """Return the index of the bucket of `t`."""
        return self._member(t).bucket

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Advance by one state, and choose the bucket anew."""
        self._tree.advance(event, t.output_tokens)
        node, made = self._tree.deepest(t.id, t.group)
        if not node.visits:
            return
        # At the root of the tree, where nothing was made yet, lengths are total ones.
        unknown = made == 0 and not self._totals_when_unknown
        done = t.output_tokens if unknown else 0
        by_mean = self._bucket_of(node.mean - done)
        member = self._member(t)
        if by_mean == self._bucket_of(node.p90() - done) and by_mean != member.bucket:
            member.bucket, member.moves = by_mean, True

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the home of `t`; one in its bucket if it has none or has moved to another."""
        self._begin_rollout(t)
        member, home = self._member(t), pinned(t, view)
        if home is not None and not member.moves:
            return home
        member.moves = False
        return self._engine(view, self._buckets[member.bucket]) or home

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Place the first of the backlog, if an engine is below the limit."""
        first = next(iter(backlog.values()), None)
        if first is None:
            return []
        engine = self._engine(view, self._buckets[self._member(first).bucket])
        return [(first.id, engine)] if engine is not None else []

    def finished(self, t: TrajectoryView) -> None:
        """Insert its remaining lengths, and forget it."""
        self._members.pop(t.id, None)
        ended = self._tree.end(t.id, t.group, t.output_tokens)
        if ended is not None:
            self._ended.append(ended)

    def _member(self, t: TrajectoryView) -> _Member:
        return self._members.setdefault(t.id, _Member())

    def _bucket_of(self, remaining_tokens: float) -> int:
        for index, bucket in enumerate(self._buckets):
            if remaining_tokens <= bucket.limit_tokens:
                return index
        return len(self._buckets) - 1

    def _engine(self, view: View, bucket: Bucket) -> EngineId | None:
        fewest = view.fewest_in_flight()
        if fewest.in_flight >= self._queue_limit:
            return fewest.id if self._exceed_limit else None
        free = [e for e in view.engines if e.in_flight < self._queue_limit]
        others = (tp for each in self._buckets if each is not bucket for tp in each.tps)
        for tp in (*bucket.tps, *others):
            preferred = [e for e in free if e.shape.tp == tp]
            if preferred:
                return min(preferred, key=lambda e: e.in_flight).id
        return fewest.id

    def _begin_rollout(self, t: TrajectoryView) -> None:
        """Count the rollout of `t`; rebuild the tree when enough have begun since the last time."""
        if t.rollout in self._rollouts:
            return
        if len(self._rollouts) == REBUILD_ROLLOUTS:
            self._rollouts.clear()
            self._tree.clear()
            for ended in self._ended:
                self._tree.insert(ended)
        self._rollouts[t.rollout] = None
