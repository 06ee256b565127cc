"""The rounds of a search: settings on a part of a large cluster, then the best on all of it."""

from collections.abc import Callable, Sequence
from typing import Final

from heddle.comparison.tuning import Variant, drafted, running_steps
from heddle.config import RunConfig
from heddle.search.policies import FIRST, is_ours
from heddle.search.race import FINALISTS, JUDGED, LAST, NEAR, SETTINGS_KEPT, WIDE, Race
from heddle.setup import Workspace

SCREENED: Final = 1_200
"""Trajectories on which settings are found, at least, where a search does not do so on all."""
SCREENED_GROUPS: Final = 64
"""And their groups."""
ENGINES_LEFT: Final = 2
"""And engines of the widest TP degree."""
SLOTS_KEPT: Final = 2
"""Numbers of running steps of a setting that run on all of the cluster."""


def share_of(config: RunConfig, candidates: Sequence[Variant], workspace: Workspace) -> int:
    """On one of how many GPUs and groups settings are found; 1 for what cannot be divided."""
    cluster, workload = config.cluster, workspace.workload(config)
    parts = ("pool", "mix", "standby_tp", "tool_capacity", "tool_pools", "failures")
    if any(getattr(cluster, name) for name in parts) or any(c.cluster.roles for c in candidates):
        return 1
    widest = max([*(c.cluster.engine_gpus for c in candidates), *(cluster.tp_choices or ())])
    most = min(
        workload.trajectories // SCREENED,
        len(workload.scripts.trajectory("group").occurring()) // SCREENED_GROUPS,
        cluster.gpus // (ENGINES_LEFT * widest),
    )
    return next((n for n in range(most, 1, -1) if cluster.gpus % (n * widest) == 0), 1)


def all_rounds(
    race: Race, small: Race, find_settings: Callable[[], None], *, keeps_best: bool
) -> None:
    """The rounds of a race, each of fewer candidates on more draws.

    Where `small` is another race, on a part of the cluster, settings are found there, and those
    that are good run on all of it; at least the best does, though the time is over.
    """
    if small is race:
        find_settings()
    else:
        if not small.completes(find_settings, keeps_best=keeps_best):
            race.ends_s, race.stopped = small.ends_s, small.stopped
        small.slots, race.slots = SLOTS_KEPT, 1
        best, *others = [*small.near(NEAR, FINALISTS), *of_policies(small)]
        race.wall_s |= small.wall_s
        try:
            race.run([best, *others[:1]], [0], at_least=1)
        except KeyboardInterrupt:
            if race.over or not keeps_best:
                raise
            race.stop()
            race.run([best], [0], at_least=1)
        race.run(others, [0])
    race.run(race.near(NEAR, FINALISTS), [1, 2], within=WIDE)
    race.run(race.near(NEAR, LAST), range(race.draws))


def first_rounds(
    race: Race,
    config: RunConfig,
    candidates: Sequence[Variant],
    slots: Sequence[int] | None,
    speculations: Sequence[str],
    workspace: Workspace,
) -> None:
    """The first rounds: policies at TP degrees, then the best with other slots and drafts.

    All policies have the drafts that are best for `FIRST`, and later each of the best its own.
    """
    first = [each for each in candidates if each.policy == FIRST] or list(candidates)
    # Wide engines are seldom far from the best, and there are few of them to simulate.
    first.sort(key=lambda each: -each.cluster.tp)
    each_way: list[Sequence[str]] = [(setting,) for setting in speculations] or [()]
    race.run((drafted(each, way) for each in first for way in each_way), [0], at_least=1)
    best = race.ranked()[0].cluster.speculation
    every = [drafted(each, (best,) if speculations else ()) for each in candidates]
    with_best = race.promising(every, "search")
    # Ours first: where they are far ahead, simulations of all others end sooner.
    race.run((each for each in with_best if is_ours(each.policy)), [0], within=WIDE)
    race.run(with_best, [0], within=WIDE)
    profiles = workspace.profiles(config.cluster)
    numbers = running_steps(config.cluster, profiles, "best" if slots is None else slots)
    race.run_slots(race.near(WIDE, SETTINGS_KEPT), numbers)
    if speculations:
        kept = race.near(NEAR, SETTINGS_KEPT)
        race.run((drafted(each, way) for each in kept for way in each_way), [0], within=NEAR)


def of_policies(race: Race) -> list[Variant]:
    """The best settings of some policies, `FIRST` and the best of uniform engines among them."""
    by_policy: dict[str, Variant] = {}
    ranked, distinct = race.ranked(), race.distinct()
    for each in distinct:
        by_policy.setdefault(each.policy.partition("+")[0], each)
    uniform = [each for each in distinct if not each.planned]
    tuned = [each for each in ranked if each.policy == FIRST]
    return [*list(by_policy.values())[:JUDGED], *uniform[:1], *tuned[:1]]
