"""Schedulers: the order of one engine's queue."""

import math
from bisect import bisect_right
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.estimate.arrival_waves import ArrivalWaves
from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId
from heddle_core.policy import TrajectoryView


@mypyc_attr(allow_interpreted_subclasses=True)
class Fcfs:
    """Every step has the same urgency, so the queue's tie rule alone decides: arrival.

    The arrival is that of the step: a trajectory that returns from its tool goes to the tail.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return 0.0


_KEPT_FIRST: Final = 1e9  # more arrivals than any run has


@mypyc_attr(allow_interpreted_subclasses=True)
class ProgramFcfs:
    """The order of Continuum (arXiv 2511.02230): KV in place first, then the earlier trajectory.

    A step whose KV was kept through its tool call goes before all whose was not. Within both, the
    trajectory that arrived earlier goes first, however late its step became runnable.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the number of the arrival, raised for kept KV."""
        return (_KEPT_FIRST if t.kv_kept else 0.0) - t.arrival


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin:
    """The trajectory with the fewest finished steps goes first; ties by arrival in the queue.

    The Heddle paper (arXiv 2603.28101) calls the order of its baselines round robin and sends a
    trajectory that returns from its tool to the tail of the queue. Read literally, that is arrival
    of the step, exactly `Fcfs`; but the paper plots FCFS and round robin separately. This part is a
    reading under which they differ: no trajectory gets another step while one with fewer steps
    waits at the same engine.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return -float(t.step)


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestFirst:
    """Orders the queue by predicted remaining tokens, longest first, and never evicts.

    The classic rule against long tails (Graham, 1969): what ends last should start first. It
    decides at dispatch only; `ProgressivePriority` is the same order with eviction.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return remaining_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestTotal:
    """Key: output made plus output predicted to come; no eviction.

    Ordered by *remaining* tokens (Algorithm 1), a long trajectory that has made progress falls
    behind others that have not started. All of them then end together, with all their KV in use at
    once. Ordered by the total it keeps its rank: the longest still start first, started ones
    continue, and the others use no KV yet.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return t.output_tokens + remaining_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class ShortestFirst:
    """Orders the queue by predicted remaining tokens, shortest first, and never evicts.

    Best for the mean completion time of jobs on one machine, and the wrong order for a makespan: it
    shows how much an order can cost. The Heddle paper (arXiv 2603.28101) describes its Autellix
    baseline in these words; the part `Autellix` is what Autellix itself does.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return -remaining_tokens


TOKEN_S: Final = 0.04
"""Seconds of age that count as much as one remaining token: two decode iterations of an engine
that takes 20 ms for each."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ShortestAged:
    """The least goes first of arrival time plus `token_s` for each remaining token.

    Between two that arrived together it is `ShortestFirst`. But a trajectory passes only those that
    arrived before it by less than `token_s` for each token by which it is shorter, so a long one is
    not passed for ever. It goes up as it makes progress. It never evicts.
    """

    preemptive = False

    def __init__(self, *, token_s: float = TOKEN_S) -> None:
        """Set the weight of length against age.

        Raises:
            ValueError: it is below 0.
        """
        if token_s < 0.0:
            raise ValueError(f"token_s is {token_s}; give 0 or more seconds")
        self._token_s = token_s

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the time, in seconds of the run's clock."""
        return -(t.arrived_s + self._token_s * remaining_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
class ByArrivals:
    """`LongestTotal` while most unfinished trajectories came in one wave, else `ShortestAged`.

    The first is for the end of a batch, the second for the mean time of a trajectory; which of them
    is in force is for `ArrivalWaves`. Keys of `LongestTotal` are above those of `ShortestAged`: a
    step that was queued in a batch goes before one that was not.
    """

    preemptive = False

    def __init__(self) -> None:
        self._waves = ArrivalWaves()
        self._in_batch, self._one_by_one = LongestTotal(), ShortestAged()

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the key of the order in force."""
        self._waves.arrived(t.arrival + 1)
        if self._waves.batch:
            return self._in_batch.priority(t, remaining_tokens)
        return self._one_by_one.priority(t, remaining_tokens)

    def observe_finish(self, t: TrajectoryView) -> None:
        self._waves.ended(t.arrival)


@mypyc_attr(allow_interpreted_subclasses=True)
class ProgressivePriority(LongestFirst):
    """Algorithm 1 of Heddle (arXiv 2603.28101): longest first, and the head may evict.

    The key is the newest estimate of the remaining tokens. When a step becomes runnable and the
    head of the queue then beats the least urgent running step, that step is evicted: one at a time,
    its tokens kept, its KV left to the prefix cache. The controller implements that rule; this part
    only enables it. A running step keeps the key with which it was queued, so it is compared by the
    tokens that remained when it started.
    """

    preemptive = True


_PROBES_FIRST: Final = 1e9  # more tokens than any trajectory makes
_OPEN_ROLLOUTS: Final = 8


@mypyc_attr(allow_interpreted_subclasses=True)
class ProbesFirst:
    """Probes by output so far, the least first; others by estimated total, the longest first.

    The probe of a group is the first of its trajectories that can run (Seer, arXiv 2511.14617).
    Probes go before all others, so that the lengths of groups become known early. Meant for the
    predictor `group`, which takes an unknown group for a long one. It never evicts: an order
    changes at the end of a step, or of a chunk of it.

    Probes are forgotten with the eighth rollout after theirs.
    """

    preemptive = False

    def __init__(self) -> None:
        self._probes: dict[RolloutId, dict[GroupId, TrajectoryId]] = {}

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the estimated total; of a probe, what puts it before all others."""
        probes = self._probes.get(t.rollout)
        if probes is None:
            probes = self._probes[t.rollout] = {}
            if len(self._probes) > _OPEN_ROLLOUTS:
                del self._probes[next(iter(self._probes))]
        if probes.setdefault(t.group, t.id) == t.id:
            return _PROBES_FIRST - t.output_tokens
        return t.output_tokens + remaining_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class Autellix:
    """The order of Autellix (arXiv 2502.13965) for programs with one call at a time.

    Attained service is the output tokens of a trajectory so far. Level `i` takes those whose
    attained service is below ``quantum_tokens * (1 + growth + ... + growth**i)``; the last level
    takes the rest. Lower levels go first; within a level, steps go by arrival. It preempts, as the
    original does: a program with little service takes the slot of one with much. Steps of one level
    never evict each other.

    Against starvation, a trajectory whose waiting exceeds `starvation_ratio` times its service goes
    to the first level. A key is computed when a step is queued. It counts the waiting of earlier
    steps only, so a starving step is promoted on its next return. Waiting is a trajectory's age
    minus its tool time and minus an estimate of its own generation, `token_s` for each output
    token. Interference from a large batch counts as waiting once tokens take longer than `token_s`.
    """

    preemptive = True

    def __init__(
        self,
        *,
        quantum_tokens: int = 512,
        growth: float = 2.0,
        levels: int = 8,
        starvation_ratio: float = 4.0,
        token_s: float = 0.02,
    ) -> None:
        """Set the levels; the defaults part 0 to 40,960 tokens into seven of them.

        Raises:
            ValueError: a quantum, growth, ratio or token time that gives no levels or no order.
        """
        if quantum_tokens < 1 or growth < 1.0 or levels < 1:
            raise ValueError("Autellix needs quantum_tokens >= 1, growth >= 1 and levels >= 1")
        if starvation_ratio <= 0.0 or token_s <= 0.0:
            raise ValueError("Autellix needs starvation_ratio > 0 and token_s > 0")
        bounds: list[float] = []
        for level in range(levels - 1):
            bounds.append((bounds[-1] if bounds else 0.0) + quantum_tokens * growth**level)
        self._bounds = tuple(bounds)
        self._starvation_ratio = starvation_ratio
        self._token_s = token_s

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the level, 0 for the first; the estimate is not used."""
        service_s = t.output_tokens * self._token_s
        waiting_s = t.runnable_s - t.arrived_s - t.tool_s - service_s
        if waiting_s > self._starvation_ratio * service_s:
            return 0.0
        return -float(bisect_right(self._bounds, t.output_tokens))


@mypyc_attr(allow_interpreted_subclasses=True)
class UniBoost:
    """The order of UniBoost in SGLang, as pull request 35637 proposes it (open).

    The least goes first of the time at which a step became runnable minus a boost,
    ``-log(1 - exp(-gamma * work_s)) / gamma`` s. `work_s` is `token_s` for each token of its
    context that is not cached where it was placed, at least one. A step with little to prefill
    passes others that came a little earlier; with a large `gamma` none does. It never evicts.

    Cached is what the trajectory had at its last engine after its last step. A key is set when a
    step is queued; the pull request looks at the cache anew before each prefill.
    """

    preemptive = False

    def __init__(self, *, gamma: float = 10.0, token_s: float = 64e-6) -> None:
        """Set the boost.

        Raises:
            ValueError: a value that is not above 0.
        """
        if not (gamma > 0.0 and token_s > 0.0):
            raise ValueError("UniBoost needs gamma and token_s above 0")
        self._gamma, self._token_s = gamma, token_s
        self._cached: dict[TrajectoryId, tuple[EngineId | None, int]] = {}

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the boosted time, in seconds of the run's clock."""
        engine, cached = self._cached.get(t.id, (None, 0))
        if engine != t.home:
            cached = 0
        elif cached > t.context_tokens:  # the agent compacted its history
            cached = t.prompt_tokens
        work_s = self._token_s * max(t.context_tokens - cached, 1)
        return -math.log(-math.expm1(-self._gamma * work_s)) / self._gamma - t.runnable_s

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Its KV is where it ran."""
        self._cached[t.id] = t.home, t.context_tokens

    def observe_finish(self, t: TrajectoryView) -> None:
        """Forget its KV."""
        self._cached.pop(t.id, None)
