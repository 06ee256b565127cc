"""How to train: the best regime, split of the GPUs, policy and setting of an RL loop.

A race as that of rollouts (`heddle.search.result`), whose candidates are loops on prompts that are
drawn from half of the trace; the best is judged by loops of all batches on the other half.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Final

from heddle.comparison.tuning import Choice, Variant, drafted, running_steps, speculations
from heddle.cost.prices import Prices
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.data import DataSet, UnfitError, packs, within_twice
from heddle.loops.fit import fitted, without_dropped
from heddle.loops.result import RegimeResult, plans
from heddle.loops.setup import LoopSetup, prepare_loop
from heddle.loops.splits import RANDOM, on_loop, splits
from heddle.planning.block_loops import routes
from heddle.planning.blocks import runnable
from heddle.search.draws import check_groups, check_history
from heddle.search.interval import prediction_interval
from heddle.search.jobs import batch_s
from heddle.search.looped import split_of
from heddle.search.policies import FIRST, is_other_system, shipped
from heddle.search.race import (
    FEWEST,
    LAST,
    NEAR,
    NEVER,
    SEARCHED,
    WIDE,
    OnRound,
    Race,
    kind_of,
    with_slots,
)
from heddle.search.result import (
    OWN_ENGINES,
    Judged,
    SearchResult,
    best_of_kinds,
    engines_of,
    mechanisms,
    named_ties,
    tried_of,
)
from heddle.search.ties import name_of
from heddle.setup import Workspace
from heddle.workload import CapacityError, Workload
from heddle_sim.training import TrainingError

SPLITS_KEPT: Final = 2
"""Settings that are tried under other policies, and then with other numbers of running steps."""
PACKED: Final = "sorted"
"""Order of the prompts of an epoch that is tried beside a random one."""
UNPACKED: Final = (
    f"batches of prompts of like length (loop.epoch_plan = {PACKED}) were not tried: give more time"
)
MEASURED: Final = 3
"""Batches that times of the search are means of."""
JUDGED: Final = 4
"""Regimes that are judged, beside the two best candidates and the first policy's."""


def search_loops(
    config: LoopConfig,
    *,
    train_gpus: Choice,
    tps: Choice,
    policies: Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    speculation: str | None = None,
    prices: Prices,
    jobs: int | None = None,
    budget_s: float | None = None,
    workspace: Workspace | None = None,
    on_round: OnRound | None = None,
    framework: str | None = None,
) -> SearchResult:
    """Find the loop with the shortest batch, on prompts like those of the trace.

    `config.run.cluster.gpus` are all GPUs. Candidates are its regimes at every split and TP degree
    (`heddle.loops.splits.splits`), under each of `policies`, by default all shipped ones; further
    arguments as of `heddle.search.result.search`. Settings whose trainer or engines do not fit are
    left out, unless none fits.

    Raises:
        ConfigError: too few groups to judge on, or a value that cannot be used.
        ValueError: any other of the packages' errors for bad input.
        WorkerError: a process was killed.
    """
    began_s, shared = time.time(), Workspace() if workspace is None else workspace
    names = list(policies or [*shipped(config.run), OWN_ENGINES])
    (held, *_), dropped = without_dropped(splits(config, train_gpus, tps), shared, True)
    (config,), notes = fitted([replace(config, most_tokens=held.most_tokens)], shared)
    found = _Loops(config, names, shared, framework)
    first = found.of(splits(config, train_gpus, tps))
    check_groups(found.workload.scripts)
    begun = found.past_first_epoch(first)
    if begun is not None:
        config, found = begun, _Loops(begun, names, shared, framework)
        first = found.of(splits(config, train_gpus, tps))
    check_history(config.run, shared, again=True)  # as a training comes to it
    race = found.race(jobs=jobs, budget_s=budget_s and SEARCHED * budget_s, on_round=on_round)
    ways = () if speculation is None else speculations(config.run.cluster, speculation)
    numbers = running_steps(config.run.cluster, shared.profiles(first[0].cluster), slots or "best")
    complete = race.completes(partial(_rounds, race, found, first, numbers, ways))
    comes = [each for each in first if _as_it_comes(each, config)][:1]
    compared = dict.fromkeys([*race.near(NEAR, LAST), *_others(race), *comes])
    race.ends_s = race.ends_s if race.stopped or not budget_s else began_s + budget_s
    draws = _judge(race, found, list(compared), comes)
    same, doubtful = race.ties()
    chosen = min(same, key=lambda each: found.simplicity(each, race))
    tried, ties = tried_of(race), race.tied_with(chosen, (*same, *doubtful))
    judged = {chosen: found.judged(race, chosen)}
    for each in (*compared, *named_ties(ties, compared)):
        if each in race.made["judge"] and not race.over:
            judged[each] = found.judged(race, each)
    return SearchResult(
        setup=found.setup(chosen).run,
        judged=best_of_kinds(judged, chosen, comes),
        tried=tried,
        ties=tuple(map(name_of, ties)),
        as_it_comes=judged.get(comes[0]) if comes else None,
        bound_s=found.row(chosen).bound_step_s,
        prices=prices,
        gpus=found.setup(chosen).gpus_by_class,
        simulations=race.simulations,
        seconds=time.time() - began_s,
        complete=complete and not race.stopped,
        interrupted=race.stopped,
        draws=draws,
        notes=(*dropped, *notes, *_untried(begun, race)),
    )


