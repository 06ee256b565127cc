"""Settings at which a comparison runs the policies that do not plan their engines.

A baseline has one TP degree for all engines, and a number of running steps for each. Which are best
depends on the trace, and only a run can say it. A comparison therefore runs a baseline at several
settings and takes the best on the very trace that it compares on: hindsight, and in favour of the
baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

from heddle.cluster.config import NO_SPECULATION, ClusterConfig
from heddle.cluster.drafters import LOOKED_UP, methods_of
from heddle.cluster.profiles import (
    ClassProfile,
    ClusterProfiles,
    capacity_tokens,
    layout_profile,
    load_profiles,
)
from heddle.cluster.role_choice import role_choices
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.search.policies import OURS, is_other_system
from heddle.setup import Workspace, prepare
from heddle.workload import check_tags_used
from heddle_core.parts.planner import FixedPlan, SharesPlan
from heddle_core.parts.predictor import NoPrediction
from heddle_core.policy import NoConsolidation
from heddle_core.presets import ADAPTIVE
from heddle_rollout.speculation import SCHEDULE
from heddle_sim.profile_files import Profile

SLOTS = (64, 100, 128, 200, 256)
"""Running steps of an engine that `best` tries, up to the largest batch of the profile."""

TUNED_BASELINES = ("verl", "slime", "verl-2026", "slime-2026", "sticky_least_loaded")
"""Presets whose best setting a table of ours compares with."""

DRAFTS = (1, 2, 3, 4)
"""Drafts at every batch size that `best` tries, beside none and a schedule."""

Choice: TypeAlias = Literal["best"] | Sequence[int] | None
"""Settings to try: every useful one, those that are listed, or the configuration's only."""


