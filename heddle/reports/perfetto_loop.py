"""The tracks of an RL loop as trace events: trainer, weight updates, GPU moves, services."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from heddle.reports.curves import under_way
from heddle.runs.loop_record import LoopRecord
from heddle.runs.record import Record
from heddle.runs.tables import Floats, Ints

Event: TypeAlias = dict[str, Any]
ToMicroseconds: TypeAlias = Callable[[Floats], Ints]


def loop_events(
    record: Record, loop: LoopRecord, first: int, microseconds: ToMicroseconds
) -> Iterator[Event]:
    """Processes and threads are numbered from `first` on; times are those of `microseconds`."""
    trainer, updates, services = first, first + 1, first + 2
    thread = first + 3
    for pid, name in ((trainer, "trainer"), (updates, "weight updates"), (services, "services")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        # Above the engines, whose numbers are smaller.
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": 0}}
    yield from _named(trainer, thread, "training")
    for name, kind, begin, end, args in _trainings(loop, microseconds):
        yield _slice(trainer, thread, name, kind, begin, end, args)
    engines = record.engines["engine"].tolist()
    for place, code in enumerate(engines):
        mine = np.flatnonzero(loop.updates["engine"] == code)
        if not len(mine):
            continue
        tid = thread + 1 + place
        yield from _named(updates, tid, f"engine {record.engines['name'][place]}")
        u = {name: values[mine] for name, values in loop.updates.items()}
        begin, end = microseconds(u["began_s"]).tolist(), microseconds(u["ended_s"]).tolist()
        for version, a, b in zip(u["version"].tolist(), begin, end, strict=True):
            args = {"version": version}
            yield _slice(updates, tid, f"version {version}", "update", a, b, args)
    for name, (began_s, ended_s) in (("rewards", loop.rewards), ("starts", loop.starts)):
        times, counts = under_way(began_s, ended_s)
        for ts, count in zip(microseconds(times).tolist(), counts.tolist(), strict=True):
            args = {"trajectories": int(count)}
            yield {"ph": "C", "pid": services, "name": name, "ts": ts, "args": args}


def _trainings(
    loop: LoopRecord, microseconds: ToMicroseconds
) -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Batches, and moves of GPUs to and from the trainer."""
    t, moves = loop.trainings, loop.moves
    begin, end = microseconds(t["began_s"]).tolist(), microseconds(t["ended_s"]).tolist()
    details = {
        "trajectories": t["trajectories"],
        "version": t["version"],
        "mean_staleness": np.round(t["mean_staleness"], 6),
        "most_staleness": t["most_staleness"],
    }
    columns = (t["batch"], *details.values())
    for a, b, batch, *known in zip(begin, end, *(c.tolist() for c in columns), strict=True):
        yield f"batch {batch}", "training", a, b, dict(zip(details, known, strict=True))
    begin, end = microseconds(moves["began_s"]).tolist(), microseconds(moves["ended_s"]).tolist()
    for role, a, b in zip(moves["role"], begin, end, strict=True):
        yield f"GPUs to {role}", "move", a, b, {}


def _named(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
    where = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index"}
    yield {**where, "args": {"sort_index": tid}}


def _slice(
    pid: int, tid: int, name: str, kind: str, begin: int, end: int, args: dict[str, Any]
) -> Event:
    where = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind}
    return {**where, "ts": begin, "dur": max(end - begin, 1), "args": args}