def _untried(begun: LoopConfig | None, race: Race) -> list[str]:
    """A note, where the time was over before packed epochs were tried."""
    tried = any(each.epoch_plan == PACKED for each in race.made["search"])
    return [UNPACKED] if begun is not None and not tried else []


def _as_it_comes(candidate: Variant, config: LoopConfig) -> bool:
    """Whether it is the first regime under `FIRST` with the split and TP degree of `config`."""
    cluster = candidate.cluster
    split = config.colocated or candidate.train_gpus == config.train_gpus
    return (
        split
        and candidate.regime == config.regimes[0]
        and cluster.tp == config.run.cluster.tp
        and candidate.policy == FIRST
    )


class _Loops:
    """Candidates of a search, and their set-ups on the whole trace."""

    def __init__(
        self,
        config: LoopConfig,
        names: Sequence[str],
        workspace: Workspace,
        framework: str | None,
    ) -> None:
        self._config, self._names, self._workspace = config, names, workspace
        self._framework = framework
        self.train_gpus, self.begun = config.trainer_gpus, config.begun
        self._setups: dict[Variant, LoopSetup | None] = {}
        self._rows: dict[Variant, RegimeResult] = {}
        self.workload: Workload
        """Of the settings that hold the most trajectories."""

    def setup(self, candidate: Variant) -> LoopSetup:
        """Of a candidate that fits."""
        setup = self._setups[candidate]
        assert setup is not None
        return setup

    def of(self, tried: Iterable[LoopConfig]) -> list[Variant]:
        """Every regime of each configuration under `FIRST`, or the first policy there is.

        Raises:
            ValueError: none fits.
        """
        policy = FIRST if FIRST in self._names else self._names[0]
        made, failed = [], None
        for each in tried:
            for regime in each.regimes:
                new = _candidate(policy, regime, each)
                try:
                    self._setups[new] = prepare_loop(
                        on_loop(new, self._config), regime, workspace=self._workspace
                    )
                except (TrainingError, CapacityError, UnfitError) as error:
                    failed = error
                else:
                    made.append(new)
        if not made:
            assert failed is not None
            raise failed
        most = max(self.setup(each).run.workload.trajectories for each in made)
        made = [c for c in made if self.setup(c).run.workload.trajectories == most]
        made = runnable(made, self._framework)
        self.workload = self.setup(made[0]).run.workload
        return made

    def past_first_epoch(self, made: Sequence[Variant]) -> LoopConfig | None:
        """The loop after an epoch, with another one measured; None: no length would be known."""
        config, setups = self._config, [self.setup(each) for each in made]
        samples = max(setup.regime.started_samples for setup in setups)
        least = config.least_samples
        data = DataSet.of(self.workload.scripts, samples=samples, least=least)
        if config.epoch_plan or not packs(config, data, setups[0].run.history.epochs):
            return None
        epoch, regimes = len(data.groups) // config.groups, [setup.regime for setup in setups]
        warm = max(regime.warm_up_batches for regime in regimes)
        one = max(config.batches, warm + epoch)
        batches = within_twice(config.batches, 0, epoch, regimes, one)
        return replace(config, epoch_plan=RANDOM, begun=True, batches=batches)

    def fits(self, candidate: Variant) -> bool:
        """Whether its trainer and engines hold the trace."""
        if candidate not in self._setups:
            try:
                self._setups[candidate] = prepare_loop(
                    on_loop(candidate, self._config), candidate.regime, workspace=self._workspace
                )
            except (TrainingError, CapacityError, UnfitError):
                self._setups[candidate] = None
        setup = self._setups[candidate]
        return setup is not None and setup.run.workload.trajectories == self.workload.trajectories

    def under_all(self, kept: Iterable[Variant]) -> list[Variant]:
        """The candidates under each policy; those that plan their engines once for a split."""
        found: dict[object, Variant] = {}
        for each in kept:
            for name in self._names:
                new = replace(each, name=name, policy=name)
                if not self.fits(new):
                    continue
                if plans(self.setup(new)):
                    new = self._planned(new)
                cluster = new.cluster
                tp = None if new.planned else cluster.tp
                found.setdefault((new.regime, new.train_gpus, name, tp, cluster.max_running), new)
        return runnable(found.values(), self._framework)

    def _planned(self, candidate: Variant) -> Variant:
        new = replace(candidate, planned=True)
        self._setups[new] = self._setups[candidate]
        return new

    def race(self, *, jobs: int | None, budget_s: float | None, on_round: OnRound | None) -> Race:
        config = self._config
        scripts = self.workload.scripts
        each = sum(len(script.steps) for script in scripts) / len(scripts)
        return Race(
            (self._workspace, config, self._short(), self.workload),
            batch_s,
            draws=FEWEST,
            steps=int(each * config.batches * config.groups * config.samples),
            jobs=jobs,
            budget_s=budget_s,
            on_round=on_round,
        )

    def _short(self) -> int:
        """Batches of the loops that are searched on: a few more than are not measured."""
        warm = [self.setup(c).regime for c in self._setups if self._setups[c] is not None]
        least = max(r.warm_up_batches + r.update.every * MEASURED for r in warm)
        return self._config.batches if self._config.begun else min(self._config.batches, least)

    def row(self, candidate: Variant) -> RegimeResult:
        """What it reaches on the trace itself."""
        if candidate not in self._rows:
            (row,) = compare_regimes([on_loop(candidate, self._config)]).tried
            self._rows[candidate] = row
        return self._rows[candidate]

    def judged(self, race: Race, candidate: Variant) -> Judged:
        """What it takes on the trace, and how far other batches of its prompts are from that.

        Half of the prompts, which the search has not seen, tell candidates apart but not how long
        they take: the longest trajectories are in one half.
        """
        setup, row = self.setup(candidate), self.row(candidate)
        times = tuple(race.made["judge"][candidate].values())
        known = race.made["search"].get(candidate, {}).values() if len(times) > 1 else ()
        spread = prediction_interval(times, [each for each in known if each < NEVER])
        own_s = row.step_s.mean
        if spread.low is not None and spread.high is not None:
            spread = replace(spread, low=min(spread.low, own_s), high=max(spread.high, own_s))
        return Judged(
            candidate=candidate,
            makespan_s=replace(spread, mean=own_s),
            times=times,
            engines=engines_of(setup.run),
            loop=split_of(row, packed=packed if (packed := candidate.epoch_plan) == PACKED else ""),
        )

    def simplicity(self, candidate: Variant, race: Race) -> tuple[Any, ...]:
        """Order of ties: policies of the framework's router, random batches, regimes in their
        order, few mechanisms of the policy, then the mean."""
        return (
            not routes(self._framework, candidate.policy),
            candidate.epoch_plan == PACKED,
            self._config.regimes.index(candidate.regime),
            mechanisms(self.setup(candidate).run.policy),
            "+" in candidate.policy,
            -candidate.cluster.tp,
            fmean(race.decided()[candidate]),
        )


