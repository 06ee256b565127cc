"""The data set of a loop: the prompts of a trace, in order, with the scripts of their samples."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from heddle.config_files import ConfigError
from heddle.loops.config import LoopConfig
from heddle.setup import Workspace
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import EPOCH, LEAST_KNOWN, Totals, epoch_of
from heddle_core.loop.groups import Prompt
from heddle_core.loop.regime import Regime
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

LEAST_MEASURED = 2
"""Steps that times are means of, at least."""


class UnfitError(ConfigError):
    """Batches that a regime cannot have on this trace, where others may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The prompts of a trace, with the scripts of their samples."""

    groups: Mapping[str, Sequence[TrajectoryScript]]
    samples: int | None = None
    """Of a prompt and epoch, each epoch others; None: all in every epoch."""
    cycle: int = 1
    """Epochs until samples are the same again."""

    @classmethod
    def kept(
        cls, workspace: Workspace, scripts: Scripts, *, samples: int | None = None, least: int = 1
    ) -> "DataSet":
        """As `of`, which makes an object of every row, once for the loops of a workspace."""
        # Scripts are slow to compare; what is kept holds them, so that their id stays theirs.
        key, of = (id(scripts), samples, least), partial(cls.of, samples=samples, least=least)
        return workspace.keep("data set", key, lambda: (scripts, of(scripts)), at_most=2)[1]

    @staticmethod
    def of(
        scripts: Sequence[TrajectoryScript], *, samples: int | None = None, least: int = 1
    ) -> "DataSet":
        """In order of the steps of training where the trace has them; prompts without come last.

        With `samples`, so many of each prompt make an epoch. Prompts with fewer than `least` are
        left out.
        """
        found: dict[str, list[TrajectoryScript]] = {}
        for script in scripts:
            found.setdefault(script.group, []).append(script)

        def step(name: str) -> float:
            known = [script.rl_step for script in found[name] if script.rl_step is not None]
            return min(known, default=math.inf)

        large = (name for name, own in found.items() if len(own) >= least)
        groups = {name: found[name] for name in sorted(large, key=step)}
        if samples is None:
            return DataSet(groups=groups)
        for own in groups.values():
            own.sort(key=lambda script: math.inf if script.rl_step is None else script.rl_step)
        cycle = max(1, min(map(len, groups.values())) // samples)
        return DataSet(groups=groups, samples=samples, cycle=cycle)

    def prompts(self, *, repeat: bool) -> Iterator[Prompt]:
        """In the order of the trace; with `repeat`, without end and under names of their own."""
        for epoch in count() if repeat else range(1):
            suffix = f"{EPOCH}{epoch}" if epoch else ""
            for name, scripts in self.groups.items():
                yield Prompt(group=GroupId(name + suffix), samples=self.samples or len(scripts))

    def known(self, epochs: Sequence[Totals]) -> list[Totals]:
        """Output tokens of its prompts' samples in epochs of a history."""
        # Prompts of a drawn rollout have a number after their name.
        names = {
            GroupId(name): (GroupId(name), GroupId(name.rpartition("~")[0])) for name in self.groups
        }
        return [
            {name: epoch[own] for name, owns in names.items() for own in owns if own in epoch}
            for epoch in epochs
        ]

    def output_tokens(self, group: GroupId, sample: int) -> int:
        """Output tokens of a sample, all steps together."""
        return sum(step.output_tokens for step in self.script(group, sample).steps)

    def script(self, group: GroupId, sample: int) -> TrajectoryScript:
        scripts, epoch = self.groups.get(group), 0
        if scripts is None:
            name, epoch = epoch_of(group)
            scripts = self.groups[name]
        return scripts[sample + epoch % self.cycle * (self.samples or 0)]


