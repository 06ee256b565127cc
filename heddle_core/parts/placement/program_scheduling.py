"""Program scheduling of vllm-router: admission by KV, a backlog, and a time-to-live in tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.estimate.tool_times import RecentDurations
from heddle_core.events import ToolReturned
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.consistent_hash import ConsistentHash
from heddle_core.parts.placement.load_and_pin import OneByOne
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View

ENOUGH: Final = 100
"""Tool calls before which the time-to-live is 0."""


@dataclass(slots=True)
class Member:
    """A trajectory as the router has it."""

    engine: EngineId
    """To which it is bound."""
    prefill_s: float
    """Estimated seconds for each token of its context there."""
    active: bool = False
    waits_since_s: float | None = None
    """Since when its next step waits in the backlog."""
    keep: tuple[int, float] = (-1, 0.0)
    """A step, and the time-to-live of its tool call."""


@dataclass(slots=True)
class Space:
    """What the active trajectories of an engine leave."""

    tokens: float
    active: dict[TrajectoryId, None] = field(default_factory=dict)
    waiting: int = 0
    """Steps of the backlog that are bound to it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ProgramScheduling(OneByOne):
    """Program scheduling of vllm-router 0.1.17, with its defaults and `global_queue`.

    A trajectory is bound to an engine by consistent hashing. It is active there, or paused: then
    its steps wait in the backlog. The active ones need their contexts and `buffer_tokens` each. One
    is admitted to an engine whose KV holds it too, which has fewer than `max_active` active ones,
    and where no step waits. A step of a paused trajectory is admitted at once if none waits before
    it.

    In a tool a trajectory stays active for the time-to-live: of the durations of the last calls
    the one of the most ``P(s) * impact_s - s``, with the share `P(s)` of calls that took at most
    `s`, and `impact_s` the estimated prefill of its context times ``2 - alpha``; at most
    `longest_s`, and 0 before `ENOUGH` calls.

    Every `review_s` seconds: where the active ones need more KV than there is, some that are not in
    a tool pause after their step, the least context first. Then steps leave the backlog: those that
    waited for `force_s` in any case; on the engine that they are bound to, those with the latest
    previous step first; at last, first come first served, on the engine with the most KV left, if
    that has `headroom` contexts more left than their own, to which they are bound from then on.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        review_s: float = 1.0,
        buffer_tokens: int = 100,
        max_active: int = 64,
        headroom: float = 1.2,
        longest_s: float = 10.0,
        alpha: float = 0.15,
        force_s: float = 300.0,
    ) -> None:
        """Set the rules.

        Raises:
            ValueError: an interval or a limit that is not above 0.
        """
        if not (review_s > 0.0 and max_active > 0 and force_s > 0.0):
            raise ValueError("give review_s, max_active and force_s above 0")
        self.review_s = review_s
        self._cost = context.cost
        self._buffer_tokens = buffer_tokens
        self._max_active = max_active
        self._headroom = headroom
        self._longest_s = longest_s
        self._impact = 2.0 - alpha
        self._force_s = force_s
        self._bind = ConsistentHash(160)
        self._members: dict[TrajectoryId, Member] = {}
        self._spaces: dict[EngineId, Space] = {}
        self._engines: list[EngineView] = []
        """Those of `_spaces`."""
        self._calls = RecentDurations()
        self._next_review_s: float | None = None

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Learn how long a call took; one beyond its time-to-live pauses."""
        member = self._members.get(t.id)
        if member is not None and member.active and member.keep[0] != event.step:
            member.keep = (event.step, self._keep_s(t, member))
        seconds = event.time_s - t.tool_started_s
        if member is not None and seconds > member.keep[1]:
            self._pause(t, member)
        self._calls.add(seconds)

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine of an active trajectory or of one that is admitted at once."""
        if self._next_review_s is None:
            self._next_review_s = view.now_s + self.review_s
        if self._engines != list(view.engines):
            self._count(view)
        member = self._members.get(t.id)
        if member is None or not view.engine(member.engine).accepting:
            member = self._members[t.id] = Member(*self._binding(t, view))
        space = self._spaces[member.engine]
        if member.active:
            return member.engine
        if not space.waiting and self._admits(t, space, view.engine(member.engine)):
            return self._admit(t, member, space)
        if member.waits_since_s is None:
            member.waits_since_s = view.now_s
            space.waiting += 1
        return None

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Pause and admit, if a review is due."""
        if self._next_review_s is None or view.now_s < self._next_review_s:
            return []
        self._next_review_s = view.now_s + self.review_s
        self._count(view)
        self._repair(view)
        return [
            *self._forced(backlog, view),
            *self._at_home(backlog, view),
            *self._elsewhere(backlog, view),
        ]

    def finished(self, t: TrajectoryView) -> None:
        member = self._members.pop(t.id, None)
        if member is None or member.engine not in self._spaces:
            return
        space = self._spaces[member.engine]
        if member.active:
            space.tokens += self._need(t)
            space.active.pop(t.id, None)
        elif member.waits_since_s is not None:
            space.waiting -= 1

    def _forced(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryId, EngineId]]:
        late_s = view.now_s - self._force_s
        waiting = [(t, self._member(t, view)) for t in backlog.values()]
        return [
            (t.id, self._admit(t, member, self._spaces[member.engine]))
            for t, member in waiting
            if member.waits_since_s is not None and member.waits_since_s <= late_s
        ]

    def _at_home(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryId, EngineId]]:
        admitted = []
        ready = {e.id for e in view.engines if self._takes_one_more(e)}
        waiting = [t for t in backlog.values() if self._member(t, view).engine in ready]
        for t in sorted(waiting, key=self._order):
            member = self._members[t.id]
            space = self._spaces[member.engine]
            if not member.active and self._admits(t, space, view.engine(member.engine)):
                admitted.append((t.id, self._admit(t, member, space)))
        return admitted

    def _order(self, t: TrajectoryView) -> tuple[bool, bool, float]:
        """Those with the latest previous step first, then new ones."""
        return False, t.step == 0, -t.tool_started_s

    def _elsewhere(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryId, EngineId]]:
        admitted: list[tuple[TrajectoryId, EngineId]] = []
        name = max(self._spaces, key=lambda e: self._spaces[e].tokens, default=None)
        for t in backlog.values():
            if name is None or not self._takes_one_more(view.engine(name)):
                break
            member = self._member(t, view)
            if member.active:
                continue
            space, own = self._spaces[name], self._spaces[member.engine]
            least = max(own.tokens, 0.0) + self._headroom * t.context_tokens
            if space.tokens >= least and self._admits(t, space, view.engine(name)):
                own.waiting -= 1
                space.waiting += 1
                member.engine, member.prefill_s = name, self._prefill_s(view.engine(name))
                admitted.append((t.id, self._admit(t, member, space)))
                name = max(self._spaces, key=lambda e: self._spaces[e].tokens)
        return admitted

    def _member(self, t: TrajectoryView, view: View) -> Member:
        """Return the state of a trajectory of the backlog, bound to an engine that accepts work."""
        member = self._members[t.id]
        if member.engine not in self._spaces:
            member.engine, member.prefill_s = self._binding(t, view)
            self._spaces[member.engine].waiting += 1
        return member

    def _admits(self, t: TrajectoryView, space: Space, engine: EngineView) -> bool:
        fits = self._need(t) <= space.tokens or not space.active
        return fits and self._takes_one_more(engine)

    def _takes_one_more(self, engine: EngineView) -> bool:
        """Whether it may have one more active trajectory, if its KV holds that."""
        free = engine.in_flight <= engine.running_steps
        return free and len(self._spaces[engine.id].active) < self._max_active

    def _admit(self, t: TrajectoryView, member: Member, space: Space) -> EngineId:
        if member.waits_since_s is not None:
            space.waiting -= 1
        member.active, member.waits_since_s = True, None
        space.tokens -= self._need(t)
        space.active[t.id] = None
        return member.engine

    def _pause(self, t: TrajectoryView, member: Member) -> None:
        space = self._spaces.get(member.engine)
        if member.active and space is not None:
            space.tokens += self._need(t)
            space.active.pop(t.id, None)
        member.active = False

    def _count(self, view: View) -> None:
        """Count anew what is left; trajectories beyond their time-to-live pause."""
        spaces = {e.id: Space(float(e.kv_capacity_tokens)) for e in view.engines}
        for name, member in self._members.items():
            space, t = spaces.get(member.engine), view.trajectories[name]
            if member.active and t.phase in ("tool", "predicting"):
                if member.keep[0] != t.step:
                    member.keep = (t.step, self._keep_s(t, member))
                member.active = view.now_s - t.tool_started_s <= member.keep[1]
            if space is None:
                continue
            if member.active:
                space.tokens -= self._need(t)
                space.active[name] = None
            elif member.waits_since_s is not None:
                space.waiting += 1
        self._spaces, self._engines = spaces, list(view.engines)

    def _repair(self, view: View) -> None:
        """Let trajectories pause after their step where the active ones need too much KV."""
        if all(space.tokens >= 0.0 for space in self._spaces.values()):
            return
        members = [(view.trajectories[name], m) for name, m in self._members.items() if m.active]
        for t, member in sorted(members, key=lambda m: m[0].context_tokens):
            space = self._spaces.get(member.engine)
            at_engine = t.phase in ("queued", "running", "preempting")
            if space is not None and space.tokens < 0.0 and at_engine:
                self._pause(t, member)

    def _binding(self, t: TrajectoryView, view: View) -> tuple[EngineId, float]:
        engine = view.engine(self._bind.place(t, view))
        return engine.id, self._prefill_s(engine)

    def _prefill_s(self, engine: EngineView) -> float:
        return self._cost.by_shape[engine.shape].prefill_s

    def _keep_s(self, t: TrajectoryView, member: Member) -> float:
        if len(self._calls) < ENOUGH:
            return 0.0
        impact_s = self._impact * member.prefill_s * t.context_tokens
        return min(self._calls.best_limit_s(impact_s), self._longest_s)

    def _need(self, t: TrajectoryView) -> int:
        return t.context_tokens + self._buffer_tokens
