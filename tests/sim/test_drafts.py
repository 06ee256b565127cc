"""Rates of steps with drafts: their mean and spread are those of drafts drawn one by one."""

from random import Random
from statistics import fmean, stdev

import pytest

from heddle_sim.drafts import ONE, Drafting, Samples, draw_of

PUBLISHED = Drafting(drafts=[0, 3], accepted=(0.886, 0.770, 0.663), base_s={})
"""Acceptance by position that SkyRL's documentation states."""


def one_by_one(random: Random, chances: tuple[float, ...], output_tokens: int) -> int:
    """Iterations of a step whose every draft is drawn."""
    made = iterations = 0
    while made < output_tokens:
        drawn = random.random()
        made += 1 + sum(drawn < chance for chance in chances)
        iterations += 1
    return iterations


def test_a_mean_is_one_more_than_the_sum_of_acceptances() -> None:
    assert PUBLISHED.mean_tokens(0) == 1.0
    assert PUBLISHED.mean_tokens(1) == pytest.approx(1.886)
    assert PUBLISHED.mean_tokens(3) == pytest.approx(3.319)


@pytest.mark.parametrize("output_tokens", [50, 400])
def test_iterations_of_steps_spread_as_those_of_single_drafts(output_tokens: int) -> None:
    random, count = Random(3), 4000
    singly = [one_by_one(random, (0.886, 0.770, 0.663), output_tokens) for _ in range(count)]
    rates = [
        PUBLISHED.rate(3, output_tokens, draw_of(f"t{i}", output_tokens)) for i in range(count)
    ]
    at_once = [-(-(output_tokens * ONE) // rate) for rate in rates]
    assert fmean(at_once) == pytest.approx(fmean(singly), rel=0.01)
    assert stdev(at_once) == pytest.approx(stdev(singly), rel=0.08)


def test_a_rate_stays_between_no_draft_and_all() -> None:
    assert PUBLISHED.rate(3, 1, 50.0) == 4 * ONE
    assert PUBLISHED.rate(3, 1, -50.0) == ONE
    assert PUBLISHED.rate(0, 10, 1.0) == ONE


def test_a_step_draws_the_same_every_time_and_another_one_differs() -> None:
    assert draw_of("t1", 100) == draw_of("t1", 100)
    assert draw_of("t1", 100) != draw_of("t1", 101)


def test_acceptance_decays_with_versions_of_the_weights() -> None:
    frozen = Drafting(drafts=[0, 2], accepted=(0.8, 0.6), base_s={}, decay=0.5)
    assert frozen.after(0).mean_tokens(2) == pytest.approx(2.4)
    assert frozen.after(2).mean_tokens(2) == pytest.approx(1.0 + 1.4 / 4.0)


def test_other_samples_are_counted_without_the_own_one() -> None:
    samples = Samples()
    assert samples.others("g", "t0") == 0
    for trajectory in ("t0", "t1", "t1"):
        samples.end("g", trajectory)
    assert samples.others("g", "t0") == 1
    assert samples.others("g", "t2") == 2
    assert samples.others("h", "t0") == 0


def test_acceptance_after_more_samples_than_are_known_is_the_last() -> None:
    found = Drafting(drafts=[0, 1], accepted=(0.6,), base_s={}, by_samples=((0.2,), (0.6,)))
    assert found.with_samples(0).mean_tokens(1) == pytest.approx(1.2)
    assert found.with_samples(9).mean_tokens(1) == pytest.approx(1.6)
