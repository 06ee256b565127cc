import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.harness.values import Results, Value, across, estimate, exactly

numbers = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(st.lists(numbers, min_size=2, max_size=12))
def test_the_interval_is_students(values: list[float]):
    found = estimate(values)
    spread = stats.sem(values)
    assert math.isclose(found.mean, sum(values) / len(values), abs_tol=1e-6)
    half = stats.t.ppf(0.975, len(values) - 1) * spread
    assert found.high - found.mean == pytest.approx(half, rel=1e-6, abs=1e-6)
    assert found.mean - found.low == pytest.approx(half, rel=1e-6, abs=1e-6)
    assert (found.n, found.spread) == (len(values), "ci95")


def test_one_run_says_nothing_about_spread():
    assert estimate([3.5]) == exactly(3.5) == Value(mean=3.5, low=3.5, high=3.5)


@pytest.mark.parametrize("make", [estimate, across])
def test_nothing_is_no_estimate(make):
    with pytest.raises(ValueError, match="no "):
        make([])


def test_cells_keep_their_least_and_greatest_mean():
    cells = [Value(mean=1.5, low=1.0, high=2.0, n=3, spread="ci95"), exactly(1.2), exactly(1.8)]
    found = across(cells)
    assert (found.mean, found.low, found.high) == (pytest.approx(1.5), 1.2, 1.8)
    assert (found.n, found.spread) == (3, "range")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (exactly(1.4142), "1.41"),
        (exactly(123_456), "123,456"),
        (exactly(0.0), "0"),
        (exactly(2.5e-6), "2.5e-06"),
        (Value(mean=1.41, low=1.36, high=1.46, n=3, spread="ci95"), "1.41 ± 0.05"),
        (Value(mean=1.41, low=1.2, high=1.6, n=9, spread="range"), "1.41 (1.20 to 1.60)"),
    ],
)
def test_values_read_well_in_a_table(value: Value, text: str):
    assert value.text() == text


def runs() -> Results:
    """Two seeds, the second a rollout twice as slow for every policy."""
    runs = [("verl", 100.0), ("verl", 50.0), ("heddle", 150.0), ("heddle", 80.0)]
    return Results(
        [({"policy": p, "workload": "coding"}, {"throughput_tok_s": t, "x": None}) for p, t in runs]
    )


def test_ratios_are_paired_by_seed():
    gain = runs().gain("heddle", "verl", workload="coding")
    assert gain == estimate([1.5, 1.6])
    assert gain.mean != pytest.approx(230 / 150)


def test_rows_are_found_by_axes_and_only_by_them():
    assert [r["throughput_tok_s"] for r in runs().rows(policy="verl")] == [100.0, 50.0]
    assert runs().estimate("x", policy="verl").mean == 0.0
    with pytest.raises(KeyError, match="slime"):
        runs().rows(policy="slime")
