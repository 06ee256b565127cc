"""Why one policy ends sooner than another: the rows of the page and what separates two of them.

A rollout lasts until its last trajectory ends, so the makespan is the sum of what that trajectory
spent its time on. The difference of two makespans is the sum of the differences of these parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from heddle.comparison.estimates import estimate
from heddle.reports.curves import time_within
from heddle.reports.page.facts import regime_of
from heddle.reports.page.verdict import verdict
from heddle.runs import Run
from heddle.runs.journal_columns import Bools, Floats, smallest
from heddle.runs.record import Record
from heddle.runs.tables import Dispatches

PARTS: Final = ("arrival", "waiting", "prefill", "decode", "tool", "lost", "rest")
"""Parts of the last trajectory's time: before its arrival, from runnable to prefill, on an engine,
in tools, in dispatches that an engine's failure ended, and whatever no event accounts for."""

FINE_BINS: Final = 4_000
BINS: Final = 400


@dataclass(frozen=True, slots=True)
class Last:
    """The trajectory that ends last."""

    name: str
    seconds: Mapping[str, float]
    """By `PARTS`; their sum is the makespan."""
    intervals: int
    """Output tokens without the first one of each dispatch, which its prefill makes."""


@dataclass(frozen=True, slots=True)
class Course:
    """How a run went. Integrals from the first arrival to each of `FINE_BINS + 1` equal times."""

    lasts_s: float
    last: Last | None
    """None of an RL loop, and of a run that did not finish."""
    gpu_s: Floats
    """GPU-seconds of engines with a dispatch."""
    decode_s: Floats
    """Seconds in decode, of all steps."""
    intervals: Floats
    """Tokens made in these, as `Last.intervals`."""


def course(record: Record) -> Course:
    """What a run contributes to the comparison of runs."""
    lasts_s = record.end_s - record.start_s
    edges = np.linspace(record.start_s, record.start_s + max(lasts_s, 1e-9), FINE_BINS + 1)
    d = record.dispatches
    ended_s = np.where(np.isnan(d.ended_s), record.end_s, d.ended_s)
    decodes = _decodes(d)
    end_s, decode_s = d.ended_s[decodes], d.decode_s[decodes]
    begin_s = np.maximum(end_s - decode_s, record.start_s)
    per_s = (d.output_tokens[decodes] - 1) / decode_s
    whole = record.loop is None and record.note is None
    return Course(
        lasts_s=lasts_s,
        last=_last(record) if whole else None,
        gpu_s=_gpu_seconds(record, ended_s, edges),
        decode_s=time_within(edges, begin_s, end_s),
        intervals=time_within(edges, begin_s, end_s, per_s),
    )


def _decodes(d: Dispatches) -> Bools:
    return (d.output_tokens >= 2) & (d.decode_s > 0) & ~np.isnan(d.ended_s)


def _gpu_seconds(record: Record, ended_s: Floats, edges: Floats) -> Floats:
    """Integral of the GPUs of engines with at least one dispatch, as `utilisation` counts them."""
    d = record.dispatches
    total = np.zeros(len(edges))
    order = np.argsort(d.engine.astype(smallest(d.engine)), kind="stable")
    engine, codes = d.engine[order], record.engines["engine"]
    first, after = (np.searchsorted(engine, codes, side) for side in ("left", "right"))
    for a, b, tp in zip(first, after, record.engines["tp"].tolist(), strict=True):
        if a < b:
            begin = d.dispatched_s[order[a:b]]
            in_time = np.argsort(begin, kind="stable")
            reach = np.maximum.accumulate(ended_s[order[a:b][in_time]])
            since = np.maximum(begin[in_time], np.append(-np.inf, reach[:-1]))
            total += tp * time_within(edges, np.minimum(since, reach), reach)
    return total


def _last(record: Record) -> Last:
    t, d = record.trajectories, record.dispatches
    row = int(np.argmax(t["finished_s"]))
    own = d.trajectory == row
    lost = own & d.lost
    seconds = {
        "arrival": t["arrived_s"][row] - record.start_s,
        "waiting": t["queueing_s"][row] + t["engine_queued_s"][row],
        "prefill": t["prefill_s"][row],
        "decode": t["decode_s"][row],
        "tool": t["tool_s"][row],
        "lost": (d.ended_s - d.dispatched_s)[lost].sum(),
    }
    known = {part: float(value) for part, value in seconds.items()}
    rest = record.end_s - record.start_s - sum(known.values())
    return Last(
        name=str(record.journal.trajectories[row]),
        seconds={**known, "rest": rest},
        intervals=int((d.output_tokens[own & _decodes(d)] - 1).sum()),
    )


