"""A run as trace events: the JSON that the Perfetto UI and chrome://tracing open.

The format is the Trace Event Format of Chromium's tracing: an engine is a process, each of its
slots a thread with a slice for each dispatch and slices for queue, prefill and decode in it;
migrations are slices of their own, tied by flow events to the steps before and after; batch, KV
and queue are counters of their engine. An RL loop has its trainer, weight updates and services
beside (`perfetto_loop`). Times are microseconds since the first arrival, or the loop's beginning.
"""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np

from heddle.reports.curves import under_way
from heddle.reports.perfetto_loop import loop_events
from heddle.reports.sample import ShownEngines
from heddle.runs.record import Record, slots
from heddle.runs.tables import Floats, Ints

Event: TypeAlias = dict[str, Any]

ROLLOUT, MIGRATIONS, FIRST_ENGINE = 1, 2, 3
"""Process numbers; engines count on from the last."""
_US = 1e6


def trace_events(record: Record, shown: ShownEngines | None = None, *, packed: bool) -> bytes:
    """Return the file, gzip-compressed if `packed`; equal runs give equal bytes.

    Of a run that is too large, `shown` has the engines to show; active trajectories count all.
    """
    manifest = record.run.manifest
    note = None if shown is None else shown.note
    if shown is not None and note is not None:
        record = _of_engines(record, shown.engines)
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": str(manifest.get("name", record.run.path.name)),
            "policy": str(manifest["policy"]),
            "seed": manifest["seed"],
            "trace": str(manifest["trace"]["name"]),
            "status": record.run.status,
            **({} if note is None else {"sample": note}),
        },
        "traceEvents": list(_events(record, note)),
    }
    text = msgspec.json.encode(document)
    return gzip.compress(text, compresslevel=6, mtime=0) if packed else text


@dataclass(frozen=True, slots=True)
class _Tracks:
    """Numbers of processes and threads: unique, also between processes and threads.

    A reader takes a thread with the number of a process for the first thread of that process.
    """

    pid: Ints
    """By engine code."""
    tid: Ints
    """Of the first slot, by engine code."""
    slots: Ints
    """How many slots it used, by engine code."""
    lane: Ints
    """Of each migration: a lane in which no other is under way."""
    lane_tid: int


def _tracks(record: Record) -> _Tracks:
    codes, count = record.engines["engine"], len(record.journal.words("engine"))
    pid, used = np.zeros(count, np.int64), np.zeros(count, np.int64)
    pid[codes] = FIRST_ENGINE + np.arange(len(codes))
    np.maximum.at(used, record.dispatches.engine, record.slot + 1)
    tid = FIRST_ENGINE + len(codes) + np.cumsum(used) - used
    m = record.migrations
    lane = slots(np.zeros(len(m["ok"]), np.int64), m["began_s"], m["ended_s"])
    after = FIRST_ENGINE + len(codes) + int(used.sum())
    return _Tracks(pid=pid, tid=tid, slots=used, lane=lane, lane_tid=after)


def _of_engines(record: Record, shown: Ints) -> Record:
    """The record of what ran on some engines, and of what moved to or from them."""
    engines = {
        name: [values[at] for at in shown.tolist()] if isinstance(values, list) else values[shown]
        for name, values in record.engines.items()
    }
    d, m, r = record.dispatches, record.migrations, record.reports
    codes = engines["engine"]
    ran = np.flatnonzero(np.isin(d.engine, codes))
    moved = np.isin(m["source"], codes) | np.isin(m["target"], codes)
    reported = np.isin(r["engine"], codes)
    return replace(
        record,
        dispatches=d.part(ran),
        engines=engines,
        migrations={name: values[moved] for name, values in m.items()},
        reports={name: values[reported] for name, values in r.items()},
    )


def _events(record: Record, note: str | None) -> Iterator[Event]:
    tracks = _tracks(record)
    yield from _names(record, tracks, note)
    yield from _steps(record, tracks)
    yield from _counters(record, tracks)
    yield from _migrations(record, tracks)
    yield from _engines(record, tracks)
    if record.loop is not None:
        lanes = int(tracks.lane.max(initial=-1)) + 1
        first = tracks.lane_tid + lanes
        yield from loop_events(record, record.loop, first, partial(_us, record))


