"""Rollouts that are drawn from the prompts of a trace: half to search on, half to judge on.

A rollout of the trace's own number of groups is drawn from the groups of one half, with repetition
(bootstrap). The last candidates of the first half are judged on prompts that nothing has seen.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.policy_inputs import NONE, PRIOR
from heddle.raw_logs import read_replayed
from heddle.setup import Workspace
from heddle.workload import Workload
from heddle_trace.columns import TraceColumn
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.table import Scripts

Half: TypeAlias = Literal["search", "judge", "whole"]
"""``whole``: the trace as it is, under a seed of its own."""

LEAST_GROUPS: Final = 4
"""Of a trace that is halved."""
KNOWN: Final = 0.2
"""Share of the trace's trajectories that a history may have: short ones are alike."""
_TAG: Final = 0x5EA2C4


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn rollout; of the whole trace, what a seed draws."""

    half: Half
    number: int
    """The first is 0."""


def check_groups(scripts: Scripts) -> None:
    """Refuse a trace whose halves would be no sample.

    Raises:
        ConfigError: it has fewer than `LEAST_GROUPS` groups.
    """
    groups = len(scripts.trajectory("group").occurring())
    if groups < LEAST_GROUPS:
        raise ConfigError(
            f"the trace has {groups} group{'s' if groups > 1 else ''} of samples: half of them is "
            f"searched on and half is judged on, which takes {LEAST_GROUPS} groups at least. Give "
            "more prompts (heddle trace synth, heddle trace import)"
        )


def check_history(config: RunConfig, workspace: Workspace, *, again: bool = False) -> str:
    """Refuse a history that has the trajectories that are judged on, or their prompts.

    Of prompts that may come `again`, as in a later epoch, it returns a warning.

    Raises:
        ConfigError: it has more than `KNOWN` of the trace's.
        TraceError: it cannot be read.
    """
    name = config.history
    if name == NONE or name.partition(":")[0] == PRIOR:
        return ""
    trace, earlier = workspace.trace(config.trace), read_replayed(Path(name))
    if earlier.sha256 == trace.sha256:
        return ""  # `resolve_history` refuses it.
    records, known = trace.records, earlier.records
    same, prompts = (
        sum(map(set(map(key, known)).__contains__, map(key, records)))
        for key in (_lengths, _prompt)
    )
    of = f"of the trace's {len(records):,} trajectories"
    if same > KNOWN * len(records):
        raise ConfigError(
            f"history {name} has {same:,} {of}, and a policy that knows them cannot be judged on "
            "them: give rollouts of other prompts, or --history none"
        )
    if prompts <= KNOWN * len(records):
        return ""
    found = f"history {name} has the prompts of {prompts:,} {of} (by group_id and length)"
    if not again:
        raise ConfigError(
            f"{found}, and what is judged must be new to a policy: give rollouts of other prompts, "
            "or --history none; heddle compare judges a later epoch of the same prompts"
        )
    return f"{found}: makespans are those of a later epoch; new prompts may take longer"


def _lengths(record: TrajectoryRecord) -> tuple[int | None, ...]:
    return record.prompt_tokens, *(step.output_tokens for step in record.steps)


def _prompt(record: TrajectoryRecord) -> tuple[str, int | None]:
    return record.group_id, record.prompt_tokens


def places(groups: int, half: Half, seed: int) -> list[int]:
    """Places of the groups of a half, among so many."""
    order = np.random.default_rng([seed, _TAG]).permutation(groups)
    half_of = order[: groups // 2] if half == "search" else order[groups // 2 :]
    return [int(place) for place in half_of]


def drawn(workload: Workload, draw: Draw, seed: int, *, share: int = 1) -> Workload:
    """Return a rollout of as many groups as the workload has, or one of `share` as many, from one
    half of them."""
    scripts = workload.scripts
    members = list(scripts.trajectory("group").occurring().items())
    half = places(len(members), draw.half, seed)
    rng = np.random.default_rng([seed, _TAG, draw.half == "judge", draw.number])
    chosen = [members[place] for place in rng.choice(half, len(members) // share).tolist()]
    rows = np.concatenate([own for _, own in chosen])
    sizes = [len(own) for _, own in chosen]
    group = TraceColumn(
        "word",
        np.repeat(np.arange(len(chosen), dtype=np.int32), sizes),
        [f"{name}~{k}" for k, (name, _) in enumerate(chosen)],
    )
    taken = scripts.take(rows)
    ids = [f"{id}~{k}" for id, k in zip(taken.ids, group.values.tolist(), strict=True)]
    return replace(workload, scripts=taken.changed(ids, {"group": group}), trajectories=len(rows))
