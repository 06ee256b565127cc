"""A latency table: the prefill curve between, at and beyond its knots."""

from dataclasses import replace

import pytest

from heddle_sim.latency import LatencyTable


def table() -> LatencyTable:
    return LatencyTable(
        model="m",
        gpu="g",
        tp=1,
        base_s=[0.01, 0.02],
        per_context_s=[0.0, 1e-6],
        prefill_tokens=(0, 100, 1100),
        prefill_knots_s=(0.0, 0.001, 0.021),
        prefill_pair_s=1e-9,
        host_per_prefill_s=0.004,
        kv_capacity_tokens=1000,
        kv_bytes_per_token=8,
    )


@pytest.mark.parametrize(
    ("tokens", "pairs", "seconds"),
    [
        (0, 0.0, 0.0),
        (50, 0.0, 0.0005),
        (100, 0.0, 0.001),
        (600, 0.0, 0.011),
        (1100, 0.0, 0.021),
        (2100, 0.0, 0.041),
        (100, 1e6, 0.002),
    ],
)
def test_prefill_is_linear_between_knots_and_goes_on_beyond_the_last(
    tokens: int, pairs: float, seconds: float
) -> None:
    assert table().prefill_s(tokens, pairs) == pytest.approx(seconds, abs=1e-12)


def test_no_tokens_cost_nothing_whatever_the_pairs() -> None:
    assert table().prefill_s(0, 5e9) == 0.0


def test_any_prefill_brings_an_iteration_to_the_least_of_one() -> None:
    assert replace(table(), base_s=[0.5, 0.25, 0.75]).any_prefill_s(1) == 0.25
    assert replace(table(), base_s=[0.5, 0.25, 0.75]).any_prefill_s(2) == 0.0