def with_admission(policy: str, cluster: ClusterConfig) -> str:
    """A policy's name with the part that `max_running` ``auto`` adds, but to `heddle`."""
    base, *parts = policy.split("+")
    added = cluster.adaptive and base != OURS[0] and ADAPTIVE not in parts
    return f"{policy}+{ADAPTIVE}" if added else policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of a comparison: a policy on a cluster."""

    name: str
    """The policy's name; of a policy at several settings, with its setting: ``verl@tp4``."""
    policy: str
    cluster: ClusterConfig
    swept: bool
    """Whether the policy runs at several settings."""
    baseline: bool
    """Whether it is of another system; with parts put in, if it neither plans, nor predicts, nor
    consolidates."""
    speculation_tried: bool = False
    """Whether it is one of several settings of speculative decoding."""
    roles_tried: bool = False
    """Whether it is one of several splits of the GPUs into prefill and decode engines."""
    planned: bool = False
    """Whether the policy chooses its engines itself, and not the cluster's `tp`."""
    regime: str = ""
    """Of an RL loop, as the next."""
    train_gpus: int = 0
    epoch_plan: str = ""

    @property
    def full_policy(self) -> str:
        """With the part that `cluster.max_running` ``auto`` adds."""
        return with_admission(self.policy, self.cluster)

    @property
    def contest(self) -> tuple[str, bool]:
        """Rows with the same value compete for the best setting: with roles, and without."""
        return self.policy, self.roles_tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The clusters of a comparison."""

    base: ClusterConfig
    """Of policies with a planner of their own, which run once: with the largest number of running
    steps of any setting."""
    settings: tuple[ClusterConfig, ...]
    """Of all others, one for each setting. Only `base` unless settings are tried."""
    swept: bool
    """Whether settings are tried, if only one."""
    speculations: tuple[str, ...] = ()
    """Settings of speculative decoding that are tried, of policies with a planner too."""
    roles: bool = False
    """Whether each setting is also tried with prefill and decode engines on the same GPUs."""

    @property
    def tps(self) -> tuple[str, ...]:
        """TP degrees of `settings`, for people."""
        return tuple(dict.fromkeys(cluster.tps for cluster in self.settings))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of running steps of `settings`."""
        return tuple(dict.fromkeys(cluster.max_running for cluster in self.settings))

    def variants(
        self, config: RunConfig, policies: Sequence[str], workspace: Workspace
    ) -> tuple[Variant, ...]:
        """The rows of a comparison, each policy's settings together.

        Raises:
            ValueError: one of the packages' errors for bad input, of any row.
        """
        made: list[Variant] = []
        every = [
            prepare(with_policy(config, name, self.base), workspace=workspace).policy
            for name in policies
        ]
        check_tags_used(config.policy.tags, every)
        for name, policy in zip(policies, every, strict=True):
            planner = policy.planner
            planned = not isinstance(planner, FixedPlan) or isinstance(planner, SharesPlan)
            swept = self.swept and not planned
            predicts = not isinstance(policy.predictor, NoPrediction)
            never_starts = isinstance(policy.consolidation, NoConsolidation)
            settings = self.settings if swept else self.planned
            clusters = [replace(s, standby_tp=()) if never_starts else s for s in settings]
            split = self._split(config, clusters, workspace) if self.roles else []
            for cluster in [*clusters, *split]:
                if swept or cluster.roles:
                    prepare(with_policy(config, name, cluster), workspace=workspace)
                tried = self.roles and bool(cluster.roles)
                label = self._label(cluster, planned, swept=swept or tried)
                variant = Variant(
                    name="",
                    policy=name,
                    cluster=cluster,
                    swept=(swept or len(settings) > 1) and not tried,
                    speculation_tried=bool(self.speculations),
                    baseline=is_other_system(name)
                    and ("+" not in name or (not planned and not predicts and never_starts)),
                    roles_tried=tried,
                    planned=planned,
                )
                full = variant.full_policy
                made.append(replace(variant, name=f"{full}@{label}" if label else full))
        if self.roles and not any(variant.roles_tried for variant in made):
            raise ConfigError(
                f"--sweep cluster.roles=best: gpus = {self.base.gpus} cannot be split into engines "
                f"that prefill and engines that decode, of TP {' or '.join(self.tps)}: take more "
                "--gpus, another --tp, or leave the sweep out"
            )
        return tuple(made)

    @property
    def planned(self) -> tuple[ClusterConfig, ...]:
        """Settings of a policy that plans its engines."""
        speculations = self.speculations or (self.base.speculation,)
        return tuple(replace(self.base, speculation=each) for each in speculations)

    def _split(
        self, config: RunConfig, clusters: Sequence[ClusterConfig], workspace: Workspace
    ) -> list[ClusterConfig]:
        return [
            replace(cluster, roles=str(roles))
            for cluster in clusters
            for roles in role_choices(
                workspace.workload(replace(config, cluster=cluster)).scripts, cluster
            )
        ]

    def _label(self, cluster: ClusterConfig, planned: bool, *, swept: bool) -> str:
        """Setting of a row: what is tried of it."""
        tps = cluster.tps.replace(" (", "@").replace(")", "").replace(", ", "+")
        parts = [] if planned or not swept else [f"tp{tps}"]
        if len(self.numbers) > 1 and not planned:
            parts.append(str(cluster.max_running))
        if self.speculations:
            parts.append(without_acceptance(cluster.speculation))
        if self.roles and cluster.role_gpus is not None:
            parts.append(cluster.role_gpus.label)
        return "/".join(parts)


def with_policy(config: RunConfig, preset: str, cluster: ClusterConfig) -> RunConfig:
    """The same run under another policy, on another cluster."""
    return replace(config, policy=replace(config.policy, preset=preset), cluster=cluster)


