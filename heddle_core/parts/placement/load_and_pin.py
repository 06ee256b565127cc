"""Placements one step at a time by load, by the engine where a trajectory first ran, or both."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View


@mypyc_attr(allow_interpreted_subclasses=True)
class OneByOne(ABC):
    """A placement that never waits for the whole rollout and by default keeps no state."""

    needs_all: bool = False

    @abstractmethod
    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Home for one runnable step; None if it has to wait."""
        ...

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Homes in the given order, each chosen independently; the first engine for who waits."""
        return [self.place(t, view) or view.engines[0].id for t in ts]

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""
        return


def pinned(t: TrajectoryView, view: View) -> EngineId | None:
    """Return `t`'s home while it accepts work.

    The pin *is* the home, not a second table, so that a migration moves the pin.
    """
    home = t.home
    if home is not None and view.engine(home).accepting:
        return home
    return None


def loads(view: View) -> tuple[EngineView, int]:
    """Return the first engine with the fewest steps in flight, and the most that any has."""
    best = view.engines[0]
    fewest = most = best.in_flight
    for engine in view.engines:
        load = engine.in_flight
        if load < fewest:
            best, fewest = engine, load
        elif load > most:
            most = load
    return best, most


@mypyc_attr(allow_interpreted_subclasses=True)
class Sticky(OneByOne):
    """A known trajectory stays on its engine; a new one goes to the fewest steps in flight.

    As in verl's balancer: a least-recently-used table of at most `capacity` trajectories, first of
    equals on a miss, or with a `seed` any of them. A trajectory evicted from a full table counts as
    new. `capacity=None` never forgets an unfinished trajectory. With a `margin`, a known one leaves
    an engine that has so many more steps in flight than the fewest, without its KV.
    """

    def __init__(
        self, capacity: int | None = None, *, margin: int | None = None, seed: int | None = None
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity of the pin table is {capacity}; give at least 1")
        if margin is not None and margin < 0:
            raise ValueError(f"margin is {margin}; give 0 or more steps in flight")
        self._capacity, self._margin = capacity, margin
        self._random = None if seed is None else np.random.default_rng(seed)
        self._recent: dict[TrajectoryId, None] = {}

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, or the least loaded one without a pin."""
        home = self._pin(t, view)
        if home is not None and self._margin is not None:
            fewest = view.fewest_in_flight().in_flight
            home = home if view.engine(home).in_flight <= fewest + self._margin else None
        return home or self._fewest(view)

    def _pin(self, t: TrajectoryView, view: View) -> EngineId | None:
        capacity = self._capacity
        if capacity is None:
            return pinned(t, view)
        recent = self._recent
        known = t.id in recent
        if known:
            del recent[t.id]
        recent[t.id] = None
        if len(recent) > capacity:
            del recent[next(iter(recent))]
        return pinned(t, view) if known else None

    def _fewest(self, view: View) -> EngineId:
        best = view.fewest_in_flight()
        if self._random is None:
            return best.id
        equal = [e.id for e in view.engines if e.in_flight == best.in_flight]
        return equal[int(self._random.integers(len(equal)))]

    def finished(self, t: TrajectoryView) -> None:
        self._recent.pop(t.id, None)


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded(OneByOne):
    """Every step goes to the engine with the fewest steps in flight: slime in the Heddle paper."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the least loaded engine, wherever the trajectory's KV prefix is."""
        return view.fewest_in_flight().id


@mypyc_attr(allow_interpreted_subclasses=True)
class StickyGroup(OneByOne):
    """A known trajectory stays on its engine, a new sample joins the others of its prompt.

    Affinity by KV prefix with the prompt in the prefix: samples of a prompt share it. The first
    sample of a prompt goes to the fewest steps in flight, the first of equals. When all arrive at
    once, that deals prompts to the engines in turn. A prompt is forgotten when its last placed
    sample has finished, or when its engine accepts no more work.
    """

    def __init__(self) -> None:
        self._engines: dict[GroupId, EngineId] = {}
        self._placed: dict[GroupId, dict[TrajectoryId, None]] = {}
        """Unfinished samples of each prompt that were placed here."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, else that of the prompt, else the least loaded one."""
        home = pinned(t, view)
        if home is not None:
            return home
        engine = self._engines.get(t.group)
        if engine is None or not view.engine(engine).accepting:
            engine = self._engines[t.group] = view.fewest_in_flight().id
        self._placed.setdefault(t.group, {})[t.id] = None
        return engine

    def finished(self, t: TrajectoryView) -> None:
        """Forget the trajectory, and its prompt with the last sample."""
        placed = self._placed.get(t.group)
        if placed is None:
            return
        placed.pop(t.id, None)
        if not placed:
            del self._placed[t.group], self._engines[t.group]


@mypyc_attr(allow_interpreted_subclasses=True)
class StickyLeastSessions(OneByOne):
    """A known trajectory stays; a new one goes to the engine with the fewest unfinished ones.

    Steps in flight leave out trajectories in a tool, which return. SkyRL since June 2026 and
    prime-rl since September 2026 (`sticky_least_loaded`) count them.
    """

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, or the one with the fewest sessions, the first of equals."""
        home = pinned(t, view)
        if home is not None:
            return home
        engines = view.engines
        best = engines[0]
        fewest = best.sessions
        for engine in engines:
            if engine.sessions < fewest:
                best, fewest = engine, engine.sessions
        return best.id


@mypyc_attr(allow_interpreted_subclasses=True)
class HybridRatio(OneByOne):
    """Least loaded while the largest load exceeds `ratio` times the smallest, else pinned.

    The literal reading of verl* in the Heddle paper (arXiv 2603.28101, baselines: skew as max/min,
    with 32 as its example). Load is steps in flight. A smallest load of 0 counts as 1: otherwise
    the ratio would be infinite, and every idle engine would switch the pin off. New trajectories,
    and those without an engine, go to the least loaded one.
    """

    def __init__(self, ratio: float = 32.0) -> None:
        if not ratio >= 1.0:
            raise ValueError(f"ratio of largest to smallest load is {ratio}; give at least 1")
        self._ratio = ratio

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the home unless there is none or the loads are skewed."""
        best, most = loads(view)
        if most > self._ratio * max(best.in_flight, 1):
            return best.id
        return pinned(t, view) or best.id


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedKv(OneByOne):
    """Every step goes to the fewest steps in flight where engines share a store of KV.

    Without one (`cluster.host_kv`), where another engine would prefill the context, a trajectory
    stays where it first ran.
    """

    def __init__(self, context: PolicyContext) -> None:
        costs = context.cost.by_shape.values()
        self._shared = all(cost.load_s is not None for cost in costs)

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the least loaded engine; without a store, the home if it accepts work."""
        home = None if self._shared else pinned(t, view)
        return home or view.fewest_in_flight().id
