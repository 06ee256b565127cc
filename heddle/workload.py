"""The workload of a run: a trace made ready for one seed and cluster."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Self

import numpy as np

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import ClassProfile, ClusterProfiles, capacity_tokens
from heddle.config_files import ConfigError
from heddle_core.parts.placement.affinity import TaggedAffinity
from heddle_core.policy import Policy
from heddle_trace.complete import FillReport
from heddle_trace.schema import Trace
from heddle_trace.table import Records, Scripts

_TOOLS_NAMED: Final = 12


class CapacityError(ValueError):
    """Trajectories that no engine can hold; the message names the largest and the remedies."""


@dataclass(frozen=True, slots=True)
class ReplayedTrace:
    """Which trace it is, without its records."""

    name: str
    sha256: str = ""
    """Without a replay, ""."""
    workload: str = ""
    """That all of its records are of; "" when there are several."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        found = list(Records.of(trace.records).trajectory("workload").occurring())
        return cls(trace.name, trace.sha256, found[0] if len(found) == 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace ready to replay under one seed, or the bounds of what clients of a gateway send."""

    trace: ReplayedTrace
    scripts: Scripts = field(default_factory=lambda: Scripts.of(()))
    """The trajectories of a replay; empty without one."""
    trajectories: int
    largest_tokens: int
    """The largest context that a trajectory grows to."""
    fill: FillReport | None = None
    """Values that the trace lacked; None without a replay."""
    dropped: tuple[str, ...] = ()
    """Trajectories left out because their context exceeds an engine's KV, or a trainer's memory."""

    @property
    def output_tokens(self) -> int:
        """Tokens that a replay of it generates."""
        return int(self.scripts.total("output_tokens").sum())

    def plain(self) -> dict[str, Any]:
        """What is replayed, as JSON."""
        return {
            "name": self.trace.name,
            "trajectories": self.trajectories,
            "sha256": self.trace.sha256,
            **self.notes,
        }

    @property
    def notes(self) -> dict[str, int]:
        """Its entries in a run's summary; empty without a replay."""
        if self.fill is None:
            return {}
        filled = {f"filled_{name}": each.filled for name, each in self.fill.fields.items()}
        return {**filled, "dropped_over_capacity": len(self.dropped)}


def fitting(
    scripts: Scripts, profiles: ClusterProfiles, most_tokens: int | None = None
) -> tuple[Scripts, tuple[str, ...]]:
    """Separate trajectories that every engine can hold, up to `most_tokens`, from the others.

    Raises:
        CapacityError: some engine cannot hold a trajectory, and it may not be dropped.
    """
    smallest = min(
        profiles.classes, key=lambda each: capacity_tokens(each.profile, _least_tp(each))
    )
    cluster, profile, tp = smallest.cluster, smallest.profile, _least_tp(smallest)
    capacity = capacity_tokens(profile, tp)
    largest = scripts.largest_context()
    fits = largest <= min(capacity, most_tokens or capacity)
    dropped = tuple(scripts.ids[place] for place in np.flatnonzero(~fits).tolist())
    if not dropped:
        return scripts, ()
    if cluster.over_capacity == "drop" and len(dropped) < len(scripts):
        return scripts.take(fits), dropped
    worst = int(largest.argmax())
    several = len(profiles.classes) > 1
    flag = f"tp={{}} in the pool of {profile.gpu}" if several else "--tp {}"
    remedies = [
        flag.format(other)
        if tp not in (cluster.tp_choices or ())
        else f"a tp_choices that begins at {other}"
        for other in profile.tps
        if capacity_tokens(profile, other) >= largest[worst] and cluster.gpus % other == 0
    ][:1]
    remedies.append("a GPU class with more memory")
    if len(dropped) < len(scripts):
        remedies.append(
            f"cluster.over_capacity=drop, which leaves {len(dropped):,} out and says so"
        )
    raise CapacityError(
        f"{len(dropped):,} of {len(scripts):,} trajectories do not fit into the KV cache of an "
        f"engine: {scripts.ids[worst]!r} grows to {largest[worst]:,} tokens, {profile.model} on "
        f"{profile.gpu} at TP {tp} holds {capacity:,}; use {', or '.join(remedies)}"
    )


def _least_tp(each: ClassProfile) -> int:
    """The least TP degree that engines of a class may have."""
    cluster = each.cluster
    return min((*(cluster.mix or (cluster.tp,)), *(cluster.tp_choices or ())))


def check_tags(scripts: Scripts, tags: Mapping[str, str], pools: Collection[str]) -> None:
    """Refuse a tag of a task that no trajectory has, or of a GPU class without a pool.

    Raises:
        ConfigError: names the tag, and what there is.
    """
    tasks = scripts.trajectory("task").words
    for task, gpu in tags.items():
        if task not in tasks:
            raise ConfigError(
                f"policy.tags: {task}={gpu}: the workload has no such task; it has "
                f"{', '.join(map(repr, tasks[:_TOOLS_NAMED]))}"
            )
        if gpu not in pools:
            raise ConfigError(
                f"policy.tags: {task}={gpu}: there are no GPUs of class {gpu}; the cluster has "
                f"{', '.join(pools)}"
            )


def check_tags_used(tags: Sequence[str], policies: Sequence[Policy]) -> None:
    """Refuse tags of tasks where no policy reads them; one of another package may.

    Raises:
        ConfigError: names a policy that does.
    """
    placements = [policy.placement for policy in policies]
    if tags and not any(
        isinstance(placement, TaggedAffinity)
        or not type(placement).__module__.startswith("heddle_core.")
        for placement in placements
    ):
        raise ConfigError(
            f"policy.tags: {tags[0]} has no effect under these policies: take rollart, or the part "
            "+tagged_affinity, or leave policy.tags out"
        )


def check_tools(tools: Sequence[str | None], cluster: ClusterConfig) -> None:
    """Refuse a pool of a tool that is not one of `tools`, those of the trajectories.

    Raises:
        ConfigError: names the tool, and some that there are.
    """
    services = cluster.tool_services()
    if services is None:
        return
    known = [tool for tool in tools if tool is not None]
    parts = dict.fromkeys(part for tool in known for part in (tool, *tool.split("+")))
    for tool in services.pools:
        if tool not in parts:
            near = get_close_matches(tool, parts, n=1)
            hint = f"did you mean {near[0]!r}? It" if near else "it"
            raise ConfigError(
                f"cluster.tool_pools: {tool}: the workload has no such tool; {hint} has "
                f"{', '.join(map(repr, list(parts)[:_TOOLS_NAMED])) or 'none'}"
            )
