"""Figures of a run, from its journal only. docs/run-directory.md defines each.

Nothing is measured while a run goes on: the same journal gives the same figures, with any driver.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from heddle.runs.journal_columns import Column, Journal
from heddle.runs.tables import (
    Bools,
    Columns,
    Dispatches,
    Floats,
    Ints,
    dispatches,
    engine_facts,
    step_columns,
    to_arrow,
    trajectory_columns,
    union_s,
)

SoloTpot: TypeAlias = Callable[[str, int, Floats], Floats]
"""Seconds per token of a step that runs alone, from GPU class, TP degree and tokens of context."""

OUTCOMES = ("completed", "truncated", "failed", "cancelled")
MIN_TPOT_TOKENS = 16
"""Shorter steps are no reference for the best time per token: a single iteration decides them."""
BLOCK_DISPATCHES = 250_000
"""Dispatches that are cut into steps at a time: memory for more than the figures need."""


class MetricsError(ValueError):
    """A journal with inconsistent trajectories; it gets no summary."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a finished run, and one row per trajectory."""

    trajectories: pa.Table
    summary: Mapping[str, Any]


def measure(
    journal: Journal,
    solo_tpot: SoloTpot | None = None,
    *,
    on_steps: Callable[[pa.Table], object] = lambda steps: None,
) -> Measured:
    """Cut a journal into tables and sum them up.

    `solo_tpot` is what the interference factor compares with; without it, the best time per token
    that the run itself saw on the same GPU class and TP degree. `on_steps` gets the rows of the
    steps, in parts.

    Raises:
        MetricsError: arrived trajectories are not completed, truncated, failed or cancelled.
    """
    engines = engine_facts(journal)
    trajectories, sample, counts = _cut(journal, engines, on_steps)
    counts["engine_failures"] = len(journal.of("EngineFailed"))
    journal = journal.words_alone()
    summary = _conserved(journal, trajectories, counts)
    summary |= _work(trajectories)
    summary |= _waiting(sample, trajectories)
    summary |= _speed(journal, sample, counts, engines, solo_tpot)
    summary |= _utilisation(sample, trajectories, engines)
    summary |= _decisions(counts)
    return Measured(to_arrow(journal, trajectories), summary)


def _cut(
    journal: Journal, engines: Mapping[str, Any], on_steps: Callable[[pa.Table], object]
) -> tuple[Columns, Columns, Counter[str]]:
    """Trajectories, samples and counts of a journal, which is cut in parts."""
    samples: defaultdict[str, Column] = defaultdict(Column)
    of_trajectories: defaultdict[str, Column] = defaultdict(Column)
    counts: Counter[str] = Counter()
    for block in journal.blocks(BLOCK_DISPATCHES):
        d = dispatches(block)
        steps = step_columns(block, d)
        on_steps(to_arrow(block, steps))
        of_block = trajectory_columns(block, steps)
        of_block["trajectory"] += counts["arrived"]
        for name, values in of_block.items():
            of_trajectories[name].add(values)
        prefilled = _prefilled_elsewhere(d, engines)
        for name, values in _samples(d, steps, _handed_over(d, prefilled)).items():
            samples[name].add(values)
        counts.update(_counts(block, d, prefilled))
    trajectories = {name: column.array() for name, column in of_trajectories.items()}
    return trajectories, {name: column.array() for name, column in samples.items()}, counts


def _prefilled_elsewhere(d: Dispatches, engines: Mapping[str, Any]) -> Bools:
    """Dispatches that made the first token of a step on an engine that only prefills.

    A step leaves such an engine as if it were preempted there.
    """
    return d.preempted & np.isin(d.engine, engines["engine"][engines["prefills_only"]])


def _handed_over(d: Dispatches, prefilled: Bools) -> Bools:
    """Dispatches that go on with a step after its prefill elsewhere: no prompt is new to them."""
    before = np.zeros(len(prefilled), np.bool_)
    before[1:] = prefilled[:-1]
    return before & ~d.first


