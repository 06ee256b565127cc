"""Fit a trainer's rates to published rows, and test them on documents that they have not seen.

Each constant has a prior; each document has at most the weight of two rows in a class of rows,
however many it publishes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_sim.training import RECOMPUTED, TrainingProfile
from tools.profiles.training_rows import TrainerFit, TrainingRow, predicted_over_published

ROW_SPREAD = {"rl": 0.12, "other": 0.15}
"""Assumed spread of the logarithm of a row."""
MOST_ROWS = 2
"""Rows of a document and class whose weight all of them share."""


@dataclass(frozen=True, slots=True)
class Term:
    """One unknown: the logarithm of a constant, with the centre and the spread of its prior."""

    name: str
    centre: float
    spread: float


TERMS = (
    # Dense RL trainers of 2025 on Hopper, AReaL and NeMo-RL.
    Term("matmul", 0.44, 0.2),
    # Of what recomputing leaves: shards that are gathered late, kernels less fused.
    Term("fsdp", 1.0, 0.2),
    # FlashAttention 3 with its backward pass.
    Term("attention", 0.5, 0.2),
    # All but norms, embeddings and what quantising takes.
    Term("low precision", 0.857, 0.05),
    Term("blackwell", 1.0, 0.1),
    # GB300's clock above GB200's.
    Term("gb300", 1.0, 0.1),
    Term("link", 0.68, 0.3),
    Term("expert layer", 2.5e-6, 0.4),
    # Weights in bf16 to a file at 4 GB/s.
    Term("written", 0.5, 0.5),
)


def _fit_of(values: Sequence[float] | NDArray[np.float64]) -> TrainerFit:
    of = {term.name: math.exp(value) for term, value in zip(TERMS, values, strict=True)}
    profile = TrainingProfile(
        matmul={"megatron": of["matmul"], "fsdp": of["matmul"] * of["fsdp"] / RECOMPUTED},
        attention={"megatron": of["attention"], "fsdp": of["attention"] / RECOMPUTED},
        low_precision_share=min(of["low precision"], 0.99),
        gpu_efficiency={
            "b200": of["blackwell"],
            "gb200": of["blackwell"],
            "gb300": of["blackwell"] * of["gb300"],
        },
        link_efficiency=of["link"],
        expert_layer_s=of["expert layer"],
        colocated_efficiency={},
    )
    return TrainerFit(profile=profile, written_s_per_billion=of["written"])


def fit_rows(rows: Sequence[TrainingRow]) -> TrainerFit:
    """Fit all rows at once but doubtful ones; without rows, the priors.

    Errors and `colocated_efficiency` are left empty.
    """
    rows = [row for row in rows if not row.doubt]
    mean = np.array([math.log(term.centre) for term in TERMS])
    spread = np.array([term.spread for term in TERMS])
    count = Counter((row.group, row.source) for row in rows)
    weight = np.array(
        [
            math.sqrt(min(1.0, MOST_ROWS / count[row.group, row.source])) / ROW_SPREAD[row.use]
            for row in rows
        ]
    )

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        fit = _fit_of(values)
        logs = np.array([math.log(predicted_over_published(row, fit)) for row in rows])
        return np.concatenate([weight * logs, (values - mean) / spread])

    return _fit_of(least_squares(residuals, mean, x_scale=spread).x)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Predicted over published time of one row, less 1."""

    row: TrainingRow
    seen: float
    """By the fit of all rows."""
    unseen: float
    """By the fit of all other documents."""


def row_errors(rows: Sequence[TrainingRow]) -> list[RowError]:
    """Errors of each row, by a fit with and without its document."""
    whole = fit_rows(rows)
    unseen = {
        source: fit_rows([row for row in rows if row.source != source])
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
