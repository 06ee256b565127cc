"""A rollout of any size from a trace of any size: groups and their samples, drawn with a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from heddle_trace.errors import TraceError
from heddle_trace.schema import Trace, TrajectoryRecord

_TAG = 0x5E5A  # this draw's own stream, so that it shares none with other uses of a seed
_LONG = 900  # characters of a name that a copy keeps; a name may have 1,000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampleReport:
    """Composition of a draw, and its copies.

    `repeated_groups` counts groups whose task has another group already. `repeated_trajectories`
    counts copies, `most_copies` those of the most copied one. Copies within a group understate how
    much its samples differ: `padded_groups` counts the groups that have them. `left_out_arrivals`
    were recorded, but a rollout begins at once.
    """

    groups: int
    samples: int
    from_groups: int
    from_trajectories: int
    distinct_groups: int
    distinct_trajectories: int
    repeated_groups: int
    repeated_trajectories: int
    most_copies: int
    padded_groups: int
    left_out_arrivals: int


def resample(
    trace: Trace, *, groups: int, samples: int, seed: int
) -> tuple[tuple[TrajectoryRecord, ...], ResampleReport]:
    """Draw `groups` groups of `samples` trajectories each; groups stay together.

    Everything is used once before anything is used twice: groups of the trace, and the trajectories
    of a group. A second copy of a group is a group of its own, named `NAME~2`, so is a second copy
    of a trajectory. Equal arguments give equal records. Raises TraceError for counts below 1.
    """
    if groups < 1 or samples < 1:
        raise TraceError(f"{groups} groups of {samples} samples: give numbers from 1")
    members: dict[str, list[TrajectoryRecord]] = {}
    for record in trace.records:
        members.setdefault(record.group_id, []).append(record)
    names = list(members)
    taken = {record.trajectory_id: record for record in trace.records}
    rng = np.random.default_rng([seed, _TAG])
    copies: dict[str, int] = {}
    used = {name: np.zeros(len(group), int) for name, group in members.items()}
    drawn: list[TrajectoryRecord] = []
    padded = 0
    for index in _evenly(np.zeros(len(names), int), groups, rng):
        name = names[index]
        copies[name] = copies.get(name, 0) + 1
        group = _copy(name, copies[name], members)
        padded += samples > len(members[name])
        for member in _evenly(used[name], samples, rng):
            record = members[name][member]
            used[name][member] += 1
            own = _copy(record.trajectory_id, int(used[name][member]), taken)
            drawn.append(
                msgspec.structs.replace(record, trajectory_id=own, group_id=group, arrival_s=None)
            )
    times = np.concatenate([used[name] for name in copies])
    distinct = int((times > 0).sum())
    report = ResampleReport(
        groups=groups,
        samples=samples,
        from_groups=len(names),
        from_trajectories=len(trace.records),
        distinct_groups=len(copies),
        distinct_trajectories=distinct,
        repeated_groups=groups - len(copies),
        repeated_trajectories=len(drawn) - distinct,
        most_copies=int(times.max()),
        padded_groups=padded,
        left_out_arrivals=sum(bool(r.arrival_s) for r in trace.records),
    )
    return tuple(drawn), report


def _evenly(used: npt.NDArray[np.int_], count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` indices in random order: every one equally often, else the least used so far."""
    rounds, rest = divmod(count, len(used))
    least = np.lexsort((rng.random(len(used)), used))[:rest]
    drawn = np.concatenate([*(np.arange(len(used)) for _ in range(rounds)), least])
    return [int(index) for index in rng.permutation(drawn)]


def _copy(name: str, number: int, taken: Mapping[str, object]) -> str:
    """The name of a copy; a trace that was drawn itself has names of this kind already."""
    if number == 1:
        return name
    if len(name) > _LONG:  # or the number would not fit
        name = f"{name[:_LONG]}~{blake2b(name.encode(), digest_size=8).hexdigest()}"
    own = f"{name}~{number}"
    while own in taken:
        own += "~"
    return own
