"""ThunderAgent: whole trajectories pause when the KV of an engine would not hold them all."""

from collections.abc import Iterable, Mapping, Sequence

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, pinned
from heddle_core.policy import EngineView, TrajectoryView, View

_AT_ENGINE = ("queued", "running", "preempting")
_IN_TOOL = ("tool", "predicting")


class PauseRestore(OneByOne):
    """Pauses and restores trajectories by the KV that they need (ThunderAgent, arXiv 2602.13692).

    A trajectory is active on its engine, through tool calls too, or paused: its next step waits in
    a backlog of all engines. The active ones of an engine need their contexts and `buffer_tokens`
    each. A new trajectory goes to the engine with the most KV left, if it fits there, else it is
    paused. Every `review_s` seconds

    1. paused ones are restored: those whose next step waits, then new ones, then those in a tool,
       as long as they fit in what all engines have left. The chosen are placed by context, longest
       first, each on the engine with the most left; one that does not fit there stays paused. Here
       the context of an active trajectory that is in a tool for `t` seconds counts ``2 ** -t``
       (`decay`), because its KV may be evicted.
    2. while the active ones of an engine need more than it has, one of them is paused: those in a
       tool first, then the others, which end their step before; of both the least context first.

    One that was paused for `longest_pause_s` is restored in any case.
    """

    def __init__(
        self,
        *,
        review_s: float = 5.0,
        buffer_tokens: int = 100,
        decay: bool = True,
        longest_pause_s: float = 1_800.0,
    ) -> None:
        """Set the interval of reviews and the rules.

        Raises:
            ValueError: an interval or a buffer that is not above 0.
        """
        if not (review_s > 0.0 and buffer_tokens > 0 and longest_pause_s > 0.0):
            raise ValueError("give review_s, buffer_tokens and longest_pause_s above 0")
        self.review_s = review_s
        self._buffer_tokens = buffer_tokens
        self._decay = decay
        self._longest_pause_s = longest_pause_s
        self._next_review_s: float | None = None
        self._paused: dict[TrajectoryId, float] = {}
        """Since when; in a tool, in the backlog, or at the end of the step that is under way."""
        self._restored: dict[TrajectoryId, EngineId] = {}
        """Engines of those that were restored in their tool."""
        self._free: dict[EngineId, float] = {}
        """Tokens that each engine had left at the last review, without those placed since."""

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine of an active trajectory, or one with enough KV for a new one."""
        if self._next_review_s is None:
            self._next_review_s = view.now_s + self.review_s
        if t.id in self._paused:
            return None
        restored = self._restored.pop(t.id, None)
        if restored is not None and view.engine(restored).accepting:
            return restored
        home = pinned(t, view)
        if home is not None:
            return home
        if list(self._free) != [e.id for e in view.engines]:
            self._free = self._left(view)
        engine = _roomiest(self._free)
        if not self._fits(t, self._free[engine], view.engine(engine)):
            self._paused[t.id] = view.now_s
            return None
        self._free[engine] -= self._need(t)
        return engine

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Restore and pause, if a review is due; return the restored ones of the backlog."""
        if self._next_review_s is None or view.now_s < self._next_review_s:
            return []
        self._next_review_s = view.now_s + self.review_s
        restored = self._restore(backlog, view)
        self._free = self._left(view)
        for t, engine in restored:
            self._free[engine] -= self._need(t)
        if min(self._free.values()) < 0.0:
            self._pause(view)
        return [(t.id, engine) for t, engine in restored if t.id in backlog]

    def finished(self, t: TrajectoryView) -> None:
        self._paused.pop(t.id, None)
        self._restored.pop(t.id, None)

    def _restore(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryView, EngineId]]:
        free = self._left(view, restoring=True)
        left = sum(max(0.0, tokens) for tokens in free.values())
        idle = left >= sum(e.kv_capacity_tokens for e in view.engines)
        chosen: list[TrajectoryView] = []
        for t in self._by_class(backlog, view):
            overdue = view.now_s - self._paused[t.id] >= self._longest_pause_s
            if overdue or idle or self._need(t) <= left:
                chosen.append(t)
                left -= self._need(t)
        restored = []
        for t in sorted(chosen, key=lambda t: -t.context_tokens):
            engine = _roomiest(free)
            overdue = view.now_s - self._paused[t.id] >= self._longest_pause_s
            if overdue or self._fits(t, free[engine], view.engine(engine)):
                free[engine] -= self._need(t)
                del self._paused[t.id]
                restored.append((t, engine))
                if t.id not in backlog:
                    self._restored[t.id] = engine
        return restored

    def _by_class(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Iterable[TrajectoryView]:
        """Paused ones: first those that would go on, then new ones, then those in a tool."""
        waiting = [backlog[name] for name in self._paused if name in backlog]
        yield from (t for t in waiting if t.step)
        yield from (t for t in waiting if not t.step)
        for name in list(self._paused):
            t = view.trajectories.get(name)
            if name not in backlog and t is not None and t.phase in _IN_TOOL:
                yield t

    def _pause(self, view: View) -> None:
        """Pause the first of each engine until the rest of them fit."""
        active = sorted(self._active(view), key=lambda a: (not a[2], a[0].context_tokens))
        for t, engine, _ in active:
            if self._free.get(engine, 0.0) < 0.0:
                self._free[engine] += self._need(t)
                self._paused[t.id] = view.now_s
                self._restored.pop(t.id, None)

    def _left(self, view: View, *, restoring: bool = False) -> dict[EngineId, float]:
        """Tokens that the active trajectories of each engine leave free.

        For a restoration those in a tool decay, and steps under way of paused ones count.
        """
        free = {e.id: float(e.kv_capacity_tokens) for e in view.engines}
        for t, home, in_tool in self._active(view, pausing=restoring):
            if home in free:
                decays = restoring and in_tool and self._decay
                share = 2.0 ** (t.tool_started_s - view.now_s) if decays else 1.0
                free[home] -= share * t.context_tokens + self._buffer_tokens
        return free

    def _active(
        self, view: View, *, pausing: bool = False
    ) -> Iterable[tuple[TrajectoryView, EngineId, bool]]:
        """Active trajectories, their engines, and whether they are in a tool.

        With `pausing` also those that will pause at the end of the step that is under way.
        """
        for t in view.trajectories.values():
            home, paused = self._restored.get(t.id, t.home), t.id in self._paused
            if home is None:
                continue
            if t.phase in _IN_TOOL:
                if not paused:
                    yield t, home, True
            elif t.phase in _AT_ENGINE and (pausing or not paused):
                yield t, home, False

    def _need(self, t: TrajectoryView) -> int:
        return t.context_tokens + self._buffer_tokens

    def _fits(self, t: TrajectoryView, free: float, engine: EngineView) -> bool:
        """Whether an engine has KV for `t`; one without an active trajectory always has."""
        return self._need(t) <= free or free >= engine.kv_capacity_tokens


def _roomiest(free: Mapping[EngineId, float]) -> EngineId:
    return max(free, key=free.__getitem__)
