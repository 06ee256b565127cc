"""Two constants from a run: host seconds of an iteration, and a factor on kernel times.

They are fitted on every other group of trajectories; the error is stated for the others.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from heddle.diagnosis.again import Ran, Rollouts
from heddle.diagnosis.intervals import spans
from heddle.runs.journal_columns import Floats
from heddle_core.ids import EngineShape
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_trace.observed.columns import ObservedSteps

ROUNDS: Final = 3
"""Simulations: batches change with the constants."""
ONE_IS_ENOUGH: Final = 1.05
"""What one constant leaves over what two leave, at most, to take one."""
ON_ENGINES: Final = ("prefill_s", "decode_s", "llm_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Beside a profile."""

    kernel: float = 1.0
    """Factor on its times."""
    host_s: float = 0.0
    """Seconds that an iteration takes besides."""

    def adjusted(self, simulation: SimulationConfig) -> SimulationConfig:
        """The cluster with engines that are so much slower."""

        def table(shape: EngineShape) -> LatencyTable:
            found, kernel = simulation.table(shape), self.kernel
            drafting = found.drafting
            if drafting is not None:
                base_s = {k: self._iterations(each) for k, each in drafting.base_s.items()}
                drafting = replace(drafting, base_s=base_s)
            return replace(
                found,
                base_s=self._iterations(found.base_s),
                per_context_s=[kernel * each for each in found.per_context_s],
                prefill_knots_s=[kernel * each for each in found.prefill_knots_s],
                prefill_pair_s=kernel * found.prefill_pair_s,
                drafting=drafting,
            )

        return simulation if self == Constants() else replace(simulation, table=table)

    def _iterations(self, base_s: Sequence[float]) -> list[float]:
        return [self.kernel * each + self.host_s for each in base_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Constants, and errors on the trajectories that they were not fitted on, in percent."""

    constants: Constants
    fitted_on: int
    """Trajectories."""
    judged_on: int
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True, slots=True)
class Matched:
    """Seconds on engines of the same steps, measured and simulated, and their output tokens."""

    measured: Floats
    simulated: Floats
    tokens: Floats

    def left(self, constants: Constants) -> float:
        """Squares of what `constants` leave of the differences, summed."""
        made = constants.kernel * self.simulated + constants.host_s * self.tokens
        return float(np.square(self.measured - made).sum())

    def by_host(self) -> Constants:
        """Host time alone, that fits best."""
        more = float(self.tokens @ (self.measured - self.simulated))
        return Constants(host_s=max(0.0, more / max(float(self.tokens @ self.tokens), 1e-9)))

    def by_kernels(self) -> Constants:
        """A factor alone, that fits best."""
        square = float(self.simulated @ self.simulated)
        return Constants(kernel=float(self.simulated @ self.measured) / square if square else 1.0)

    def best(self) -> Constants:
        """The fewest constants that fit about as well as two."""
        one = min((Constants(), self.by_kernels(), self.by_host()), key=self.left)
        columns = np.stack([self.simulated, self.tokens], axis=1)
        (kernel, host_s), *_ = np.linalg.lstsq(columns, self.measured)
        both = Constants(kernel=float(kernel), host_s=float(host_s))
        enough = self.left(one) <= ONE_IS_ENOUGH * self.left(both)
        return one if enough or kernel <= 0.0 or host_s < 0.0 else both


def matched(
    seen: Rollouts, simulated: Rollouts, of: Set[str] | None = None, less: Constants | None = None
) -> Matched:
    """Steps that both have, of trajectories `of`; without the constants that simulated them."""
    mine, theirs = _by_step(seen), _by_step(simulated)
    rows = [
        (own[0], theirs[key][0], max(own[1], 1.0))
        for key, own in mine.items()
        if key in theirs and (of is None or key[0] in of)
    ]
    measured, made, tokens = np.array(rows, np.float64).reshape(-1, 3).T
    if less is not None:
        made = np.maximum(made - less.host_s * tokens, 0.0) / less.kernel
    return Matched(measured, made, tokens)


def _by_step(seen: Rollouts) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds on engines and output tokens of each step, whose requests are added up."""
    found: defaultdict[tuple[str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for each in seen:
        took_s = np.sum([each.seconds(name) for name in ON_ENGINES], axis=0).tolist()
        names, steps = each.column("trajectory_id").plain(), each.column("step").plain()
        made = np.maximum(each.column("output_tokens").ints, 0).tolist()
        for name, step, seconds, tokens in zip(names, steps, took_s, made, strict=True):
            before_s, before = found[name, step]
            found[name, step] = (before_s + seconds, before + tokens)
    return found


def fit(ran: Ran, simulated: Rollouts, on_round: Callable[[int], object]) -> FittedConstants:
    """Fit on every other group of trajectories; without groups, on every other trajectory."""
    own, others = halves(ran.seen)
    constants, now = Constants(), simulated
    for number in range(ROUNDS):
        on_round(number)
        constants = matched(ran.seen, now, own, constants).best()
        now = ran.simulate(constants.adjusted)
    return FittedConstants(
        constants=constants,
        fitted_on=len(own),
        judged_on=len(others),
        before=_errors(ran.seen, simulated, others),
        after=_errors(ran.seen, now, others),
    )


def at_measured_speed(ran: Ran, simulated: Rollouts) -> tuple[Constants, Rollouts]:
    """The factor with which requests decode as long, all together, as was measured.

    That sum is all it takes from the measured run, and its engines' own clocks say it.
    """
    took_s, constants = _decoded_s(ran.seen), Constants()
    for _ in range(ROUNDS):
        kernel = round(constants.kernel * took_s / (_decoded_s(simulated) or np.inf), 3)
        if kernel in (0.0, constants.kernel):
            break
        constants = Constants(kernel=kernel)
        simulated = ran.simulate(constants.adjusted)
    return constants, simulated


def _decoded_s(seen: Rollouts) -> float:
    return sum(float(each.seconds("decode_s").sum()) for each in seen)


def halves(seen: Rollouts) -> list[Set[str]]:
    """Names of trajectories, by turns of their groups."""
    groups: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for each in seen:
        names, own = (each.column(n).plain() for n in ("trajectory_id", "group_id"))
        for name, group in zip(names, own, strict=True):
            groups[group or name][name] = None
    parts = list(groups.values())
    if len(parts) == 1:
        parts = [{name: None} for name in parts[0]]
    return [{name for part in parts[at::2] for name in part} for at in (0, 1)]


def _errors(seen: Rollouts, simulated: Rollouts, of: Set[str]) -> dict[str, float]:
    """Of the mean time of trajectories, and of the end of the last, in percent."""
    mine, theirs = _ends(seen, of), _ends(simulated, of)
    pairs = zip(("duration_pct", "makespan_pct"), mine, theirs, strict=True)
    return {name: (made / took - 1.0) * 100.0 if took else 0.0 for name, took, made in pairs}


def _ends(seen: Rollouts, of: Set[str]) -> tuple[float, float]:
    lasted_s, ended_s = 0.0, 0.0
    for each in seen:
        names, first_s, last_s = lives(each)
        own = np.array([name in of for name in names])
        lasted_s += float((last_s - first_s)[own].sum())
        ended_s += float(last_s[own].max(initial=first_s.min()) - first_s.min())
    return lasted_s, ended_s


def lives(seen: ObservedSteps) -> tuple[list[str], Floats, Floats]:
    """Trajectories, and when each began and ended."""
    codes, first_s, last_s = spans(seen)
    words = seen.column("trajectory_id").words
    return [words[code] for code in codes.tolist()], first_s, last_s
