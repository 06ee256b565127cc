"""Fit a trainer's efficiency to published rows, and test it on documents that it has not seen.

The logarithm of the MFU is a sum: a level, size class, back end, the two together, and GPU class.
Each term but the level has a prior around 0 (classes of dense models: around a fall with size), so
a class that the rows do not cover takes its value from its neighbours. Each document has the same
weight in a group of rows, however many rows it publishes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_sim.trained_models import SIZE_CLASSES
from heddle_sim.training import TrainingProfile
from tools.profiles.training_rows import (
    TrainingRow,
    doubtful_documents,
    is_doubtful,
    predicted_over_published,
)

BACKENDS = ("megatron", "fsdp", "megatron-fp8")
FITTED_GPUS = ("b200", "gb200", "gb300")
"""Classes with rows of their own; all Hopper GPUs are the reference."""
ROW_SPREAD = {"rl": 0.1, "other": 0.3}
"""Assumed spread of the logarithm of a row. Pretraining and SFT count less: their samples are of
one length and their batches full, so they tell an RL trainer's MFU less well."""
FALL = {"dense-small": 0.0, "dense-mid": 0.2, "dense-large": 0.3}
"""Prior fall of the logarithm of the MFU with size: tensor-parallel collectives."""


@dataclass(frozen=True, slots=True)
class Term:
    """One unknown, with the mean and the spread of its prior."""

    name: str
    mean: float
    spread: float


def _terms() -> list[Term]:
    terms = [Term("level", math.log(0.4), 0.5)]
    for one in SIZE_CLASSES:
        dense = one in FALL
        terms.append(Term(one, -FALL[one] if dense else -1.0, 0.15 if dense else 0.7))
    terms += [Term("fsdp", -0.3, 0.3), Term("megatron-fp8", 0.5, 0.3)]
    for backend in BACKENDS:
        terms += [Term(f"{backend}/{one}", 0.0, 0.2) for one in SIZE_CLASSES]
    terms += [Term(gpu, 0.0, 0.1) for gpu in FITTED_GPUS]
    terms += [Term("forward megatron", math.log(1.05), 0.1)]
    terms += [Term("forward fsdp", math.log(4 / 3), 0.1)]
    terms += [Term("fixed fsdp", math.log(0.2), 0.7)]
    return terms


TERMS = tuple(_terms())


def _profile(values: Sequence[float] | NDArray[np.float64]) -> TrainingProfile:
    of = {term.name: float(value) for term, value in zip(TERMS, values, strict=True)}
    mfu: dict[str, dict[str, float]] = {
        backend: {
            one: math.exp(of["level"] + of[one] + of.get(backend, 0.0) + of[f"{backend}/{one}"])
            for one in SIZE_CLASSES
        }
        for backend in BACKENDS
    }
    return TrainingProfile(
        mfu=mfu,
        gpu_efficiency={gpu: math.exp(of[gpu]) for gpu in FITTED_GPUS},
        forward_speedup={one: math.exp(of[f"forward {one}"]) for one in BACKENDS[:2]},
        fixed_s_per_billion={"fsdp": math.exp(of["fixed fsdp"])},
        colocated_efficiency={},
    )


def fit_rows(rows: Sequence[TrainingRow], *, doubtful: bool = False) -> TrainingProfile:
    """Fit all rows at once; without rows, the priors.

    Errors and `colocated_efficiency` are left empty. RL rows of `doubtful_documents` take no part
    unless `doubtful`.
    """
    if not doubtful:
        rows = [row for row in rows if not is_doubtful(row, doubtful_documents(rows))]
    mean = np.array([term.mean for term in TERMS])
    spread = np.array([term.spread for term in TERMS])
    count = Counter((row.group, row.source) for row in rows)
    most = Counter[str]()
    for (group, _), n in count.items():
        most[group] = max(most[group], n)
    # As many effective rows from each document of a group as its largest has, at most 4.
    weight = np.array(
        [
            math.sqrt(min(4, most[r.group]) / count[r.group, r.source]) / ROW_SPREAD[r.use]
            for r in rows
        ]
    )

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = _profile(values)
        logs = [math.log(predicted_over_published(row, profile)) for row in rows]
        return np.concatenate([weight * logs, (values - mean) / spread])

    found = least_squares(residuals, mean, loss="linear", x_scale=spread)
    return _profile(found.x)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Predicted over published time of one row, less 1."""

    row: TrainingRow
    seen: float
    """By the fit of all rows."""
    unseen: float
    """By the fit of all other documents."""


def row_errors(rows: Sequence[TrainingRow], *, doubtful: bool = False) -> list[RowError]:
    """Errors of each row, by a fit with and without its document."""
    whole = fit_rows(rows, doubtful=doubtful)
    unseen = {
        source: fit_rows([row for row in rows if row.source != source], doubtful=doubtful)
        for source in dict.fromkeys(row.source for row in rows)
    }
    return [
        RowError(
            row=row,
            seen=predicted_over_published(row, whole) - 1,
            unseen=predicted_over_published(row, unseen[row.source]) - 1,
        )
        for row in rows
    ]


def mean_error(errors: Sequence[RowError], *, unseen: bool) -> float:
    """Mean absolute error of rows; NaN for none."""
    found = [abs(one.unseen if unseen else one.seen) for one in errors]
    return float(np.mean(found)) if found else math.nan
