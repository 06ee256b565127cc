"""What verl's tables of phases show although they publish no tokens: ratios between rows.

Two things: how much slower a trainer is beside sleeping engines, and how its time falls with GPUs.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heddle_calibrate.serving.published_rows import read_lines
from heddle_sim.trained_models import trained_model
from heddle_sim.training import Backend, TrainingProfile
from tools.profiles.training_rows import COLUMNS, document, model_name

MINI_BATCHES = 16
"""Optimizer steps in each of verl's update_actor phases (docs/advance/fully_async.md)."""


PHASES = ("update_actor", "old_logprob")
SAME_BATCH = "one-step-off"
"""Its colocated and separate runs train one batch each step, of the same samples' lengths; pages of
fully asynchronous runs do not publish lengths, which differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRow:
    """One phase of a trainer."""

    line: int
    source: str
    run: str
    """Model as its document names it."""
    phase: str
    model: str
    gpu: str
    backend: str
    gpus: int
    """That train."""
    colocated: bool
    seconds: float


def read_actor_rows(*paths: Path) -> list[ActorRow]:
    """Read the rows of `PHASES` whose framework names its back end."""
    rows = []
    for line in (line for path in paths for line in read_lines(path, COLUMNS)):
        model = model_name(line["model"])
        framework = line["framework"].lower()
        backend = next((one for one in ("fsdp", "megatron") if one in framework), None)
        if line["phase"] not in PHASES or model is None or backend is None:
            continue
        split = re.search(r"(\d+):\d+|(\d+) train \+", line["parallelism"])
        gpus = float(split.group(1) or split.group(2)) if split else line.positive("gpus")
        seconds = line.positive("step_s")
        if gpus is None or seconds is None:
            continue
        rows.append(
            ActorRow(
                line=line.number,
                source=document(line["source"]),
                run=line["model"],
                phase=line["phase"],
                model=model,
                gpu=line["gpu"].lower(),
                backend=backend,
                gpus=int(gpus),
                colocated=split is None,
                seconds=seconds,
            )
        )
    return rows


def colocated_pairs(rows: list[ActorRow], sources: Collection[str]) -> dict[str, list[float]]:
    """GPU-seconds of a trainer with GPUs of its own over colocated ones, by back end.

    `sources`: documents whose two runs train the same batches. The little that collectives add
    does not fall with GPUs, and is left in.
    """
    pairs: dict[str, list[float]] = defaultdict(list)
    for own, shared in itertools.product(rows, rows):
        same = (own.source, own.backend, own.phase) == (shared.source, shared.backend, shared.phase)
        if same and own.source in sources and shared.colocated and not own.colocated:
            pairs[own.backend].append(own.seconds * own.gpus / (shared.seconds * shared.gpus))
    return dict(pairs)


def same_batches(*paths: Path) -> set[str]:
    """Documents whose frameworks are colocated and one-step-off."""
    lines = (line for path in paths for line in read_lines(path, COLUMNS))
    return {document(line["source"]) for line in lines if SAME_BATCH in line["framework"]}


def scaling_errors(rows: list[ActorRow], profile: TrainingProfile) -> dict[int, float]:
    """Relative errors over GPUs, of trainers with GPUs of their own, by the line of the row.

    The work, in GPU-seconds, is the only unknown of a run and set from its rows, so what remains
    tests the fixed part against the rest. Runs of one row are left out.
    """
    runs: dict[tuple[str, str, str], list[ActorRow]] = defaultdict(list)
    for row in rows:
        if not row.colocated and row.phase == "update_actor":
            runs[row.source, row.run, row.backend].append(row)
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
    one = profile.collectives_s(
        trained_model(row.model), gpu=row.gpu, gpus=row.gpus, backend=backend
    )
    return MINI_BATCHES * one
