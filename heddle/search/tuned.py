"""Each policy at its best setting on a trace, found by a race without journals.

Settings are TP degrees and numbers of running steps. The trace is the one that policies are then
compared on: what the race knows is hindsight, and every policy has the same.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from heddle.cluster.config import ClusterConfig
from heddle.comparison.estimates import LONG_S, SEEDS
from heddle.comparison.tuning import (
    Choice,
    Tuning,
    Variant,
    drafted,
    running_steps,
    speculations,
    tuning,
    with_drafts,
    without_acceptance,
)
from heddle.config import RunConfig
from heddle.search.jobs import race_of
from heddle.search.policies import FIRST
from heddle.search.race import NEAR, NEVER, OnRound, Race
from heddle.setup import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a race found."""

    tuning: Tuning
    """The settings that were tried."""
    variants: tuple[Variant, ...]
    """Each policy at its best."""
    as_it_comes: Variant | None
    """`FIRST` with the cluster's own engines, where they hold the trace."""
    as_it_comes_s: tuple[float, ...]
    """Its makespans, by seed."""
    seeds: int
    simulations: int
    seconds: float

    def plain(self) -> dict[str, Any]:
        return {"simulations": self.simulations, "seconds": round(self.seconds, 3)}


def choices(
    cluster: ClusterConfig, given: Collection[str], tps: Choice, slots: Choice
) -> tuple[Choice, Choice]:
    """TP degrees and numbers of running steps to try; of keys that are `given`, theirs alone."""
    if tps is None and not (cluster.mix or cluster.roles):
        tps = (cluster.tp,) if "cluster.tp" in given else "best"
    if slots is None:
        slots = (cluster.max_running,) if "cluster.max_running" in given else "best"
    return tps, slots


def tuned(
    config: RunConfig,
    policies: Sequence[str],
    tps: Choice,
    slots: Choice,
    speculation: str | None,
    seeds: int | None,
    *,
    jobs: int | None = None,
    workspace: Workspace,
    on_round: OnRound | None = None,
) -> Tuned:
    """Find the best TP degree and number of running steps of each policy.

    All promising TP degrees run under the first seed, then other numbers of running steps at the
    best of each policy; the two best settings of each then run under all `seeds`, by default
    `SEEDS`, or one where a simulation takes over `LONG_S`. A simulation that passes the best of its
    policy is stopped. `tps` and `slots` None: those of the cluster.

    Raises:
        ConfigError: a policy that is unknown, no `jobs`, or a setting that cannot be used.
        ValueError: any other of the packages' errors for bad input.
        WorkerError: a process was killed.
    """
    began_s = time.monotonic()
    ways = () if speculation is None else speculations(config.cluster, speculation)
    # What engines with a drafter cannot hold is refused, or dropped, for all alike.
    config = with_drafts(config, ways[-1:])
    settings = tuning(config, tps=tps, workspace=workspace)
    config, numbers = _with_slots(replace(config, cluster=settings.base), slots, workspace)
    own = config.cluster
    settings = replace(
        settings,
        base=own,
        settings=tuple(replace(c, max_running=own.max_running) for c in settings.settings),
    )
    candidates = settings.variants(config, policies, workspace)
    race = race_of(config, workspace, jobs=jobs, on_round=on_round)
    count = _rounds(race, candidates, numbers, ways, seeds)
    made, best = race.made["whole"], _by_policy(race)
    comes = [
        drafted(c, ways[:1]) for c in candidates if c.policy == FIRST and c.cluster.tp == own.tp
    ][:1]
    race.run(comes, range(count), half="whole")
    return Tuned(
        tuning=replace(
            settings, settings=tuple(dict.fromkeys(c.cluster for c in made)), swept=True
        ),
        variants=tuple(_named(best[name][0], numbers) for name in policies),
        as_it_comes=comes[0] if comes else None,
        as_it_comes_s=tuple(made[comes[0]].values()) if comes else (),
        seeds=count,
        simulations=race.simulations,
        seconds=time.monotonic() - began_s,
    )


def _with_slots(
    config: RunConfig, slots: Choice, workspace: Workspace
) -> tuple[RunConfig, tuple[int, ...]]:
    """The configuration with a number of running steps that is tried, and all of them."""
    cluster = config.cluster
    if slots is None:
        return config, (cluster.max_running,)
    numbers = running_steps(cluster, workspace.profiles(cluster), slots)
    if cluster.max_running not in numbers:
        config = replace(config, cluster=replace(cluster, max_running=max(numbers)))
    return config, numbers


def _rounds(
    race: Race,
    candidates: Sequence[Variant],
    numbers: Sequence[int],
    ways: Sequence[str],
    seeds: int | None,
) -> int:
    """The rounds of a race; returns the number of seeds.

    Each policy begins where the first is best, so that simulations of its other settings end soon.
    """
    reference = next((c.policy for c in candidates if c.policy == FIRST), candidates[0].policy)
    each_way: list[Sequence[str]] = [(way,) for way in ways] or [()]
    race.run(
        (drafted(c, way) for c in candidates if c.policy == reference for way in each_way),
        [0],
        half="whole",
    )
    (first, *_) = _by_policy(race)[reference]
    best_way = (first.cluster.speculation,) if ways else ()
    everyone = [drafted(c, best_way) for c in candidates]
    promising = race.promising(everyone, "whole")
    race.run((c for c in everyone if c.planned or c.cluster == first.cluster), [0], half="whole")
    race.run(promising, [0], half="whole", within=NEAR, own=True)
    best = [each for group in _by_policy(race).values() for each in group[:1]]
    race.run_slots(best, numbers, half="whole", own=True)
    more = [drafted(each, way) for each in best for way in each_way]
    race.run(more, [0], half="whole", within=NEAR, own=True)
    count = (1 if max(race.wall_s.values()) > LONG_S else SEEDS) if seeds is None else seeds
    twos = [_two(race, group) for group in _by_policy(race).values()]
    race.run([each for two in twos if len(two) > 1 for each in two], range(count), half="whole")
    return count


def _two(race: Race, ranked: Sequence[Variant]) -> list[Variant]:
    """The first two that differ, as slots do only where they are used."""
    made = race.made["whole"]
    by_time: dict[float, Variant] = {}
    for each in ranked:
        by_time.setdefault(made[each][0], each)
    return [*by_time.values()][:2]


def _by_policy(race: Race) -> dict[str, list[Variant]]:
    """Candidates of each policy, those under most seeds first, then by mean makespan."""
    groups: defaultdict[str, list[Variant]] = defaultdict(list)
    for each, times in race.made["whole"].items():
        if NEVER not in times.values():
            groups[each.policy].append(each)
    made = race.made["whole"]
    for group in groups.values():
        group.sort(key=lambda each: (-len(made[each]), fmean(made[each].values())))
    return groups


def _named(candidate: Variant, numbers: Sequence[int]) -> Variant:
    """The candidate with its setting in its name."""
    name, _, degree = candidate.name.partition("@")
    parts = [degree] if degree else []
    if len(numbers) > 1:
        parts.append(str(candidate.cluster.max_running))
    if candidate.speculation_tried:
        parts.append(without_acceptance(candidate.cluster.speculation))
    return replace(candidate, name="@".join(filter(None, [name, "/".join(parts)])))
