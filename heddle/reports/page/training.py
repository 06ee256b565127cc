"""An RL loop's data on the page: trainings, weight updates, services, and figures by step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from heddle.reports.curves import from_zero, under_way
from heddle.runs.loop_record import LoopRecord, loop_steps
from heddle.runs.record import Record
from heddle.runs.tables import Floats, Ints

MAX_ROWS = 2_000
"""Steps in the table; beyond, every second one is left out, or more."""


def training(record: Record) -> dict[str, Any] | None:
    """What goes as JSON; None for a rollout. Seconds since the beginning."""
    loop = record.loop
    if loop is None:
        return None
    steps = loop_steps(record.run)
    every = -(-len(steps) // MAX_ROWS) or 1
    return {
        "rewards": _curve(record, loop.rewards),
        "starts": _curve(record, loop.starts),
        "moves": [
            [role, begin - record.start_s, end - record.start_s]
            for role, begin, end in zip(
                loop.moves["role"],
                loop.moves["began_s"].tolist(),
                np.nan_to_num(loop.moves["ended_s"], nan=record.end_s).tolist(),
                strict=True,
            )
        ],
        "staleness": [round(mean, 4) for mean in loop.trainings["mean_staleness"].tolist()],
        "steps": list(steps[::every]),
        "steps_in_all": len(steps),
    }


def training_columns(
    loop: LoopRecord, ticks: Callable[[Floats], Any], place: Ints, end_s: float
) -> dict[str, dict[str, Any]]:
    """Its tables of columns."""
    t, u = loop.trainings, loop.updates

    def ended(values: Floats) -> Any:
        return ticks(np.where(np.isnan(values), end_s, values))

    return {
        "trainings": {
            "batch": t["batch"].astype(np.uint32),
            "began": ticks(t["began_s"]),
            "ended": ended(t["ended_s"]),
            "trajectories": t["trajectories"].astype(np.uint32),
            "version": t["version"].astype(np.uint32),
            "most_staleness": t["most_staleness"].astype(np.uint32),
        },
        "updates": {
            "engine": place[u["engine"]].astype(np.uint16),
            "version": u["version"].astype(np.uint32),
            "began": ticks(u["began_s"]),
            "ended": ended(u["ended_s"]),
        },
    }


def _curve(record: Record, intervals: tuple[Floats, Floats]) -> dict[str, list[float]]:
    """How many are under way, from the beginning on."""
    times, counts = under_way(*intervals)
    x, y = from_zero((times - record.start_s, counts))
    return {"x": np.round(x, 4).tolist(), "y": y.tolist()}
