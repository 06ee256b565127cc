"""Numbers of GPUs for the trainer and TP degrees of the engines that a loop is tried with."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from heddle.cluster.profiles import load_profiles, memory_profile
from heddle.command_config import Config
from heddle.comparison.tuning import (
    Choice,
    Variant,
    running_steps,
    speculations,
    with_policy,
    with_tps,
)
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.loops.config import LoopConfig
from heddle.loops.own_regimes import regime_names
from heddle_core.loop.presets import REGIMES

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of all GPUs, that the trainer is tried with."""
USUAL: Final = ("sync", "one-step-off", "areal:max_head_offpolicyness=1", "heddle-loop")
"""Tried where none is named: the simplest first."""


class SplitError(ConfigError):
    """GPUs that cannot be divided between trainer and engines."""


RANDOM: Final = "random"
"""`loop.epoch_plan` that packs nothing."""


def beside_random(configs: Sequence[LoopConfig]) -> list[LoopConfig]:
    """Each configuration, before it the same with prompts in random order where it packs them."""
    rules = (RANDOM, configs[0].epoch_plan)
    if configs[0].epoch_plan in ("", RANDOM):
        return list(configs)
    return [replace(each, epoch_plan=rule) for each in configs for rule in rules]


def splits(
    config: LoopConfig,
    train_gpus: Choice,
    tps: Choice,
    running: Choice = None,
    speculation: str | None = None,
) -> list[LoopConfig]:
    """Configurations of a loop, one for each number of training GPUs and TP degree of the engines.

    `config.run.cluster.gpus` are all GPUs here, but for those of a trainer of its own type. None or
    best: those of `SHARES`, and the degrees of the profile, that leave whole engines. Roles leave
    one number of training GPUs. Each is tried with numbers of `running` steps of an engine, and
    settings of `speculation`, as those of `heddle.comparison.tuning`.

    Raises:
        ConfigError: a given split leaves no GPUs or no whole engines, or none can be; a number of
            running steps that cannot be used.
        ProfileError: model or GPU class is unknown.
    """
    cluster = config.run.cluster
    if cluster.mix:
        raise ConfigError(
            "a loop has engines of one TP degree, or those that a policy plans: leave cluster.mix "
            "out"
        )
    train_gpus, tps = (None if isinstance(each, str) else each for each in (train_gpus, tps))
    divide = _beside if config.train_gpu else _divided
    found = divide(config, train_gpus, tps)
    if speculation is not None:
        tried = speculations(cluster, speculation)
        found = [each.on(speculation=setting) for each in found for setting in tried]
    if running is None:
        return found
    numbers = running_steps(cluster, load_profiles(cluster, check_tp=False), running)
    return [each.on(max_running=number) for each in found for number in numbers]


