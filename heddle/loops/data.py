"""The data set of a loop: the prompts of a trace, in order, with the scripts of their samples."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

from heddle.config_files import ConfigError
from heddle.loops.config import LoopConfig
from heddle_core.estimate.history import History
from heddle_core.ids import GroupId
from heddle_core.loop.groups import Prompt
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

EPOCH = "#"
"""Between a prompt's name and its epoch, where the trace is begun again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """The prompts of a trace, with the scripts of their samples."""

    groups: dict[str, Sequence[TrajectoryScript]]

    @staticmethod
    def of(scripts: Sequence[TrajectoryScript]) -> "DataSet":
        """In order of the steps of training where the trace has them; prompts without come last."""
        found: dict[str, list[TrajectoryScript]] = {}
        for script in scripts:
            found.setdefault(script.group, []).append(script)

        def step(name: str) -> float:
            known = [script.rl_step for script in found[name] if script.rl_step is not None]
            return min(known, default=math.inf)

        return DataSet(groups={name: found[name] for name in sorted(found, key=step)})

    def prompts(
        self, *, repeat: bool, order: Callable[[int], Iterable[str]] | None = None
    ) -> Iterator[Prompt]:
        """In the order of the trace, or that of each epoch; with `repeat`, without end and under
        names of their own."""
        for epoch in count() if repeat else range(1):
            suffix = f"{EPOCH}{epoch}" if epoch else ""
            for name in self.groups if order is None else order(epoch):
                yield Prompt(group=GroupId(name + suffix), samples=len(self.groups[name]))

    def lengths(self, history: History | None) -> dict[GroupId, float]:
        """Mean output tokens of a sample, of prompts that the history has."""
        totals = {} if history is None else history.group_totals
        found = {}
        for name in map(GroupId, self.groups):
            # Prompts of a drawn rollout have a number after their name.
            tokens = totals.get(name) or totals.get(GroupId(name.rpartition("~")[0]))
            if tokens:
                found[name] = fmean(tokens)
        return found

    def output_tokens(self, group: GroupId, sample: int) -> int:
        """Output tokens of a sample, all steps together."""
        return sum(step.output_tokens for step in self.script(group, sample).steps)

    def script(self, group: GroupId, sample: int) -> TrajectoryScript:
        """The script of a sample."""
        scripts = self.groups.get(group)
        if scripts is None:
            scripts = self.groups[group.rpartition(EPOCH)[0]]
        return scripts[sample]


def check_packing(
    config: LoopConfig, data: DataSet, lengths: Mapping[GroupId, float], history: str
) -> None:
    """Refuse batches by length where none is known, or that are no whole ones."""
    plan, prompts = config.packing(), len(data.groups)
    if plan is None or not plan.packed:
        return
    packs = f"loop.epoch_plan = {config.epoch_plan} packs"
    if not lengths:
        raise ConfigError(
            f"{packs} by earlier lengths of the prompts, and history {history} has none of the "
            f"{prompts:,}: give earlier rollouts of these prompts by --history, or take random"
        )
    if prompts % config.groups:
        raise ConfigError(
            f"{packs} whole batches, and {prompts:,} prompts are none of {config.groups}: take "
            "loop.groups that divides them, or random"
        )


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
