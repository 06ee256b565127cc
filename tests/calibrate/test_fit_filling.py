"""The second form of cost estimates, of models with experts: its fit, host time and rounding."""

from itertools import product

import numpy as np
import pytest

from heddle_calibrate.fit.curves import (
    Floats,
    filling_cost,
    plane,
    rounded,
    with_times,
)
from heddle_core.estimate.cost import FillingCost
from tools.profiles.serving_profile import kernel_times

TRUE = FillingCost(t0_s=4e-3, fill_s=3e-4, knee=16, t1_s=7e-5, t2_s=6e-9)
ROWS = np.array(list(product((1, 2, 4, 8, 16, 32, 64, 128), (4096, 16384))), dtype=float)
BATCH, CONTEXT = ROWS.T


def seconds_of(f: FillingCost, batch: Floats, context: Floats) -> Floats:
    filling = np.minimum(batch, f.knee)
    seconds = f.t0_s + f.fill_s * filling + f.t1_s * batch + f.t2_s * batch * context
    return np.asarray(seconds, dtype=np.float64)


def test_the_fit_finds_the_knee_that_rows_have() -> None:
    seconds = seconds_of(TRUE, BATCH, CONTEXT)
    found = filling_cost(BATCH, CONTEXT, seconds, 1 / seconds)
    assert found.knee == TRUE.knee
    for name in ("t0_s", "fill_s", "t1_s", "t2_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name))


def test_experts_that_fill_smoothly_are_followed_better_than_by_a_plane() -> None:
    # Of 128 experts, 8 for each sequence, chosen apart from each other.
    read = 1 - (1 - 8 / 128) ** BATCH
    seconds = 2e-3 + 8e-3 * read + 5e-5 * BATCH + 6e-9 * BATCH * CONTEXT
    t0, t1, t2 = plane(BATCH, CONTEXT, seconds, 1 / seconds)
    by_plane = t0 + t1 * BATCH + t2 * BATCH * CONTEXT
    filling = filling_cost(BATCH, CONTEXT, seconds, 1 / seconds)
    plane_off = np.median(np.abs(by_plane / seconds - 1))
    filling_off = np.median(np.abs(seconds_of(filling, BATCH, CONTEXT) / seconds - 1))
    assert filling_off < plane_off / 2


def test_a_dense_step_has_no_filling_worth_anything() -> None:
    seconds = 4e-3 + 7e-5 * BATCH + 6e-9 * BATCH * CONTEXT
    found = filling_cost(BATCH, CONTEXT, seconds, 1 / seconds)
    assert seconds_of(found, BATCH, CONTEXT) == pytest.approx(seconds)


def test_host_time_and_factors_are_added_and_taken_out() -> None:
    added = with_times(TRUE, kernels=1.1, per_step_s=6e-4, per_running_s=1e-5)
    assert added is not None
    assert added.t0_s == pytest.approx(1.1 * 4e-3 + 6e-4)
    assert added.t1_s == pytest.approx(1.1 * 7e-5 + 1e-5)
    assert added.fill_s == pytest.approx(1.1 * 3e-4)
    assert added.knee == 16
    again = kernel_times(added, kernels=1.1, per_step_s=6e-4, per_running_s=1e-5)
    assert again == rounded(TRUE)


def test_a_dense_model_stays_without() -> None:
    assert rounded(None) is None
    assert with_times(None, per_step_s=1.0, per_running_s=1.0) is None
    assert kernel_times(None, kernels=1.0, per_step_s=1.0, per_running_s=1.0) is None