def _names(record: Record, tracks: _Tracks, note: str | None) -> Iterator[Event]:
    """Name the tracks and put them in order."""
    yield from _process(ROLLOUT, "rollout" if note is None else f"rollout ({note})")
    yield from _process(MIGRATIONS, "migrations")
    engines = record.engines
    for name, label, code in zip(
        engines["name"], engines["label"], engines["engine"].tolist(), strict=True
    ):
        pid, first, used = (int(of[code]) for of in (tracks.pid, tracks.tid, tracks.slots))
        yield from _process(pid, f"engine {name} ({label})")
        yield from _threads(pid, first, "slot", used)
    lanes = int(tracks.lane.max(initial=-1)) + 1
    yield from _threads(MIGRATIONS, tracks.lane_tid, "migration", lanes)


def _process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}


def _threads(pid: int, first: int, name: str, count: int) -> Iterator[Event]:
    width = len(str(count - 1))
    for n in range(count):
        where = {"pid": pid, "tid": first + n}
        args = {"name": f"{name} {n:0{width}}"}
        yield {"ph": "M", **where, "name": "thread_name", "args": args}
        yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": n}}


def _us(record: Record, time_s: Floats) -> Ints:
    """Microseconds since the first arrival; the end of the record for what has no end.

    Whole ones: readers turn fractions into nanoseconds by cutting, and what follows without a gap
    would then begin before its turn.
    """
    known = np.where(np.isnan(time_s), record.end_s, time_s)
    return np.rint((known - record.start_s) * _US).astype(np.int64)


def _steps(record: Record, tracks: _Tracks) -> Iterator[Event]:
    """A slice for each dispatch, its parts within it, and a mark where it was preempted."""
    d, words = record.dispatches, record.journal.trajectories
    began = _us(record, d.dispatched_s)
    ended = np.maximum(_us(record, d.ended_s), began + 1)
    prefill = np.minimum(_us(record, d.dispatched_s + d.engine_queued_s), ended)
    decode = np.minimum(_us(record, d.dispatched_s + d.engine_queued_s + d.prefill_s), ended)
    timed = ~(d.lost | np.isnan(d.ended_s))
    how = np.select([d.lost, d.preempted, d.finished], ["lost", "preempted", "finished"], "running")
    details = {
        "step": d.step,
        "end": how,
        "waited_s": np.round(np.nan_to_num(d.dispatched_s - d.runnable_s), 6),
        "prompt_tokens": d.context_tokens,
        "cached_tokens": d.cached_tokens,
        "output_tokens": d.output_tokens,
        "recomputes": d.recomputes,
    }
    places = (d.trajectory, tracks.pid[d.engine], tracks.tid[d.engine] + record.slot)
    columns = (*places, began, prefill, decode, ended, timed, *details.values())
    for code, pid, tid, a, b, c, e, has_parts, *known in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        where = {"pid": pid, "tid": tid}
        args = {"trajectory": words[code], **dict(zip(details, known, strict=True))}
        step, end = args["step"], args["end"]
        yield {**where, **_slice(f"{words[code]} {step}", "step", a, e), "args": args}
        if has_parts:
            parts = (("queued", a, b), ("prefill", b, c), ("decode", c, e))
            yield from ({**where, **_slice(n, n, f, t)} for n, f, t in parts if t > f)
        if end in ("preempted", "lost"):
            # Just before the end, or a reader may tie it to what follows in the slot.
            yield {**where, "ph": "i", "s": "t", "name": end, "cat": end, "ts": e - 1}


def _slice(name: str, kind: str, from_us: int, until_us: int) -> Event:
    return {"ph": "X", "name": name, "cat": kind, "ts": from_us, "dur": until_us - from_us}


def _counters(record: Record, tracks: _Tracks) -> Iterator[Event]:
    """Batch and queue from what was dispatched, KV from what engines reported, and the whole."""
    d = record.dispatches
    pids = tracks.pid[d.engine]
    running_s = np.minimum(d.dispatched_s + d.engine_queued_s, np.nan_to_num(d.ended_s, nan=np.inf))
    for pid in np.unique(pids).tolist():
        mine = pids == pid
        yield from _levels(record, (pid, "batch", "steps"), running_s[mine], d.ended_s[mine])
        waits = mine & (running_s > d.runnable_s)
        yield from _levels(record, (pid, "queue", "steps"), d.runnable_s[waits], running_s[waits])
    r = record.reports
    for pid, ts, used in zip(
        tracks.pid[r["engine"]].tolist(),
        _us(record, r["time_s"]).tolist(),
        r["kv_used_tokens"].tolist(),
        strict=True,
    ):
        yield {"ph": "C", "pid": pid, "name": "KV", "ts": ts, "args": {"tokens": used}}
    t = record.trajectories
    yield from _levels(record, (ROLLOUT, "active", "trajectories"), t["arrived_s"], t["finished_s"])