def tuning(
    config: RunConfig,
    tps: Choice = None,
    slots: Choice = None,
    speculation: str | None = None,
    roles: bool = False,
    *,
    workspace: Workspace,
) -> Tuning:
    """Choose the settings to try: all combinations of TP degrees, numbers of running steps, and
    settings of `speculation`, which is ``best`` or ``METHOD:best[:ACCEPTANCE]``.

    `best` tries the TP degrees of the profile that divide the GPUs and whose engines hold the
    largest context, and the numbers of `SLOTS` with the configuration's. With `roles`, each setting
    is tried with prefill and decode engines too, at splits by `heddle.cluster.role_choice`.

    Raises:
        ConfigError: a setting that is listed cannot be used, is listed twice, or none is.
        ValueError: any other of the packages' errors for bad input.
    """
    base = config.cluster
    beside = {"cluster.roles": base.roles, "cluster.mix": base.mix, "cluster.pool": base.pool}
    given = [name for name, value in beside.items() if roles and value]
    if given:
        raise ConfigError(
            "--sweep cluster.roles=best chooses the GPUs of prefill and decode engines of one GPU "
            f"class and one TP degree: leave {given[0]} out, or the sweep"
        )
    drafted = () if speculation is None else speculations(base, speculation)
    if tps is None and slots is None and not drafted:
        return Tuning(base=base, settings=(base,), swept=False, roles=roles)
    if drafted:
        # What engines with a drafter cannot hold is refused, or dropped, for all alike.
        base = replace(base, speculation=drafted[-1])
    profiles = load_profiles(base, check_tp=False)
    uniform: Sequence[ClusterConfig] = (base,)
    if tps is not None:
        uniform = _uniform(config, profiles, tps, workspace)
        own = [each.tp for each in base.classes]
        same = [c for c in uniform if [each.tp for each in c.classes] == own]
        base = (same or uniform)[0]
    numbers = (base.max_running,) if slots is None else running_steps(base, profiles, slots)
    base = replace(base, max_running=max(numbers))
    return Tuning(
        base=base,
        settings=tuple(
            replace(c, max_running=n, speculation=each)
            for c in uniform
            for n in numbers
            for each in drafted or (base.speculation,)
        ),
        swept=True,
        speculations=drafted,
        roles=roles,
    )


def speculations(cluster: ClusterConfig, text: str) -> tuple[str, ...]:
    """The settings that ``best`` or ``METHOD:best[:ACCEPTANCE]`` tries, the one without first.

    Raises:
        ConfigError: it is neither.
    """
    method, _, rest = text.partition(":")
    drafts, colon, acceptance = rest.partition(":")
    if text == "best":
        heads = [each for each in methods_of(layout_profile(cluster)) if each not in LOOKED_UP]
        method = (*heads, "ngram")[0]
    elif drafts != "best":
        raise ConfigError(f"speculation: {text!r} is neither best nor METHOD:best[:ACCEPTANCE]")
    chances = acceptance.split("/")
    static = [f"{method}:{count}{colon}{'/'.join(chances[:count])}" for count in DRAFTS]
    return (NO_SPECULATION, *static, f"{method}:{SCHEDULE}{colon}{acceptance}")


def without_acceptance(speculation: str) -> str:
    """A setting for labels: its method and drafts."""
    return ":".join(speculation.split(":")[:2])


def _uniform(
    config: RunConfig, profiles: ClusterProfiles, tps: Choice, workspace: Workspace
) -> tuple[ClusterConfig, ...]:
    """The cluster with engines of each TP degree; of several classes, each with each."""
    base = config.cluster
    found = [_degrees(each, tps) for each in profiles.classes]
    # What the widest engines cannot hold is refused, or dropped, for all settings alike.
    widest = with_tps(base, [max(degrees) for degrees in found])
    largest = workspace.workload(replace(config, cluster=widest)).largest_tokens
    held = [
        _holding(each.profile, degrees, largest, tps)
        for each, degrees in zip(profiles.classes, found, strict=True)
    ]
    return tuple(with_tps(base, degrees) for degrees in product(*held))


