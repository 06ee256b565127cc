"""Figures of a run, from its journal only. docs/run-directory.md defines each.

Nothing is measured while a run goes on: the same journal gives the same figures, with any driver.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from heddle.runs.tables import (
    Columns,
    Dispatches,
    Floats,
    Ints,
    Journal,
    dispatches,
    engine_facts,
    step_columns,
    to_arrow,
    trajectory_columns,
    union_s,
)

SoloTpot: TypeAlias = Callable[[int, Floats], Floats]
"""Seconds per token of a step that runs alone, from TP degree and tokens of context."""

OUTCOMES = ("completed", "truncated", "failed", "cancelled")
MIN_TPOT_TOKENS = 16
"""Shorter steps are no reference for the best time per token: a single iteration decides them."""


class MetricsError(ValueError):
    """A journal with inconsistent trajectories; it gets no summary."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Tables and summary of a finished run."""

    steps: pa.Table
    trajectories: pa.Table
    summary: Mapping[str, Any]


def measure(table: pa.Table, solo_tpot: SoloTpot | None = None) -> Measured:
    """Cut a journal into tables and sum them up.

    `solo_tpot` is what the interference factor compares with; without it, the best time per token
    that the run itself saw at the same TP degree.

    Raises:
        MetricsError: arrived trajectories are not completed, truncated, failed or cancelled.
    """
    journal = Journal(table)
    d = dispatches(journal)
    steps = step_columns(journal, d)
    trajectories = trajectory_columns(journal, steps)
    summary = _conserved(journal, trajectories)
    summary |= _work(trajectories)
    summary |= _waiting(d, steps, trajectories)
    summary |= _speed(journal, d, solo_tpot)
    summary |= _engines(journal, d, trajectories)
    summary |= _decisions(journal, d)
    return Measured(to_arrow(journal, steps), to_arrow(journal, trajectories), summary)


def _conserved(journal: Journal, trajectories: Columns) -> dict[str, Any]:
    """Count how trajectories ended; refuse a journal in which one is left over."""
    arrived = len(trajectories["trajectory"])
    words = journal.words("outcome")
    ended = [words[code] for code in trajectories["outcome"].tolist() if code >= 0]
    counts = {outcome: ended.count(outcome) for outcome in OUTCOMES}
    left = arrived - sum(counts.values())
    ends = len(journal.rows_of("TrajectoryFinished"))
    if left or ends != arrived:
        said = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        raise MetricsError(
            f"{arrived} trajectories arrived, but {said} and {ends} ends in all: "
            "the journal does not add up, so no summary is made of it"
        )
    return {"arrived": arrived, **counts, "journal_rows": journal.rows}


def _work(trajectories: Columns) -> dict[str, Any]:
    """Makespan, throughput and totals."""
    start = float(trajectories["arrived_s"].min()) if len(trajectories["arrived_s"]) else 0.0
    end = float(trajectories["finished_s"].max()) if len(trajectories["arrived_s"]) else 0.0
    makespan = end - start
    tokens = int(trajectories["output_tokens"].sum())
    lasting = trajectories["finished_s"] - trajectories["arrived_s"]
    return {
        "makespan_s": makespan,
        "throughput_tok_s": tokens / makespan if makespan > 0 else None,
        "output_tokens": tokens,
        "steps": int(trajectories["steps"].sum()),
        **_spread("completion", trajectories["finished_s"] - start, "_s"),
        **_spread("duration", lasting, "_s"),
        "tool_s": float(trajectories["tool_s"].sum()),
    }


def _waiting(d: Dispatches, steps: Columns, trajectories: Columns) -> dict[str, Any]:
    """Queueing delay and time to first token."""
    queueing = steps["queueing_s"] + steps["engine_queued_s"]
    per_trajectory = trajectories["queueing_s"] + trajectories["engine_queued_s"]
    answered = d.output_tokens > 0
    ttft = (d.engine_queued_s + d.prefill_s)[answered]
    longest = np.argmax(trajectories["output_tokens"]) if len(per_trajectory) else None
    return {
        **_spread("queueing", queueing, "_s"),
        "queueing_trajectory_mean_s": _mean(per_trajectory),
        "queueing_longest_s": None if longest is None else float(per_trajectory[longest]),
        "engine_queued_mean_s": _mean(steps["engine_queued_s"]),
        **_spread("ttft", ttft, "_s"),
    }


def _speed(journal: Journal, d: Dispatches, solo_tpot: SoloTpot | None) -> dict[str, Any]:
    """Time per output token, interference, and reuse of prefixes."""
    timed = d.output_tokens >= 2
    intervals = d.output_tokens[timed] - 1
    decode_s = d.decode_s[timed]
    tpot_s = decode_s / intervals
    alone_s = _alone_s(journal, d, timed, tpot_s, solo_tpot) * intervals
    known = d.finished | d.preempted
    again = known & ~((d.step == 0) & d.first)
    return {
        **_spread("tpot", tpot_s * 1e3, "_ms"),
        "interference_factor": _share(decode_s.sum(), alone_s.sum()),
        "interference_reference": "profile" if solo_tpot is not None else "best_seen",
        "prefix_hit": _share(d.cached_tokens[known].sum(), d.context_tokens[known].sum()),
        "prefix_hit_resumed": _share(d.cached_tokens[again].sum(), d.context_tokens[again].sum()),
    }


