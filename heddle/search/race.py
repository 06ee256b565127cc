"""The race of candidates: all on one drawn rollout, fewer on more, the last on unseen prompts.

Draws are the same for all candidates. A simulation that passes what it had to beat is stopped.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, TypeAlias

import numpy as np

from heddle.comparison.tuning import Variant
from heddle.config_error import require
from heddle.executor import Report
from heddle.executor_choice import ExecutorKind, run_all
from heddle.ray.executor import shared_by_tasks
from heddle.search.draws import Draw, Half
from heddle.search.ties import is_slower, ties_of

WIDE: Final = 1.25
"""Times the best, at which a simulation of the first rounds is stopped."""
NEAR: Final = 1.1
"""The same of later rounds."""
SETTINGS_KEPT: Final = 8
"""Settings for which other numbers of running steps are tried."""
FINALISTS: Final = 10
"""Candidates of the second and third drawn rollouts."""
LAST: Final = 5
"""Candidates of all further ones."""
JUDGED: Final = 3
"""Policies that are judged, beside the last candidates and those that are always."""
FEWEST, MOST = 4, 8
"""Draws of a half."""
TRAJECTORIES: Final = 2_400
"""Trajectories of all draws together that a finalist runs."""
SEARCHED: Final = 0.5
"""Share of the time for the rounds; the rest is for judging."""
NEVER: Final = float("inf")
CUT: Final = -1.0
"""Time of a simulation that the end of the race's time has stopped: it says nothing."""

