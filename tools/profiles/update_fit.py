"""Fit the bandwidths of weight updates, and test them on documents and rows not seen.

The wire's rate is given for each method, because rows cannot tell it from preparing. Fitted are the
set-up and the prepare bandwidth of each method, and one exponent: how the bandwidth grows with the
number of GPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_sim.weight_update import UpdateMethod, WeightUpdateProfile
from tools.profiles.update_rows import POINT_TO_POINT, UpdateRow

WIRE = {
    "nccl": 400e9,
    "nccl_per_tensor": 50e9,
    "checkpoint_engine": 50e9,
    "rdma": 50e9,
    "rdma_p2p": 400e9,
    "colocated": 400e9,
    "delta": 50e9,
    "store": 12.5e9,
    "tcp": 12.5e9,
}
"""Bytes/s: one 400 Gb/s link for a broadcast from one rank; a node's eight where all ranks send;
NVLink class inside of a node; 100 Gb/s between clusters."""
PAUSE = {
    "nccl": 1.0,
    "nccl_per_tensor": 1.0,
    "checkpoint_engine": 1.0,
    "rdma": 0.06,
    "rdma_p2p": 0.61,
    "colocated": 1.0,
    "delta": 0.13,
    "store": 0.06,
    "tcp": 0.06,
}
"""Part of an update in which engines pause. rdma_p2p: prime-rl pull 3341 (5.2 of 8.58 s); delta:
huggingface/blog pull 3386 (1.1 of 9.4 s) and Baseten (6 of 40 s); store: RollArt, arXiv 2512.22560
(1.4 of 38.6, 5.1 of 84.1, 9.6 of 157 s); tcp and rdma take the store's.
Others hold engines throughout."""
PREPARE_PRIOR, PREPARE_SPREAD = 10e9, 1.0
SETUP_PRIOR, SETUP_SPREAD = 0.5, 1.5
EXPONENT_PRIOR, EXPONENT_SPREAD = 0.5, 0.2
ROW_SPREAD = 0.25
FACTOR = 1.5
"""An update is right within this factor."""


def _profile(values: Sequence[float] | NDArray[np.float64]) -> WeightUpdateProfile:
    exponent = float(values[-1])
    methods = {}
    for k, (name, wire) in enumerate(WIRE.items()):
        methods[name] = UpdateMethod(
            setup_s=math.exp(values[2 * k]),
            prepare_bytes_per_s=math.exp(values[2 * k + 1]),
            wire_bytes_per_s=wire,
            gpu_exponent=0.0 if name in POINT_TO_POINT else exponent,
            pause_share=PAUSE[name],
        )
    return WeightUpdateProfile(methods=methods)


def predicted(row: UpdateRow, profile: WeightUpdateProfile) -> float:
    """Seconds that a profile gives for a published update."""
    return profile.time(row.size_bytes, row.method, gpus=row.gpus, bytes_per_parameter=1.0).total_s


def fit_updates(rows: Sequence[UpdateRow]) -> WeightUpdateProfile:
    """Fit all rows at once; a method without rows takes the priors."""
    mean = np.array([math.log(SETUP_PRIOR), math.log(PREPARE_PRIOR)] * len(WIRE) + [EXPONENT_PRIOR])
    spread = np.array([SETUP_SPREAD, PREPARE_SPREAD] * len(WIRE) + [EXPONENT_SPREAD])

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = _profile(values)
        logs = np.array([math.log(predicted(row, profile) / row.seconds) for row in rows])
        return np.concatenate([logs / ROW_SPREAD, (values - mean) / spread])

    return _profile(least_squares(residuals, mean, x_scale=spread).x)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateError:
    """Predicted over published seconds of one update."""

    row: UpdateRow
    seen: float
    """By the fit of all rows."""
    row_unseen: float
    """By the fit of all other rows."""
    source_unseen: float
    """By the fit of all other documents."""
    covered: bool
    """Whether another document has the same method: else only the prior is tested."""


def update_errors(rows: Sequence[UpdateRow]) -> list[UpdateError]:
    """Errors of each row, by three fits."""
    whole = fit_updates(rows)
    found = []
    for row in rows:
        others = [one for one in rows if one.source != row.source]
        without = [one for one in rows if one is not row]
        found.append(
            UpdateError(
                row=row,
                seen=predicted(row, whole) / row.seconds,
                row_unseen=predicted(row, fit_updates(without)) / row.seconds,
                source_unseen=predicted(row, fit_updates(others)) / row.seconds,
                covered=any(one.method == row.method for one in others),
            )
        )
    return found


def share_within(ratios: Sequence[float], factor: float = FACTOR) -> float:
    """Share of ratios within a factor of 1; NaN for none."""
    if not ratios:
        return math.nan
    return sum(1 / factor <= ratio <= factor for ratio in ratios) / len(ratios)