def _beside(
    config: LoopConfig, train_gpus: Sequence[int] | None, tps: Sequence[int] | None
) -> list[LoopConfig]:
    """Splits where all GPUs of the cluster generate; best TP degrees are of each pool."""
    cluster = config.run.cluster
    if train_gpus is None:
        wholes = {8 * round(cluster.gpus * share / (1 - share) / 8) for share in SHARES}
        train_gpus = sorted(wholes - {0}) or [max(1, cluster.gpus // 3)]
    if tps is not None:
        clusters = [replace(cluster, tp=tp) for tp in tps]
    else:
        degrees = (memory_profile(each).tps_on(each.gpus) for each in cluster.classes)
        clusters = [with_tps(cluster, each) for each in product(*degrees)]
    return [
        replace(config, train_gpus=number, run=replace(config.run, cluster=each))
        for each in clusters
        for number in train_gpus
    ]


def _divided(
    config: LoopConfig, train_gpus: Sequence[int] | None, tps: Sequence[int] | None
) -> list[LoopConfig]:
    cluster = config.run.cluster
    degrees = memory_profile(cluster).tps if tps is None else tps
    gpus = cluster.gpus - config.reward_gpus
    for_rewards = f", {config.reward_gpus} compute rewards" if config.reward_gpus else ""
    found: list[LoopConfig] = []
    for tp in degrees:
        each = tp * cluster.attention_dp
        shares = sorted({round(share * gpus / each) * each for share in SHARES})
        if cluster.role_gpus is not None:
            shares = [_beside_roles(config, gpus, train_gpus)]
        numbers = shares if train_gpus is None else train_gpus
        for number in [0] if config.colocated else numbers:
            rollout = gpus - number
            whole = rollout % each == 0
            if cluster.role_gpus is not None:
                # A given degree that does not divide the GPUs of a role is refused by name.
                whole = tps is not None or cluster.divides_into(tp)
            if rollout >= each and whole and (config.colocated or number >= 1):
                split = replace(config, train_gpus=max(number, 1))
                found.append(split.on(gpus=rollout, tp=tp))
            elif tps is not None and train_gpus is not None:
                left = "all are shared" if config.colocated else f"{number} train"
                left += for_rewards
                raise SplitError(
                    f"--gpus {cluster.gpus}: {left}, so {max(rollout, 0)} are left for engines of "
                    f"TP {tp}; take other loop.train_gpus, that leave a multiple of {each} and not "
                    "0, or another --tp"
                )
    if not found:
        raise SplitError(
            f"--gpus {cluster.gpus} cannot be split into a trainer and engines of TP "
            f"{' or '.join(map(str, degrees))}{for_rewards}"
        )
    return found


def _beside_roles(config: LoopConfig, gpus: int, train_gpus: Sequence[int] | None) -> int:
    """GPUs that the engines of both roles leave to the trainer, of those without rewards.

    Raises:
        ConfigError: they leave another number than is given, or none.
    """
    cluster = config.run.cluster
    roles = cluster.role_gpus
    assert roles is not None, "a cluster with roles"
    used = roles.prefill + roles.decode
    left = gpus - used
    given = [0] if config.colocated else [left] if train_gpus is None else train_gpus
    for number in given:
        if number == left and (config.colocated or left >= 1):
            continue
        what = "all are shared" if config.colocated else f"{number} train"
        if config.reward_gpus:
            what += f", {config.reward_gpus} compute rewards"
        remedy = f"loop.train_gpus = {left}, or " if left >= 1 and not config.colocated else ""
        least = gpus if config.colocated else gpus - max(number, 1)
        raise ConfigError(
            f"cluster.roles = {cluster.roles} has {used} GPUs for engines, and of --gpus "
            f"{cluster.gpus} {what}: take {remedy}roles that add up to {least}"
        )
    return left


def on_loop(candidate: Variant, config: LoopConfig) -> LoopConfig:
    run = with_policy(config.run, candidate.policy, candidate.cluster)
    return replace(
        config,
        run=run,
        regimes=(candidate.regime,),
        train_gpus=candidate.train_gpus,
        epoch_plan=candidate.epoch_plan,
        seeds=1,
    )


def loop_choices(
    config: RunConfig, regimes: str | Sequence[str], train_gpus: Choice = None, tps: Choice = None
) -> dict[str, Any]:
    """Regimes and splits, as arguments of `heddle.search.clusters.search_clusters`.

    `regimes` ``best``: `USUAL`, where GPUs are shared those that can. What is None is the
    configuration's number of GPUs, or best.
    """
    given = config.loop.train_gpus
    if regimes == "best":
        presets = {name: REGIMES[name.partition(":")[0]] for name in USUAL}
        shared = config.loop.colocated
        regimes = [name for name, made in presets.items() if made.can_share_gpus or not shared]
    else:
        regimes = regime_names(regimes, config.regimes if isinstance(config, Config) else {})
    own: Choice = "best" if given is None else (given,)
    splits = {"train_gpus": train_gpus or own, "tps": tps or "best"}
    return {"regimes": regimes, "splits": splits}