OnRound: TypeAlias = Callable[[str, int, int], None]
"""Called with the best so far, and the numbers of simulations done and of the round."""


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate on a drawn rollout."""

    candidate: Variant
    draw: Draw
    stop_s: float
    ends_s: float = NEVER
    """Time of `time.time`, which nodes of a cluster have in common, at which it is stopped."""


class Race:
    """Times of candidates by draw: makespans, or steps of an RL loop."""

    def __init__(
        self,
        shared: Any,
        simulate: Callable[[Any, Job, Report | None], tuple[float, float, int]],
        *,
        draws: int,
        steps: int,
        executor: ExecutorKind = "processes",
        jobs: int | None = None,
        budget_s: float | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        """`simulate` makes of a job, from what all jobs share, its time, its wall time, and the
        most steps that an engine ran at once, 0 if that is not known.

        Each half of the prompts has so many `draws`; a simulation has about so many `steps`.

        Raises:
            ConfigError: `jobs` is below 1.
        """
        require(jobs is None or jobs >= 1, f"jobs must be 1 or more, not {jobs}")
        self._simulate, self._jobs = simulate, jobs
        self._executor: ExecutorKind = executor
        self._shared = shared if executor == "processes" else shared_by_tasks(shared)
        self.draws, self._steps = draws, steps
        self.ends_s = None if budget_s is None else time.time() + budget_s
        """When the time is spent, of `time.time`; None: never."""
        self._on_round = on_round
        self.stopped = False
        """Whether a signal ended the rounds or the judging."""
        self._keeps_best = True
        self.simulations = 0
        self.made: dict[Half, dict[Variant, dict[int, float]]] = {
            "search": defaultdict(dict),
            "judge": defaultdict(dict),
            "whole": defaultdict(dict),
        }
        """Time by candidate and number of the draw; infinite where it was stopped."""
        self.simplicity: Callable[[Variant], Any] = lambda _: 0
        """A key of candidates that decide alike: the least one stands for all."""
        self.slots: int | None = None
        """Numbers of running steps of one setting that `near` has; None: all."""
        self._used: dict[Variant, int] = {}
        """Slots that a candidate used on the first draw, where it had more."""
        self.wall_s: dict[Variant, float] = {}
        """Wall time of a candidate's longest simulation."""

    @property
    def over(self) -> bool:
        """Whether the time of the search is spent."""
        return self.ends_s is not None and time.time() >= self.ends_s

    def completes(self, rounds: Callable[[], None], *, keeps_best: bool = True) -> bool:
        """Make the rounds. False: the time or, after the first round, a signal ended them.

        With `keeps_best` False a signal is raised, then and later.
        """
        self._keeps_best = keeps_best
        try:
            rounds()
        except KeyboardInterrupt:
            if not keeps_best or not self.ranked():
                raise
            self.stop()
        return not self.over

    def judge(
        self, first: Sequence[Variant], compared: Sequence[Variant], *, at_least: int
    ) -> None:
        """Run candidates on prompts that the search has not seen, and some of them `first`.

        After a signal only `at_least` of these run, on one draw.
        """
        try:
            self.run(first, range(self.draws), half="judge", at_least=at_least)
            self.run(compared, range(self.draws), half="judge")
        except KeyboardInterrupt:
            if self.stopped or not self._keeps_best:
                raise
            self.stop()
            self.run(first, [0], half="judge", at_least=at_least)

    def stop(self) -> None:
        """Spend the time: nothing begins from now on but what must."""
        self.ends_s, self.stopped = time.time(), True

    def keep_ended(self, kept: Sequence[Variant]) -> int:
        """Forget judged draws without one of `kept`, and candidates without one of the others.

        Returns how many draws are left.
        """
        made = self.made["judge"]
        draws = sorted(set.intersection(*(set(made.get(each, {})) for each in kept)))
        self.made["judge"] = {
            each: {number: times[number] for number in draws}
            for each, times in made.items()
            if times.keys() >= set(draws)
        }
        return len(draws)

    def run(
        self,
        candidates: Iterable[Variant],
        draws: Sequence[int],
        *,
        half: Half = "search",
        within: float = NEVER,
        at_least: int = 0,
        own: bool = False,
    ) -> None:
        """Simulate what is missing; stopped at `within` times the best of each draw.

        Nothing begins once the time is spent, but the first `at_least`. With `own`, the best is
        that of the candidate's own kind.
        """
        made = self.made[half]
        jobs: list[Job] = []
        for number in draws:
            by_kind = _best(made, number)
            least_s = min(by_kind.values(), default=NEVER)
            jobs += [
                Job(
                    each,
                    Draw(half, number),
                    within * (by_kind.get(kind_of(each), NEVER) if own else least_s),
                    NEVER if number == draws[0] and place < at_least else self.ends_s or NEVER,
                )
                for place, each in enumerate(dict.fromkeys(candidates))
                if number not in made.get(each, {})
            ]
        if not jobs or (self.over and not at_least):
            return
        # Whole draws of what is judged, as the time may end before the last; the longest first, so
        # that processes end at about the same time.
        took, by_draw = self.wall_s, half == "judge"
        jobs.sort(key=lambda j: (by_draw * j.draw.number, -took.get(j.candidate, NEVER)))
        watch = None
        if self._on_round is not None:
            ranked = self.ranked(half if half == "whole" else "search")
            best = ranked[0].name if ranked else ""
            watch = partial(self._watched, best, len(jobs))
        found = run_all(
            self._executor,
            self._shared,
            self._simulate,
            jobs,
            jobs=self._jobs,
            steps=len(jobs) * self._steps,
            out=None,
            watch=watch,
        )
        for job, (seconds, wall_s, running) in zip(jobs, found, strict=True):
            if seconds == CUT:
                continue
            self.simulations += 1
            made[job.candidate][job.draw.number] = seconds
            self.wall_s[job.candidate] = max(wall_s, self.wall_s.get(job.candidate, 0.0))
            slots = job.candidate.cluster.max_running
            reads_slots = not job.candidate.baseline or ":" in job.candidate.policy
            if seconds < NEVER and not (job.draw.number or reads_slots) and 0 < running < slots:
                self._used[with_slots(job.candidate, 1)] = running

    def run_slots(
        self,
        candidates: Sequence[Variant],
        numbers: Sequence[int],
        *,
        half: Half = "search",
        own: bool = False,
    ) -> None:
        """Candidates with other numbers of running steps on the first draw.

        With the largest, then with those next to the best so far, until none of these is better.
        """
        while more := [c for each in candidates for c in self._other_slots(each, numbers, half)]:
            self.run(more, [0], half=half, within=NEAR, own=own)
            if self.over:
                return

    def _other_slots(self, candidate: Variant, numbers: Sequence[int], half: Half) -> list[Variant]:
        """Without those that a shipped baseline has not used, which change nothing."""
        most = self._used.get(with_slots(candidate, 1), NEVER)
        made = {n: self.made[half].get(with_slots(candidate, n), {}) for n in numbers}
        own = {candidate.cluster.max_running: self.made[half].get(candidate, {})}
        times = {n: by_draw[0] for n, by_draw in (made | own).items() if 0 in by_draw}
        if (largest := max(numbers)) < most and largest not in times:
            return [with_slots(candidate, largest)]
        best = min(times, key=lambda n: times[n])
        order = sorted({best, *(n for n in numbers if n < most)})
        next_to = order[max(order.index(best) - 1, 0) : order.index(best) + 2]
        return [with_slots(candidate, n) for n in next_to if n not in times]

    def _watched(self, best: str, count: int, done: Sequence[int]) -> None:
        if self._on_round is not None:
            self._on_round(best, sum(done), count)

    def promising(self, candidates: Sequence[Variant], half: Half) -> list[Variant]:
        """All but those at a TP degree at which what ran so far, one policy, takes over `WIDE`
        times its best on the first draw.

        Of 12 policies in 42 settings none is at its best at one where verl takes over 1.1 times.
        """
        speculations = {each.cluster.speculation for each in candidates}
        known = {
            each.cluster.tps: times[0]
            for each, times in self.made[half].items()
            if each.cluster.speculation in speculations
        }
        most_s = WIDE * min(known.values())
        return [c for c in candidates if c.planned or known.get(c.cluster.tps, 0.0) <= most_s]

    def ranked(self, half: Half = "search") -> list[Variant]:
        """Candidates of a half, those of most draws first, then by mean time."""
        made = self.made[half]
        finished = [each for each in made if NEVER not in made[each].values()]
        return sorted(finished, key=lambda each: (-len(made[each]), fmean(made[each].values())))

    def distinct(self) -> list[Variant]:
        """Candidates as `ranked`; of those that take equally long on the first draw, the simplest.

        They decide alike: slots that are not used, policies that differ where KV is short.
        """
        made = self.made["search"]
        alike: defaultdict[float, list[Variant]] = defaultdict(list)
        for each in self.ranked():
            alike[made[each][0]].append(each)
        chosen = []
        for first, *others in alike.values():
            same = [each for each in others if len(made[each]) == len(made[first])]
            chosen.append(min([first, *same], key=self.simplicity) if same else first)
        return chosen

    def near(self, within: float, most: int) -> list[Variant]:
        """The best of `distinct` so far and those within so many times of it; of those that differ
        in slots only, `slots`."""
        made = self.made["search"]
        best, *_ = ranked = self.distinct()
        limit_s = within * fmean(made[best].values())
        found: defaultdict[Variant, list[Variant]] = defaultdict(list)
        for each in ranked:
            if fmean(made[each].values()) <= limit_s:
                found[with_slots(each, 1)].append(each)
        kept = {each for alike in found.values() for each in alike[: self.slots]}
        return [each for each in ranked if each in kept][:most]

    def alike(self, candidate: Variant) -> list[Variant]:
        """Candidates of other kinds that are not judged and decide as this one on the first draw.

        Of a kind that does so with other slots, the candidate with the same slots is simulated;
        none is looked for once the time is spent.
        """
        if self.over:
            return []
        made = self.made["search"]
        slots = candidate.cluster.max_running
        at: defaultdict[Variant, set[float]] = defaultdict(set)
        for each in made:
            at[with_slots(each, slots)].add(made[each][0])
        mine = at.pop(candidate, set()) - {NEVER}
        others = [each for each in at if each.cluster == candidate.cluster and mine & at[each]]
        try:
            self.run(others, [0], within=NEAR)
        except KeyboardInterrupt:
            if not self._keeps_best:
                raise
            self.stop()
        return [
            each
            for each in others
            if made.get(each, {}).get(0) == made.get(candidate, {}).get(0)
            and each not in self.made["judge"]
        ]

    def decided(self) -> dict[Variant, list[float]]:
        """Candidates that ended all draws of both halves, the best first.

        With the time of each draw as a multiple of the least: a draw counts as much as another.
        """
        times = {
            each: [*self.made["search"].get(each, {}).values(), *judged.values()]
            for each, judged in self.made["judge"].items()
        }
        most = max(map(len, times.values()))
        ended = [each for each, own in times.items() if len(own) == most and NEVER not in own]
        made = np.array([times[each] for each in ended])
        over = made / made.min(axis=0)
        order = np.argsort(over.mean(axis=1), kind="stable")
        return {ended[place]: over[place].tolist() for place in order.tolist()}

    def ties(self) -> tuple[list[Variant], list[Variant]]:
        """Of `decided`, the best and those that are at most `SAME` slower in the mean; and others
        that are at most `TIE` slower, by a difference that is not significant.

        Not among the first: those that unseen prompts show to be slower than another of them.
        """
        same, doubtful = ties_of(self.decided())
        judged = {each: list(self.made["judge"][each].values()) for each in same}
        first = min(judged.values(), key=fmean)
        return [each for each in same if not is_slower(judged[each], first)], doubtful

    def tied_with(self, chosen: Variant, ties: Iterable[Variant]) -> list[Variant]:
        """The ties without the chosen one, and all that decide as one of them: with its times."""
        found: dict[Variant, None] = {}
        for each in ties:
            alike = self.alike(each)
            for made in (self.made["search"], self.made["judge"]):
                made |= {other: dict(made[each]) for other in alike if each in made}
            found |= dict.fromkeys([each, *alike])
        return [each for each in found if each != chosen]


def kind_of(candidate: Variant) -> tuple[str, str]:
    """Candidates of a kind differ in their settings only: regime and policy."""
    return candidate.regime, candidate.policy


def _best(made: Mapping[Variant, Mapping[int, float]], number: int) -> dict[tuple[str, str], float]:
    """The least time of a draw by kind."""
    best: dict[tuple[str, str], float] = {}
    for each, times in made.items():
        if number in times:
            kind = kind_of(each)
            best[kind] = min(times[number], best.get(kind, NEVER))
    return best


def with_slots(candidate: Variant, number: int) -> Variant:
    """The candidate with another number of running steps."""
    return replace(candidate, cluster=replace(candidate.cluster, max_running=number))
