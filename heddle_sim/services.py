"""Service pools of the simulated world: environments, rewards and tools, beside its engines.

A pool has a number of places, or is elastic: then a call waits for nobody, but for the start of an
instance if no warm one is idle. Every draw depends on the seed, the pool, the trajectory and the
number of the call alone, so it is the same under every policy and regime.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from struct import Struct
from typing import Annotated, Final, TypeAlias

from heddle_core.bounds import Bounds, bound_faults
from heddle_core.ids import TrajectoryId
from heddle_rollout.clock import Clock
from heddle_rollout.tools import ToolPools

Seconds: TypeAlias = Annotated[float, Bounds(0, below=1e9)]
KEEP_ALIVE_S: Final = 60.0
"""An idle instance of an elastic service is kept for so long; assumed."""

MOST_LOGARITHMS: Final = 10.0
"""Of a lognormal distribution's sigma: one call in six takes over 22,000 times the median."""
_NORMAL: Final = NormalDist()
_NUMBERS: Final = Struct("<3Q").unpack_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A distribution of seconds: constant, normal and cut at 0, or lognormal with a miss branch.

    Raises:
        ValueError: a negative time, or a share that is none.
    """

    seconds: Seconds = 0.0
    """Mean of the normal distribution, median of the lognormal."""
    sigma: Seconds = 0.0
    """Seconds; of a lognormal distribution, of natural logarithms. 0: constant."""
    lognormal: bool = False
    miss_rate: Annotated[float, Bounds(0, 1)] = 0.0
    """Share of calls that take another time, such as starts whose image is in no cache."""
    miss_s: Seconds = 0.0
    """Their median; they have the same sigma."""

    def __post_init__(self) -> None:
        for fault in bound_faults(self):
            raise ValueError(fault)
        if self.lognormal and self.sigma > MOST_LOGARITHMS:
            raise ValueError(
                f"sigma of a lognormal distribution is of natural logarithms and at most "
                f"{MOST_LOGARITHMS:g}, not {self.sigma:g}"
            )

    def drawn(self, normal: float, uniform: float) -> float:
        """Seconds, from a standard normal number and one that is uniform between 0 and 1."""
        if not self.lognormal:
            return max(0.0, self.seconds + self.sigma * normal)
        median_s = self.miss_s if uniform < self.miss_rate else self.seconds
        return median_s * math.exp(self.sigma * normal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """A service with a number of places, or an elastic one.

    Raises:
        ValueError: no place, times and rates out of range, or a cold start of a limited service.
    """

    capacity: Annotated[int | None, Bounds(1, none="no limit")] = None
    """Calls at once; None: elastic."""
    cold_start_s: Seconds = 0.0
    """Of an elastic service: added to a call that finds no warm instance idle."""
    keep_alive_s: Seconds = KEEP_ALIVE_S
    """Of an elastic service: an idle instance stays warm for so long."""
    latency: Latency | None = None
    """Of one call; None: what the trace records, 0 without. Of tools: beside their own time."""
    failure_rate: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of attempts that fail."""
    timeout_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until a failed attempt is noticed; None: as long as one that succeeds."""
    retries: Annotated[int, Bounds(0, 1000)] = 0
    """Attempts after a failed one, before the call has failed."""

    def __post_init__(self) -> None:
        for fault in bound_faults(self):
            raise ValueError(fault)
        if self.capacity is not None and self.cold_start_s:
            raise ValueError(
                "a service with a capacity has its instances running: only an elastic one has a "
                "cold start"
            )


class ServicePool:
    """Calls of one service, in order of their requests; implements `CallPool` of tools."""

    def __init__(
        self, name: str, config: ServiceConfig, clock: Clock, seed: int, *, scale: float = 1.0
    ) -> None:
        """`name` is a part of every draw. Drawn seconds count `scale` times."""
        self.name, self.config = name, config
        self._clock, self._seed, self._scale = clock, seed, scale
        self._held: dict[TrajectoryId, None] = {}
        self._waiting: dict[TrajectoryId, Callable[[], None]] = {}
        self._idle_since: deque[float] = deque()
        """When warm instances became idle, ascending."""
        self._busy_s = self._counted_s = 0.0

    @property
    def running(self) -> int:
        """Places in use."""
        return len(self._held)

    def busy_s(self) -> float:
        """Seconds of places in use so far, all places together."""
        self._count()
        return self._busy_s

    def call(
        self,
        trajectory: TrajectoryId,
        then: Callable[[TrajectoryId, bool], None],
        recorded_s: float = 0.0,
    ) -> None:
        """Call the service; `then` gets whether that succeeded. `recorded_s` is the trace's."""

        def begin(cold_s: float) -> None:
            seconds, ok = self.drawn(trajectory, 0, recorded_s)
            self._clock.call_after(cold_s + seconds, self._end, trajectory, then, ok)

        self._take(trajectory, begin)

    def acquire(self, trajectory: TrajectoryId, call: int, then: Callable[[float], None]) -> None:
        def begin(cold_s: float) -> None:
            then(cold_s + self.drawn(trajectory, call, 0.0)[0])

        self._take(trajectory, begin)

    def release(self, trajectory: TrajectoryId) -> None:
        if self._waiting.pop(trajectory, None) is not None or trajectory not in self._held:
            return
        self._count()
        del self._held[trajectory]
        if self.config.cold_start_s:
            self._idle_since.append(self._clock.now_s)
        if self._waiting:
            self._waiting.pop(next(iter(self._waiting)))()

    def drawn(self, trajectory: TrajectoryId, call: int, recorded_s: float) -> tuple[float, bool]:
        """Seconds of a call, failed attempts included, and whether it succeeds."""
        config = self.config
        latency = config.latency or Latency(seconds=recorded_s)
        if not (latency.sigma or latency.miss_rate or config.failure_rate):
            return latency.seconds * self._scale, True
        total_s = 0.0
        for attempt in range(config.retries + 1):
            normal, miss, failure = self._numbers(trajectory, call, attempt)
            seconds = latency.drawn(normal, miss)
            if failure >= config.failure_rate:
                return (total_s + seconds) * self._scale, True
            total_s += seconds if config.timeout_s is None else config.timeout_s
        return total_s * self._scale, False

    def _numbers(
        self, trajectory: TrajectoryId, call: int, attempt: int
    ) -> tuple[float, float, float]:
        """A standard normal number, and two that are uniform between 0 and 1."""
        key = f"{self._seed}/{self.name}/{trajectory}/{call}/{attempt}"
        digest = hashlib.sha256(key.encode()).digest()
        first, second, third = (((n >> 12) + 0.5) * 2.0**-52 for n in _NUMBERS(digest))
        return _NORMAL.inv_cdf(first), second, third

    def _take(self, trajectory: TrajectoryId, begin: Callable[[float], None]) -> None:
        capacity = self.config.capacity
        if capacity is not None and len(self._held) >= capacity:
            self._waiting[trajectory] = partial(self._begin, trajectory, begin)
        else:
            self._begin(trajectory, begin)

    def _begin(self, trajectory: TrajectoryId, begin: Callable[[float], None]) -> None:
        self._count()
        self._held[trajectory] = None
        begin(self._cold_s() * self._scale)

    def _cold_s(self) -> float:
        """Seconds until an instance is ready; the one that was idle last is taken."""
        idle, config = self._idle_since, self.config
        if not config.cold_start_s:
            return 0.0
        while idle and self._clock.now_s - idle[0] >= config.keep_alive_s * self._scale:
            idle.popleft()
        if not idle:
            return config.cold_start_s
        idle.pop()
        return 0.0

    def _end(
        self, trajectory: TrajectoryId, then: Callable[[TrajectoryId, bool], None], ok: bool
    ) -> None:
        self.release(trajectory)
        then(trajectory, ok)

    def _count(self) -> None:
        now_s = self._clock.now_s
        self._busy_s += len(self._held) * (now_s - self._counted_s)
        self._counted_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServices:
    """The services that tools run on; every time in seconds."""

    pools: Mapping[str, ServiceConfig]
    """By tool."""
    others: ServiceConfig
    """Of all other tools."""
    latency: Latency | None = None
    """Added to every call."""

    def made(self, clock: Clock, seed: int, *, scale: float = 1.0) -> ToolPools:
        def pool(name: str, config: ServiceConfig) -> ServicePool:
            if self.latency is not None and config.latency is None:
                config = replace(config, latency=self.latency)
            return ServicePool(name, config, clock, seed, scale=scale)

        return ToolPools(
            {name: pool(f"tool {name}", config) for name, config in self.pools.items()},
            pool("tools", self.others),
        )