def least_batches(regime: Regime) -> int:
    """Batches of which as few are measured as may be."""
    every = regime.update.every
    return regime.warm_up_batches + every * -(-LEAST_MEASURED // every)


def whole_epochs(least: int, epoch: int, regimes: Iterable[Regime]) -> int:
    """Batches, `least` or more, of which whole epochs of so many are measured, and whole updates.

    Rows of other orders of the prompts are compared on parts of an epoch otherwise.
    """
    shapes = [(rule.update.every, rule.warm_up_batches) for rule in regimes]
    whole = math.lcm(epoch, *(every for every, _ in shapes))
    warm = max((warm for _, warm in shapes), default=0)
    return whole * max(-(-least // whole), -(-warm // whole) + 1)


def within_twice(usual: int, least: int, epoch: int, regimes: Iterable[Regime], other: int) -> int:
    """`whole_epochs`, of the `usual` batches at least; `other` where they are over twice these."""
    whole = whole_epochs(max(usual, least), epoch, regimes)
    return whole if whole <= 2 * usual else other


def check_data(config: LoopConfig, name: str, regime: Regime, data: DataSet) -> None:
    """Refuse prompts with too few samples, too few of them, and too few batches to measure.

    Raises:
        UnfitError: the regime cannot have such batches.
        ConfigError: a prompt's name cannot be repeated.
    """
    samples = regime.started_samples
    small = [group for group, scripts in data.groups.items() if len(scripts) < samples]
    if small:
        extra = regime.sampling.extra_samples
        beside = f" and {extra} beside them" if extra else ""
        most = min(map(len, data.groups.values())) - extra
        fewer = f"take loop.samples = {most}, or " if most > 0 else ""
        raise UnfitError(
            f"regime {name} starts {regime.samples} samples of each prompt{beside}, but "
            f"{len(small):,} of {len(data.groups):,} prompts of the trace have fewer, such as "
            f"{small[0]!r} with {len(data.groups[small[0]])}: {fewer}make a trace "
            f"with `heddle trace resample TRACE {regime.groups} {samples} -o OUT`"
        )
    if regime.batching.equal_rewards == "drop" and all(
        len({script.reward for script in scripts}) == 1 for scripts in data.groups.values()
    ):
        raise UnfitError(
            f"regime {name} drops groups of equal reward, as all {len(data.groups):,} prompts of "
            "the trace are: take a trace with `reward` of each trajectory, or leave "
            "batching.equal_rewards out"
        )
    least = least_batches(regime)
    if config.batches < least:
        raise UnfitError(
            f"regime {name} has all of its trajectories under way after step "
            f"{regime.warm_up_batches}, and later ones are measured: take loop.batches = {least} "
            "or more"
        )
    repeated = [group for group in data.groups if re.search(rf"{EPOCH}\d+$", group)]
    if repeated:
        raise ConfigError(
            f"prompt {repeated[0]!r} ends as those of a repeated trace do, in {EPOCH} and a "
            "number: give it another name"
        )
    needed = regime.groups * config.batches
    if len(data.groups) < needed and config.repeat is False:
        raise ConfigError(
            f"{config.batches} batches of {regime.groups} prompts need {needed:,} prompts under "
            f"regime {name}, the trace has {len(data.groups):,}: take fewer loop.batches or "
            "loop.groups, or loop.repeat to begin the trace again"
        )


def packs(config: LoopConfig, data: DataSet, history: Sequence[Totals]) -> bool:
    """Whether prompts could be packed into the batches of a loop that has `begun`."""
    names = {name for epoch in data.known(history) for name in epoch}
    known = data.cycle > 1 or 0 < len(data.groups) * LEAST_KNOWN <= len(names)
    return known and len(data.groups) % config.groups == 0 and len(data.groups) > config.groups


def check_packing(config: LoopConfig, data: DataSet, known: int, history: str) -> list[str]:
    """Refuse batches by length where none is known, or that are no whole ones; warn where few."""
    plan, prompts = config.packing(), len(data.groups)
    if plan is None or not plan.packed:
        return []
    packs = f"loop.epoch_plan = {config.epoch_plan} packs"
    if not known and data.cycle == 1:
        raise ConfigError(
            f"{packs} by earlier lengths of the prompts, and history {history} has none of the "
            f"{prompts:,}: give earlier rollouts of these prompts by --history, a trace with "
            "samples for two epochs, or take random"
        )
    if prompts % config.groups:
        raise ConfigError(
            f"{packs} whole batches, and {prompts:,} prompts are none of {config.groups}: take "
            "loop.groups that divides them, or random"
        )
    share = f"{known:,} of the {prompts:,} prompts ({known / prompts:.1%})"
    few = data.cycle == 1 and known < LEAST_KNOWN * prompts
    return [f"{packs} by lengths of {share}, which history {history} has"] if few else []


def check_recorded(config: LoopConfig, scripts: Scripts) -> None:
    """Refuse a time that only some trajectories have: a gap is no zero."""
    for name, flag, given in (
        ("env_start_s", "loop.env_start_s", config.env_start_s),
        ("reward_s", "loop.reward_s", config.reward_s),
    ):
        gaps = int((~scripts.trajectory(name).known).sum()) if scripts.has(name) else 0
        if gaps and given is None:
            raise ConfigError(
                f"the trace lacks {name} for {gaps:,} of {len(scripts):,} trajectories: give "
                f"{flag}, which replaces all of them"
            )
