"""What verl's tables of phases show although they publish no tokens: ratios between rows.

Two things: how much slower a trainer is beside sleeping engines, and how its time falls with GPUs.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heddle_calibrate.serving.published_rows import read_lines
from heddle_sim.trained_models import MODELS
from heddle_sim.training import Backend, TrainingProfile
from tools.profiles.training_rows import COLUMNS, model_name

MINI_BATCHES = 16
"""Optimizer steps in each of verl's update_actor phases (docs/advance/fully_async.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRow:
    """One update_actor phase."""

    line: int
    run: str
    """Model as its document names it."""
    model: str
    gpu: str
    backend: str
    gpus: int
    """That train."""
    colocated: bool
    seconds: float


def read_actor_rows(path: Path) -> list[ActorRow]:
    """Read the update_actor rows whose framework names its back end."""
    rows = []
    for line in read_lines(path, COLUMNS):
        model = model_name(line["model"])
        framework = line["framework"].lower()
        backend = next((one for one in ("fsdp", "megatron") if one in framework), None)
        if line["phase"] != "update_actor" or model is None or backend is None:
            continue
        split = re.search(r"(\d+):(\d+)", line["parallelism"])
        gpus = float(split.group(1)) if split else line.positive("gpus")
        seconds = line.positive("step_s")
        if gpus is None or seconds is None:
            continue
        rows.append(
            ActorRow(
                line=line.number,
                run=line["model"],
                model=model,
                gpu=line["gpu"].lower(),
                backend=backend,
                gpus=int(gpus),
                colocated=split is None,
                seconds=seconds,
            )
        )
    return rows


def colocated_pairs(rows: list[ActorRow]) -> dict[str, list[float]]:
    """Seconds of a trainer with GPUs of its own over colocated ones, on as many GPUs, by back end.

    Response lengths may differ within a pair: they are not published.
    """
    apart = {(r.run, r.backend, r.gpus): r.seconds for r in rows if not r.colocated}
    pairs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        key = (row.run, row.backend, row.gpus)
        if row.colocated and key in apart:
            pairs[row.backend].append(apart[key] / row.seconds)
    return dict(pairs)


def scaling_errors(rows: list[ActorRow], profile: TrainingProfile) -> dict[int, float]:
    """Relative errors over GPUs, of trainers with GPUs of their own, by the line of the row.

    The work, in GPU-seconds, is the only unknown of a run and set from its rows, so what remains
    tests the fixed part against the rest. Runs of one row are left out.
    """
    runs: dict[tuple[str, str], list[ActorRow]] = defaultdict(list)
    for row in rows:
        if not row.colocated:
            runs[row.run, row.backend].append(row)
    errors: dict[int, float] = {}
    for of_run in runs.values():
        if len(of_run) < 2:
            continue
        fixed = [_fixed_s(row, profile) for row in of_run]
        trials = np.geomspace(1, 1e6, 2001)
        logs = [
            [math.log((f + work / r.gpus) / r.seconds) for r, f in zip(of_run, fixed, strict=True)]
            for work in trials
        ]
        best = min(logs, key=lambda found: float(np.square(found).sum()))
        errors |= {r.line: math.exp(one) - 1 for r, one in zip(of_run, best, strict=True)}
    return errors


def _fixed_s(row: ActorRow, profile: TrainingProfile) -> float:
    backend: Backend = "fsdp" if row.backend == "fsdp" else "megatron"
    one = profile.collectives_s(MODELS[row.model], gpu=row.gpu, gpus=row.gpus, backend=backend)
    return MINI_BATCHES * one