def _levels(
    record: Record, track: tuple[int, str, str], from_s: Floats, until_s: Floats
) -> Iterator[Event]:
    """How many of the intervals hold each time, whenever it changes; a track has a unit."""
    pid, name, unit = track
    times, counts = under_way(from_s, until_s)
    for ts, count in zip(_us(record, times).tolist(), counts.tolist(), strict=True):
        yield {"ph": "C", "pid": pid, "name": name, "ts": ts, "args": {unit: int(count)}}


def _migrations(record: Record, tracks: _Tracks) -> Iterator[Event]:
    """A slice for each migration, and a flow from the step before it to the step after it."""
    m, d = record.migrations, record.dispatches
    names = [*record.journal.words("engine"), ""]  # the last answers to no code
    began, ended = _us(record, m["began_s"]), _us(record, m["ended_s"])
    pids, tids = tracks.pid[d.engine], tracks.tid[d.engine] + record.slot
    from_us = _us(record, d.dispatched_s)
    until_us = np.maximum(_us(record, d.ended_s), from_us + 1)
    first: Any = np.searchsorted(d.trajectory, m["trajectory"], side="left")
    after: Any = np.searchsorted(d.trajectory, m["trajectory"], side="right")
    for k, lane in enumerate(tracks.lane.tolist()):
        source, target = int(m["source"][k]), int(m["target"][k])
        where = {"pid": MIGRATIONS, "tid": tracks.lane_tid + lane}
        begin, end = int(began[k]), max(int(ended[k]), int(began[k]) + 1)
        name = record.journal.trajectories[int(m["trajectory"][k])]
        args = {
            "trajectory": name,
            "source": names[source],
            "target": names[target],
            "kv_tokens": int(m["kv_tokens"][k]),
            "ok": bool(m["ok"][k]),
        }
        yield {**where, **_slice(name, "migration", begin, end), "args": args}
        at = int(first[k]) + int(
            np.searchsorted(d.dispatched_s[first[k] : after[k]], m["began_s"][k], side="right")
        )
        flow = {"name": "migration", "cat": "migration", "id": k + 1}
        before = at - 1
        if before < first[k] or d.engine[before] != source:
            continue  # it was moved before it had run there
        out = {"pid": int(pids[before]), "tid": int(tids[before])}
        leaves = min(int(until_us[before]) - 1, begin)
        yield {**flow, **out, "ph": "s", "ts": leaves}
        moved = at < after[k] and d.engine[at] == target
        yield {**flow, **where, "ph": "t" if moved else "f", "bp": "e", "ts": begin}
        if moved:
            into = {"pid": int(pids[at]), "tid": int(tids[at])}
            yield {**flow, **into, "ph": "f", "bp": "e", "ts": max(int(from_us[at]), begin)}


def _engines(record: Record, tracks: _Tracks) -> Iterator[Event]:
    """When engines came and went, and when a plan was there."""
    e = record.engines
    pids, tids = tracks.pid[e["engine"]].tolist(), tracks.tid[e["engine"]].tolist()
    ready_us, gone_s = _us(record, e["ready_s"]).tolist(), e["gone_s"].tolist()
    for pid, tid, ready, gone, failed in zip(
        pids, tids, ready_us, gone_s, e["failed"], strict=True
    ):
        mark = {"ph": "i", "s": "p", "pid": pid, "tid": tid, "cat": "engine"}
        yield {**mark, "name": "ready", "ts": max(ready, 0)}
        if np.isfinite(gone):
            at = int(_us(record, np.array([gone]))[0])
            yield {**mark, "name": "failed" if failed else "stopped", "ts": at}
    solved = record.journal.of("PlanSolved").floats("time_s")
    for at in _us(record, solved).tolist():
        mark = {"ph": "i", "s": "p", "pid": ROLLOUT, "tid": ROLLOUT, "cat": "plan"}
        yield {**mark, "name": "plan solved", "ts": at}