def _judge(race: Race, found: _Loops, compared: Sequence[Variant], comes: list[Variant]) -> int:
    """Run what is compared on prompts that the search has not seen; return the number of draws.

    The best and the first policy's come first, after a signal alone. Without time for any, the best
    has its own trace.
    """
    best, *_ = compared
    own_s = found.row(best).step_s.mean
    at_least = 1 + len(comes) if race.stopped else 0
    race.judge([best, *comes], compared, at_least=at_least)
    draws = race.keep_ended([best])
    if not draws:
        race.made["judge"] = {best: {0: own_s}}
    return draws


def _candidate(policy: str, regime: str, config: LoopConfig) -> Variant:
    return Variant(
        name=policy,
        policy=policy,
        cluster=config.run.cluster,
        swept=True,
        baseline=is_other_system(policy),
        regime=regime,
        train_gpus=config.train_gpus,
        epoch_plan=config.epoch_plan,
    )


def _rounds(
    race: Race,
    found: _Loops,
    first: Sequence[Variant],
    numbers: Sequence[int],
    ways: Sequence[str],
) -> None:
    """The rounds of a race: of each regime the TP degree, then the split; then fewer candidates.

    Each regime begins with the split of the configuration and wide engines.
    """
    start = min(first, key=lambda each: abs(each.train_gpus - found.train_gpus)).train_gpus
    at_start = sorted((c for c in first if c.train_gpus == start), key=lambda c: -c.cluster.tp)
    widest = {each.regime: each for each in reversed(at_start)}.values()
    race.run(list(widest)[-1:], [0], at_least=1)
    race.run(widest, [0])
    race.run(at_start, [0], within=NEAR, own=True)
    degrees = {each.regime: each.cluster.tp for each in reversed(race.ranked())}
    rest = [each for each in first if each.cluster.tp == degrees.get(each.regime)]
    race.run(rest, [0], within=NEAR, own=True)
    race.run(found.under_all(race.near(WIDE, SPLITS_KEPT)), [0], within=NEAR)
    kept = race.near(NEAR, SPLITS_KEPT)
    more = [with_slots(each, number) for each in kept for number in numbers]
    race.run(filter(found.fits, more), [0], within=NEAR)
    if ways:
        kept = race.near(NEAR, SPLITS_KEPT)
        more = [drafted(each, (way,)) for each in kept for way in ways]
        race.run(filter(found.fits, more), [0], within=NEAR)
    if found.begun:
        more = [replace(each, epoch_plan=PACKED) for each in race.near(NEAR, SPLITS_KEPT)]
        race.run(filter(found.fits, more), [0], within=NEAR)
    race.run(race.near(NEAR, LAST), range(race.draws))


def _others(race: Race) -> list[Variant]:
    """The best of each regime, of the two best policies, and of the first policy."""
    by_kind: dict[tuple[str, str], Variant] = {}
    regimes: dict[str, Variant] = {}
    for each in race.distinct():
        by_kind.setdefault(kind_of(each), each)
        regimes.setdefault(each.regime, each)
    plain = [each for each in race.ranked() if each.policy == FIRST]
    return [*list(by_kind.values())[:2], *list(regimes.values())[:JUDGED], *plain[:1]]