def _samples(d: Dispatches, steps: Columns, handed_over: Bools) -> Columns:
    """What figures need of every step and dispatch."""
    timed = d.output_tokens >= 2
    output = d.output_tokens[timed]
    return {
        "queueing_s": steps["queueing_s"] + steps["engine_queued_s"],
        "engine_queued_s": steps["engine_queued_s"],
        "ttft_s": (d.engine_queued_s + d.prefill_s)[(d.output_tokens > 0) & ~handed_over],
        "decode_s": d.decode_s[timed],
        "intervals": output - 1,
        "context_tokens": d.context_tokens[timed] + output / 2.0,
        "decoded_at": d.engine[timed],
        "engine": d.engine,
        "dispatched_s": d.dispatched_s,
        "ended_s": d.ended_s,
    }


def _counts(journal: Journal, d: Dispatches, prefilled: Bools) -> dict[str, int]:
    """Whole numbers, which add up over parts of a journal."""
    known = (d.finished | d.preempted) & ~_handed_over(d, prefilled)
    again = known & ~((d.step == 0) & d.first)
    moved = journal.of("MigrationFinished")
    return {
        "arrived": len(journal.trajectories),
        "ended": len(journal.of("TrajectoryFinished")),
        "migrations": len(moved),
        "migrations_ok": int((moved.ints("ok") == 1).sum()),
        "migrated_kv_tokens": int(moved.ints("kv_tokens").sum()),
        "predictions": len(journal.of("Predict")),
        "dispatches": len(d.trajectory),
        "preempted": int((d.preempted & ~prefilled).sum()),
        "prefilled_elsewhere": int(prefilled.sum()),
        "recomputes": int(d.recomputes.sum()),
        "lost": int(d.lost.sum()),
        "cached_tokens": int(d.cached_tokens[known].sum()),
        "prompt_tokens": int(d.context_tokens[known].sum()),
        "cached_tokens_resumed": int(d.cached_tokens[again].sum()),
        "prompt_tokens_resumed": int(d.context_tokens[again].sum()),
        "predictions_in_time": _in_time(journal),
    }


