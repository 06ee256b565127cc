"""Fit the rates of weight updates, and test them on documents and rows not seen.

Fitted are the set-up and the rate of each method, and one time of a tensor that is gathered apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_sim.weight_update import UpdateMethod, WeightUpdateProfile
from tools.profiles.update_rows import UpdateRow

LINK = 64e9
"""PCIe 5.0 x16, bytes/s: checkpoint-engine copies from hosts, one rank after the other."""
RATE_PRIOR = {
    "nccl": 5e9,
    "nccl_bucket": 20e9,
    "nccl_sharded": 100e9,
    "rdma_p2p": 100e9,
    "checkpoint_engine": LINK,
    "colocated": 10e9,
    "delta": 20e9,
    "rdma": 10e9,
    "store": 1.25e9,
    "tcp": 2.5e9,
}
"""Bytes/s. One sender, tensor after tensor or in buckets; all ranks to an engine's eight links of
50e9, a quarter of their rate; between clusters, RDMA over a 100 Gb/s link, or TCP streams of 20
Gb/s, of which a store takes two."""
RATE_SPREAD = {"checkpoint_engine": 0.1}
"""0.5 for the others: systems differ by a method's implementation."""
SETUP_PRIOR = {"checkpoint_engine": 0.3}
"""Seconds; 1 for the others. checkpoint-engine gathers metadata before the update."""
APART = ("nccl", "nccl_bucket", "colocated")
"""Methods that gather each tensor apart."""
PAUSE = {
    "rdma": 0.06,
    "rdma_p2p": 0.61,
    "delta": 0.13,
    "store": 0.06,
    "tcp": 0.06,
}
"""Part of an update in which engines pause. rdma_p2p: prime-rl pull 3341 (5.2 of 8.58 s); delta:
huggingface/blog pull 3386 (1.1 of 9.4 s) and Baseten (6 of 40 s); store: RollArt, arXiv 2512.22560
(1.4 of 38.6, 5.1 of 84.1, 9.6 of 157 s); tcp and rdma take the store's.
Others hold engines throughout."""
TENSOR_PRIOR, TENSOR_SPREAD = 1e-4, 0.7
SETUP_SPREAD = 0.7
ROW_SPREAD = 0.3
FACTOR = 1.5
"""An update is right within this factor."""


def _profile(values: Sequence[float] | NDArray[np.float64]) -> WeightUpdateProfile:
    tensor = math.exp(values[-1])
    return WeightUpdateProfile(
        methods={
            name: UpdateMethod(
                setup_s=math.exp(values[2 * k]),
                tensor_s=tensor if name in APART else 0.0,
                bytes_per_s=math.exp(values[2 * k + 1]),
                pause_share=PAUSE.get(name, 1.0),
            )
            for k, name in enumerate(RATE_PRIOR)
        }
    )


def predicted(row: UpdateRow, profile: WeightUpdateProfile) -> float:
    """Seconds that a profile gives for a published update."""
    one = profile.methods[row.method]
    total = one.setup_s + row.tensors * one.tensor_s + row.size_bytes / one.bytes_per_s
    return total * one.pause_share if row.paused else total


def fit_updates(rows: Sequence[UpdateRow]) -> WeightUpdateProfile:
    """Fit all rows at once; a method without rows takes the priors."""
    centres = [
        value for name, rate in RATE_PRIOR.items() for value in (SETUP_PRIOR.get(name, 1.0), rate)
    ]
    mean = np.log([*centres, TENSOR_PRIOR])
    spreads = [s for name in RATE_PRIOR for s in (SETUP_SPREAD, RATE_SPREAD.get(name, 0.5))]
    spread = np.array([*spreads, TENSOR_SPREAD])

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = _profile(values)
        logs = np.array([math.log(predicted(row, profile) / row.seconds) for row in rows])
        return np.concatenate([logs / ROW_SPREAD, (values - mean) / spread])

    # Single rows that contradict the others count less than by their square.
    return _profile(least_squares(residuals, mean, x_scale=spread, loss="soft_l1").x)


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
    """Errors of each row, by fits of all rows, of all but it, of all but its document."""
    whole = fit_updates(rows)
    unseen = {
        source: fit_updates([one for one in rows if one.source != source])
        for source in dict.fromkeys(row.source for row in rows)
    }
    return [
        UpdateError(
            row=row,
            seen=predicted(row, whole) / row.seconds,
            row_unseen=predicted(row, fit_updates([o for o in rows if o is not row])) / row.seconds,
            source_unseen=predicted(row, unseen[row.source]) / row.seconds,
            covered=any(o.method == row.method and o.source != row.source for o in rows),
        )
        for row in rows
    ]


def share_within(ratios: Sequence[float], factor: float = FACTOR) -> float:
    """Share of ratios within a factor of 1; NaN for none."""
    if not ratios:
        return math.nan
    return sum(1 / factor <= ratio <= factor for ratio in ratios) / len(ratios)
