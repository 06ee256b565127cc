"""A rollout of any size from a trace of any size: groups and their samples, drawn with a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from heddle_trace.columns import Ints, TraceColumn
from heddle_trace.errors import TraceError
from heddle_trace.schema import Trace
from heddle_trace.table import Records

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
) -> tuple[Records, ResampleReport]:
    """Draw `groups` groups of `samples` trajectories each; groups stay together.

    Everything is used once before anything is used twice: groups of the trace, and the trajectories
    of a group. A second copy of a group is a group of its own, named `NAME~2`, so is a second copy
    of a trajectory. Equal arguments give equal records. Raises TraceError for counts below 1.
    """
    if groups < 1 or samples < 1:
        raise TraceError(f"{groups} groups of {samples} samples: give numbers from 1")
    records = Records.of(trace.records)
    members = records.trajectory("group_id").occurring()
    names = list(members)
    taken = dict.fromkeys(records.ids)
    rng = np.random.default_rng([seed, _TAG])
    copies: dict[str, int] = {}
    used = np.zeros(len(records), np.int64)
    drawn: list[int] = []
    ids: list[str] = []
    made: list[str] = []
    padded = 0
    for index in _evenly(np.zeros(len(names), int), groups, rng):
        name = names[index]
        own = members[name]
        copies[name] = copies.get(name, 0) + 1
        made.append(_copy(name, copies[name], members))
        padded += samples > len(own)
        for place in own[_evenly(used[own], samples, rng)].tolist():
            used[place] += 1
            drawn.append(place)
            ids.append(_copy(records.ids[place], int(used[place]), taken))
    group = TraceColumn("word", np.repeat(np.arange(groups, dtype=np.int32), samples), made)
    arrivals = records.trajectory("arrival_s").recorded()
    distinct = int((used > 0).sum())
    report = ResampleReport(
        groups=groups,
        samples=samples,
        from_groups=len(names),
        from_trajectories=len(records),
        distinct_groups=len(copies),
        distinct_trajectories=distinct,
        repeated_groups=groups - len(copies),
        repeated_trajectories=len(drawn) - distinct,
        most_copies=int(used.max()),
        padded_groups=padded,
        left_out_arrivals=int((arrivals != 0.0).sum()),
    )
    chosen = records.take(np.array(drawn))
    return chosen.changed(ids, {"group_id": group, "arrival_s": None}), report


def _evenly(used: Ints, count: int, rng: np.random.Generator) -> list[int]:
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