def _conserved(
    journal: Journal, trajectories: Columns, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Count how trajectories ended; refuse a journal in which one is left over."""
    arrived, ends = counts["arrived"], counts["ended"]
    known = trajectories["outcome"][trajectories["outcome"] >= 0]
    times = dict(zip(journal.words("outcome"), np.bincount(known).tolist(), strict=False))
    outcomes = {outcome: times.get(outcome, 0) for outcome in OUTCOMES}
    if arrived != sum(outcomes.values()) or ends != arrived:
        said = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items())
        raise MetricsError(
            f"{arrived} trajectories arrived, but {said} and {ends} ends in all: "
            "the journal does not add up, so no summary is made of it"
        )
    return {"arrived": arrived, **outcomes, "journal_rows": journal.rows}


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


def _waiting(sample: Columns, trajectories: Columns) -> dict[str, Any]:
    """Queueing delay and time to first token."""
    per_trajectory = trajectories["queueing_s"] + trajectories["engine_queued_s"]
    longest = np.argmax(trajectories["output_tokens"]) if len(per_trajectory) else None
    return {
        **_spread("queueing", sample["queueing_s"], "_s"),
        "queueing_trajectory_mean_s": _mean(per_trajectory),
        "queueing_longest_s": None if longest is None else float(per_trajectory[longest]),
        "engine_queued_mean_s": _mean(sample["engine_queued_s"]),
        **_spread("ttft", sample["ttft_s"], "_s"),
    }


def _speed(
    journal: Journal,
    sample: Columns,
    counts: Mapping[str, int],
    engines: Mapping[str, Any],
    solo_tpot: SoloTpot | None,
) -> dict[str, Any]:
    """Time per output token, interference, and reuse of prefixes."""
    decode_s, intervals = sample["decode_s"], sample["intervals"]
    tpot_s = decode_s / intervals
    kinds = list(dict.fromkeys(engines["kind"]))
    kind_of = np.zeros(len(journal.words("engine")), np.int64)
    kind_of[engines["engine"]] = [kinds.index(kind) for kind in engines["kind"]]
    alone_s = _alone_s(sample, kinds, kind_of[sample["decoded_at"]], tpot_s, solo_tpot) * intervals
    return {
        **_spread("tpot", tpot_s * 1e3, "_ms"),
        "interference_factor": _share(decode_s.sum(), alone_s.sum()),
        "interference_reference": "profile" if solo_tpot is not None else "best_seen",
        "prefix_hit": _share(counts["cached_tokens"], counts["prompt_tokens"]),
        "prefix_hit_resumed": _share(
            counts["cached_tokens_resumed"], counts["prompt_tokens_resumed"]
        ),
    }


def _alone_s(
    sample: Columns,
    kinds: Sequence[tuple[str, int]],
    decoded_at: Ints,
    tpot_s: Floats,
    solo_tpot: SoloTpot | None,
) -> Floats:
    """Seconds per token of each dispatch of two tokens or more, had it run alone."""
    long = sample["intervals"] >= MIN_TPOT_TOKENS - 1
    alone = np.zeros(len(tpot_s))
    for number in np.unique(decoded_at).tolist():
        here = decoded_at == number
        if solo_tpot is not None:
            gpu, tp = kinds[number]
            alone[here] = solo_tpot(gpu, tp, sample["context_tokens"][here])
        else:
            best = tpot_s[here & long] if (here & long).any() else tpot_s[here]
            alone[here] = best.min()
    return alone


def _utilisation(
    sample: Columns, trajectories: Columns, engines: Mapping[str, Any]
) -> dict[str, Any]:
    """GPU-seconds with running steps, over all GPU-seconds."""
    if not len(trajectories["trajectory"]):
        return {"utilisation": None, "engines": 0}
    start, end = trajectories["arrived_s"].min(), trajectories["finished_s"].max()
    busy = alive = 0.0
    order = np.lexsort((sample["dispatched_s"], sample["engine"]))
    engine = sample["engine"][order]
    began, ended = sample["dispatched_s"][order], sample["ended_s"][order]
    first, after = (np.searchsorted(engine, engines["engine"], side) for side in ("left", "right"))
    for a, b, tp, ready_s, gone_s in zip(
        first, after, engines["tp"], engines["ready_s"], engines["gone_s"], strict=True
    ):
        busy += tp * union_s(began[a:b], ended[a:b])
        alive += tp * max(min(gone_s, end) - max(ready_s, start), 0.0)
    return {"utilisation": _share(busy, alive), "engines": len(engines["engine"])}


def _decisions(counts: Mapping[str, int]) -> dict[str, Any]:
    """Counts of the policy's actions and of failures."""
    return {
        "dispatches": counts["dispatches"],
        "migrations": counts["migrations"],
        "migrations_ok": counts["migrations_ok"],
        "migrated_kv_tokens": counts["migrated_kv_tokens"],
        "preemptions": counts["preempted"] + counts["recomputes"],
        "preemptions_policy": counts["preempted"],
        "preemptions_engine": counts["recomputes"],
        "prefilled_elsewhere": counts["prefilled_elsewhere"],
        "predictions": counts["predictions"],
        "predictions_late": counts["predictions"] - counts["predictions_in_time"],
        "engine_failures": counts["engine_failures"],
        "dispatches_lost": counts["lost"],
    }


def _in_time(journal: Journal) -> int:
    """Count answers of a prediction service that came before the tool of their step had ended."""
    answers = journal.of("Predicted")
    if not len(answers):
        return 0
    returned, finished = journal.of("ToolReturned"), journal.of("TrajectoryFinished")
    steps, returned_steps = answers.ints("step"), returned.ints("step")
    span = int(max(steps.max(), returned_steps.max(initial=0))) + 1
    # The last tool of a trajectory does not return: its end is the trajectory's.
    ended = np.full(len(journal.trajectories), journal.rows)
    ended[finished.codes("trajectory")] = finished.seq
    tool_ended = np.repeat(ended, span)
    tool_ended[returned.codes("trajectory") * span + returned_steps] = returned.seq
    return int((answers.seq < tool_ended[answers.codes("trajectory") * span + steps]).sum())


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
