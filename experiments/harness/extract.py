"""The kept figures of a run whose directory is removed: one small JSON for all experiments."""

from typing import Any

import numpy as np

from heddle.runs import Run
from heddle.runs.journal_columns import Journal
from heddle.runs.tables import engine_facts

QUANTILES = 101
"""Points of every kept distribution: 0 %, 1 %, ... 100 %."""

FIGURES = (
    "arrived",
    "makespan_s",
    "throughput_tok_s",
    "output_tokens",
    "steps",
    "completion_p50_s",
    "queueing_mean_s",
    "queueing_p99_s",
    "queueing_longest_s",
    "queueing_trajectory_mean_s",
    "tpot_mean_ms",
    "interference_factor",
    "prefix_hit",
    "prefix_hit_resumed",
    "utilisation",
    "migrations",
    "preemptions",
    "preemptions_policy",
    "preemptions_engine",
    "predictions",
    "predictions_late",
    "tool_s",
)


def extract(run: Run) -> dict[str, Any]:
    """Figures of a finished run, its distributions, and the story of its longest trajectory."""
    table = run.trajectories

    def column(name: str) -> Any:
        return np.asarray(table.column(name), np.float64)

    arrived, finished = column("arrived_s"), column("finished_s")
    done = finished - arrived.min()
    groups = table.column("group").to_numpy(zero_copy_only=False)
    _, member = np.unique(groups.astype(str), return_inverse=True)
    group_done, group_came = np.zeros(member.max() + 1), np.full(member.max() + 1, np.inf)
    np.maximum.at(group_done, member, finished)
    np.minimum.at(group_came, member, arrived)
    longest = int(np.argmax(column("output_tokens")))
    tools = np.asarray(run.steps.column("tool_s"), np.float64)
    called = ~np.asarray(run.steps.column("tool").is_null())
    journal = run.columns()
    return {
        **{name: run.summary[name] for name in FIGURES},
        "completion_s": _quantiles(done),
        "group_completion_s": _quantiles(group_done - group_came),
        "longest": {
            name: float(column(name)[longest])
            for name in (
                "output_tokens",
                "steps",
                "queueing_s",
                "engine_queued_s",
                "prefill_s",
                "decode_s",
                "tool_s",
            )
        }
        | {"done_s": float(done[longest])},
        "tool_mean_s": float(tools[called].mean()) if called.any() else 0.0,
        "migration_mean_s": _migration_s(journal),
        "tps": sorted(engine_facts(journal)["tp"].tolist(), reverse=True),
    }


def _quantiles(values: Any) -> list[float]:
    at = np.linspace(0.0, 1.0, QUANTILES)
    return [round(float(v), 3) for v in np.quantile(values, at)]


def _migration_s(journal: Journal) -> float | None:
    """Mean seconds of migrations that arrived, waiting for their engines included."""
    rows = journal.of("Migrate", "MigrationFinished")
    command = journal.words("kind").index("command")
    since: dict[int, float] = {}
    taken = []
    for trajectory, time_s, ok, began in zip(
        rows.codes("trajectory").tolist(),
        rows.floats("time_s").tolist(),
        rows.ints("ok").tolist(),
        (rows.codes("kind") == command).tolist(),
        strict=True,
    ):
        if began:
            since[trajectory] = time_s
            continue
        began_s = since.pop(trajectory, None)
        if ok and began_s is not None:
            taken.append(time_s - began_s)
    return float(np.mean(taken)) if taken else None