def with_tps(base: ClusterConfig, tps: Sequence[int]) -> ClusterConfig:
    """The cluster with a TP degree for each class."""
    if not base.pool:
        return replace(base, mix=(), tp=tps[0])
    pool = tuple(replace(pool, tp=tp) for pool, tp in zip(base.pool, tps, strict=True))
    return replace(base, pool=pool)


def _degrees(each: ClassProfile, tps: Choice) -> tuple[int, ...]:
    """TP degrees to try on the GPUs of a class."""
    profile, cluster = each.profile, each.cluster
    gpus = f"roles = {cluster.roles!r}" if cluster.roles else f"gpus = {cluster.gpus}"
    if tps == "best":
        degrees = tuple(tp for tp in profile.tps if cluster.divides_into(tp))
        if not degrees:
            raise ConfigError(
                f"{gpus} is divisible by no TP degree of {profile.model} on {profile.gpu}, "
                f"which has {', '.join(map(str, profile.tps))}: take another number of GPUs"
            )
    else:
        degrees = _listed(tps, "TP degrees")
        for tp in degrees:
            profile.at(tp)
            if not cluster.divides_into(tp):
                raise ConfigError(
                    f"{gpus} is not divisible by TP degree {tp}, at which engines are to be "
                    f"tried: leave it out, or take another number of GPUs. Engines of different "
                    f"TP degrees side by side are cluster.mix"
                )
    return degrees


def _holding(
    profile: Profile, degrees: Sequence[int], largest: int, tps: Choice
) -> tuple[int, ...]:
    """Those of the TP degrees whose engines hold the largest context."""
    small = [tp for tp in degrees if capacity_tokens(profile, tp) < largest]
    if small and tps != "best":
        raise ConfigError(
            f"engines of TP degree {small[0]} hold {capacity_tokens(profile, small[0]):,} tokens, "
            f"and the largest context has {largest:,}: leave {small[0]} out; best takes the TP "
            "degrees that hold it"
        )
    return tuple(tp for tp in degrees if tp not in small)


def running_steps(base: ClusterConfig, profiles: ClusterProfiles, slots: Choice) -> tuple[int, ...]:
    """Numbers of running steps of an engine to try.

    Raises:
        ConfigError: one that is listed cannot be used, or is listed twice.
    """
    if slots == "best":
        largest = min(
            max(table.decode.batch)
            for each in profiles.classes
            for table in each.profile.tables.values()
        )
        return tuple(sorted({base.max_running, *(n for n in SLOTS if n <= largest)}))
    numbers = _listed(slots, "numbers of running steps")
    for number in numbers:
        try:
            replace(base, max_running=number)
        except ValueError as error:
            raise ConfigError(f"{number} running steps: {error}") from None
    return numbers


def _listed(values: Choice, what: str) -> tuple[int, ...]:
    if isinstance(values, str):
        raise ConfigError(f"{what}: {values!r} is neither best nor a list of numbers")
    listed = tuple(values or ())
    if not listed:
        raise ConfigError(f"no {what} are listed: list one or more, or take best")
    if min(listed) < 1:
        raise ConfigError(f"{what} must be 1 or more, not {min(listed)}")
    twice = [value for value in listed if listed.count(value) > 1]
    if twice:
        raise ConfigError(
            f"{what}: {twice[0]} is listed twice, and each is tried once. Engines of different "
            "TP degrees side by side are cluster.mix"
        )
    return listed


def drafted(candidate: Variant, speculation: Sequence[str]) -> Variant:
    """The candidate with the first setting of these; as it is without any."""
    for setting in speculation[:1]:
        cluster = replace(candidate.cluster, speculation=setting)
        candidate = replace(candidate, cluster=cluster, speculation_tried=True)
    return candidate


def with_drafts(config: RunConfig, speculation: Sequence[str]) -> RunConfig:
    """The same for a configuration."""
    for setting in speculation[:1]:
        config = replace(config, cluster=replace(config.cluster, speculation=setting))
    return config
