"""A measured time as the sum of its parts, where only engines were observed."""

import numpy as np

from heddle.diagnosis.intervals import requests_over_time, samples
from heddle.diagnosis.parts import BINS, CriticalPath, EngineTime, Step
from heddle.reports.curves import mean_within
from heddle_trace.observed.columns import ObservedSteps

COUNTED = ("queue", "prefill", "decode")


def diagnose_engines(
    seen: ObservedSteps,
) -> tuple[list[Step], list[CriticalPath], list[EngineTime]]:
    """Time with requests is shared by what requests took; without any, engines stalled or idled.

    Between two samples an engine has the requests of the first.
    """
    times, busy, queued = requests_over_time(seen)
    length, busy, queued = np.diff(times), busy[:-1], queued[:-1]
    took = {part: _total(seen, part) for part in COUNTED}
    total_s, served_s = float(length.sum()), float(length[busy > 0].sum())
    if not took["prefill"] + took["decode"]:
        took["llm"] = float((busy * length).sum())
    all_s = sum(took.values())
    parts = {part: served_s * each / all_s for part, each in took.items() if each > 0.0}
    parts["stalled"] = float(length[(busy == 0) & (queued > 0)].sum())
    parts["no_request"] = float(length[(busy == 0) & (queued == 0)].sum())
    parts = {part: seconds for part, seconds in parts.items() if seconds > 0.0}
    parts["unaccounted"] = total_s - sum(parts.values())
    step = Step(start_s=float(times[0]), end_s=float(times[-1]), parts=parts)
    return [step], [], sampled_engines(seen, step)


def sampled_engines(seen: ObservedSteps, *steps: Step) -> list[EngineTime]:
    """Times of the engines whose metrics were sampled, over all steps."""
    begun_s, end_s = steps[0].start_s, steps[-1].end_s
    edges = np.linspace(begun_s, end_s, BINS + 1)
    times, _, queued = requests_over_time(seen)
    queued_s = np.diff(np.clip(times, begun_s, end_s)) * (queued[:-1] > 0)
    queued_s = np.append(0.0, np.cumsum(queued_s))
    found = []
    for name, at_s, running, waiting in samples(seen):
        now, within = running[:-1], np.clip(at_s, begun_s, end_s)
        busy_s = float(np.diff(within)[now > 0].sum())
        idle_s = float(np.diff(np.interp(at_s, times, queued_s))[now == 0].sum())
        means = (mean_within(edges, within[:-1], within[1:], n[:-1]) for n in (running, waiting))
        found.append(EngineTime.of(name, busy_s, idle_s, edges, *means))
    return found


def _total(seen: ObservedSteps, part: str) -> float:
    column = seen.engines.get(f"{part}_s")
    return 0.0 if column is None else float(np.nansum(column.values))