def _alone_s(
    journal: Journal, d: Dispatches, timed: Any, tpot_s: Floats, solo_tpot: SoloTpot | None
) -> Floats:
    """Seconds per token of each timed dispatch, had it run alone on its engine."""
    tp_of = _by_engine(journal, "tp")
    tps = tp_of[d.engine[timed]]
    context = d.context_tokens[timed] + d.output_tokens[timed] / 2.0
    long = d.output_tokens[timed] >= MIN_TPOT_TOKENS
    alone = np.zeros(len(tpot_s))
    for tp in np.unique(tps).tolist():
        here = tps == tp
        if solo_tpot is not None:
            alone[here] = solo_tpot(tp, context[here])
        else:
            sample = tpot_s[here & long] if (here & long).any() else tpot_s[here]
            alone[here] = sample.min()
    return alone


def _by_engine(journal: Journal, fact: str) -> Ints:
    """One fact of each engine, indexed by engine code."""
    facts = engine_facts(journal)
    values = np.zeros(len(journal.words("engine")), np.int64)
    values[facts["engine"]] = facts[fact]
    return values


def _engines(journal: Journal, d: Dispatches, trajectories: Columns) -> dict[str, Any]:
    """GPU-seconds with running steps, over all GPU-seconds."""
    if not len(trajectories["trajectory"]):
        return {"utilisation": None, "engines": 0}
    start, end = trajectories["arrived_s"].min(), trajectories["finished_s"].max()
    facts = engine_facts(journal)
    busy = alive = 0.0
    order = np.lexsort((d.dispatched_s, d.engine))
    engine, began, ended = d.engine[order], d.dispatched_s[order], d.ended_s[order]
    first, after = (np.searchsorted(engine, facts["engine"], side) for side in ("left", "right"))
    for a, b, tp, ready_s, gone_s in zip(
        first, after, facts["tp"], facts["ready_s"], facts["gone_s"], strict=True
    ):
        busy += tp * union_s(began[a:b], ended[a:b])
        alive += tp * max(min(gone_s, end) - max(ready_s, start), 0.0)
    return {"utilisation": _share(busy, alive), "engines": len(facts["engine"])}


def _decisions(journal: Journal, d: Dispatches) -> dict[str, Any]:
    """Counts of the policy's actions and of failures."""
    moved = journal.rows_of("MigrationFinished")
    predictions = len(journal.rows_of("Predict"))
    ok = int((journal.ints("ok", moved) == 1).sum())
    recomputes = int(d.recomputes.sum())
    preempted = int(d.preempted.sum())
    return {
        "dispatches": len(d.trajectory),
        "migrations": len(moved),
        "migrations_ok": ok,
        "migrated_kv_tokens": int(journal.ints("kv_tokens", moved).sum()),
        "preemptions": preempted + recomputes,
        "preemptions_policy": preempted,
        "preemptions_engine": recomputes,
        "predictions": predictions,
        "predictions_late": predictions - _in_time(journal),
        "engine_failures": len(journal.rows_of("EngineFailed")),
        "dispatches_lost": int(d.lost.sum()),
    }


def _in_time(journal: Journal) -> int:
    """Count answers of a prediction service that came before the tool of their step had ended."""
    answers = journal.rows_of("Predicted")
    if not len(answers):
        return 0
    returned, finished = journal.rows_of("ToolReturned"), journal.rows_of("TrajectoryFinished")
    span = int(journal.ints("step", np.concatenate((answers, returned))).max(initial=0)) + 1

    def keys(rows: Ints) -> Ints:
        keys: Ints = journal.codes("trajectory", rows) * span + journal.ints("step", rows)
        return keys

    # The last tool of a trajectory does not return: its end is the trajectory's.
    ended = np.full(len(journal.trajectories), journal.rows)
    ended[journal.codes("trajectory", finished)] = finished
    tool_ended = np.repeat(ended, span)
    tool_ended[keys(returned)] = returned
    return int((answers < tool_ended[keys(answers)]).sum())


def _spread(name: str, values: Any, unit: str) -> dict[str, float | None]:
    """Mean, median and 99th percentile (linear between ranks)."""
    if not len(values):
        return {f"{name}_{what}{unit}": None for what in ("mean", "p50", "p99")}
    p50, p99 = np.percentile(values, [50.0, 99.0])
    return {
        f"{name}_mean{unit}": _mean(values),
        f"{name}_p50{unit}": float(p50),
        f"{name}_p99{unit}": float(p99),
    }


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole > 0 else None