def why(
    runs: Sequence[Run],
    labels: Sequence[str],
    courses: Sequence[Course],
    figures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Rows of runs that differ in their seed alone, and the reference against the best, as JSON.

    The reference is the row of the first run, the best the shortest other one. Neither is a run
    that did not finish, and the best was not shown the future, unless there is no other.
    """
    rows = [_row(members, label, runs, courses, figures) for members, label in _alike(runs, labels)]
    best = _best(rows)
    against = [rows[0]] if best is None else [rows[0], rows[best]]
    steps = _waterfall(*against) if len(against) == 2 else None
    return {
        "rows": rows,
        "best": best,
        "waterfall": steps,
        "verdict": verdict(against, steps),
        "curves": _curves([row["runs"] for row in rows], courses),
    }


def _alike(runs: Sequence[Run], labels: Sequence[str]) -> list[tuple[list[int], str]]:
    """Places of runs that differ in their seed alone, in the order of their first, with a name."""
    keys: list[Any] = []
    members: list[list[int]] = []
    for at, run in enumerate(runs):
        manifest = run.manifest
        loop = manifest.get("loop") or {}
        key = (
            *(manifest.get(name) for name in ("policy", "driver", "world", "history")),
            manifest.get("versions", {}).get("heddle"),
            manifest.get("git_commit"),
            run.status,
            {k: v for k, v in (loop.get("config") or {}).items() if k != "seed"},
            regime_of(run),
            run.config.cluster,
            run.config.policy,
        )
        seed = manifest["seed"]
        for known, own in zip(keys, members, strict=True):
            if known == key and all(runs[i].manifest["seed"] != seed for i in own):
                own.append(at)
                break
        else:
            keys.append(key)
            members.append([at])
    short = [labels[at].replace(f" s{runs[at].manifest['seed']}", "", 1) for at, *_ in members]
    unique = [
        s if short.count(s) == 1 else labels[own[0]] for s, own in zip(short, members, strict=True)
    ]
    seeded = len(runs) > len(members)
    named = unique if seeded else [labels[own[0]] for own in members]
    return list(zip(members, named, strict=True))


def _row(
    members: Sequence[int],
    label: str,
    runs: Sequence[Run],
    courses: Sequence[Course],
    figures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    lasts_s = [float(figures[at].get("makespan_s") or courses[at].lasts_s) for at in members]
    found = estimate(lasts_s)
    lasts = [last for at in members if (last := courses[at].last) is not None]
    return {
        "label": label,
        "runs": list(members),
        "seeds": [runs[at].manifest["seed"] for at in members],
        "each_s": lasts_s,
        "mean_s": found.mean,
        "ci95_s": found.ci95,
        "finished": all(runs[at].status == "finished" for at in members),
        "oracle": any(bool(runs[at].manifest.get("oracle")) for at in members),
        "summary": _means([figures[at] for at in members]),
        "last": _mean_last(lasts) if len(lasts) == len(members) else None,
    }


def _means(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of numbers; of anything else what all have in common."""
    if len(figures) == 1:
        return dict(figures[0])
    found: dict[str, Any] = {}
    for key in figures[0]:
        values = [each.get(key) for each in figures]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            found[key] = values[0] if len(set(values)) == 1 else fmean(values)  # type: ignore[arg-type]
        else:
            found[key] = values[0] if values.count(values[0]) == len(values) else None
    return found


def _mean_last(lasts: Sequence[Last]) -> dict[str, Any]:
    intervals = fmean(last.intervals for last in lasts)
    decode_s = fmean(last.seconds["decode"] for last in lasts)
    return {
        "names": list(dict.fromkeys(last.name for last in lasts)),
        "seconds": {part: fmean(last.seconds[part] for last in lasts) for part in PARTS},
        "intervals": intervals,
        "tpot_ms": 1e3 * decode_s / intervals if intervals else None,
        "each": [
            {"name": last.name, "seconds": dict(last.seconds), "intervals": last.intervals}
            for last in lasts
        ],
    }


def _best(rows: Sequence[Mapping[str, Any]]) -> int | None:
    others = [at for at in range(1, len(rows)) if rows[at]["finished"]]
    eligible = [at for at in others if not rows[at]["oracle"]] or others
    if not eligible or not rows[0]["finished"]:
        return None
    return min(eligible, key=lambda at: float(rows[at]["mean_s"]))


def _waterfall(
    reference: Mapping[str, Any], best: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Seconds by which each part of the last trajectory lengthens or shortens the makespan.

    Decode is split into the number of tokens and the time per token: with tokens `n` and seconds
    per token `p`, the difference of `n p` is the change of `n` at the mean `p` and that of `p` at
    the mean `n`.
    """
    if reference["last"] is None or best["last"] is None:
        return None
    a, b = reference["last"], best["last"]
    change = {part: b["seconds"][part] - a["seconds"][part] for part in PARTS}
    paces = [
        each["seconds"]["decode"] / each["intervals"] if each["intervals"] else 0.0
        for each in (a, b)
    ]
    tokens_s = (b["intervals"] - a["intervals"]) * fmean(paces)
    split = {"tokens": tokens_s, "tpot": change.pop("decode") - tokens_s}
    listed = ("arrival", "waiting", "prefill", "tokens", "tpot", "tool", "lost", "rest")
    return [{"part": part, "seconds": {**change, **split}[part]} for part in listed]


def _curves(rows: Sequence[Sequence[int]], courses: Sequence[Course]) -> dict[str, Any]:
    """Means over `BINS` equal times until the last end of any run, and over the runs of a row.

    `gpus`: of engines with a dispatch. `tpot_ms`: of the tokens made in that time, else None.
    """
    end_s = max(max(each.lasts_s for each in courses), 1e-9)
    edges = np.linspace(0.0, end_s, BINS + 1)
    width_s = end_s / BINS

    def within(own: Sequence[int], name: str) -> Floats:
        total = np.zeros(BINS)
        for at in own:
            times = np.linspace(0.0, max(courses[at].lasts_s, 1e-9), FINE_BINS + 1)
            total += np.diff(np.interp(edges, times, getattr(courses[at], name)))
        return total

    gpus, tpot_ms = [], []
    for own in rows:
        gpus.append(np.round(within(own, "gpu_s") / width_s / len(own), 4).tolist())
        decode_s, intervals = within(own, "decode_s"), within(own, "intervals")
        made = intervals > 1e-6
        pace = 1e3 * decode_s / np.where(made, intervals, 1.0)
        tpot_ms.append(
            [round(p, 4) if any_ else None for p, any_ in zip(pace.tolist(), made, strict=True)]
        )
    at = (edges[:-1] + width_s / 2).round(4).tolist()
    return {"at": at, "gpus": gpus, "tpot_ms": tpot_ms}
