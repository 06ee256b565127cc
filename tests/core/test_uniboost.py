"""UniBoost's order: its boost in numbers, and what its pull request (sglang#35637) states of it."""

import pytest

from heddle_core.events import StepFinished
from heddle_core.ids import EngineId
from heddle_core.parts.scheduler import UniBoost
from tests.core.policy_fakes import FakeTrajectory, trajectory

E0 = EngineId("e0")


def new(name: str, tokens: int, runnable_s: float = 0.0) -> FakeTrajectory:
    return trajectory(name, home=E0, context_tokens=tokens, runnable_s=runnable_s)


def order(part: UniBoost, *ts: FakeTrajectory) -> list[str]:
    return [t.id for t in sorted(ts, key=lambda t: -part.priority(t, 0.0))]


def ran(part: UniBoost, t: FakeTrajectory, context_tokens: int) -> None:
    """It ended a step with this context."""
    t.context_tokens = context_tokens
    event = StepFinished(
        time_s=0.0, trajectory=t.id, step=0, engine=E0, output_tokens=1, reason="tool_call"
    )
    part.observe_step(t, event)


@pytest.mark.parametrize(
    ("tokens", "boost_s"),
    [(1, 0.73544), (100, 0.27814), (1_000, 0.07495), (20_000, 2.8e-7)],
)
def test_the_boost_of_so_many_tokens(tokens, boost_s):
    """-ln(1 - exp(-10 x 64 us x tokens)) / 10 s."""
    assert UniBoost().priority(new("a", tokens), 0.0) == pytest.approx(boost_s, rel=0.02)


def test_short_ones_pass_long_ones_of_the_same_time():
    assert order(UniBoost(), new("long", 20_000), new("short", 100)) == ["short", "long"]


def test_equal_work_is_served_by_arrival():
    part = UniBoost()
    assert order(part, new("second", 5_000, 0.5), new("first", 5_000)) == ["first", "second"]


def test_no_step_passes_one_that_came_a_second_earlier():
    assert order(UniBoost(), new("late", 1, 1.0), new("early", 20_000)) == ["early", "late"]


def test_what_is_cached_is_no_work():
    part, hot, cold = UniBoost(), new("hot", 20_000), new("cold", 20_000)
    ran(part, hot, 19_900)
    hot.context_tokens = 20_000
    assert order(part, cold, hot) == ["hot", "cold"]


def test_on_another_engine_or_compacted_it_is_work_again():
    part, t = UniBoost(), new("a", 10_000)
    ran(part, t, 10_000)
    warm = part.priority(t, 0.0)
    t.home = EngineId("e1")
    assert part.priority(t, 0.0) < warm - 0.7
    t.home, t.context_tokens = E0, 9_000
    assert part.priority(t, 0.0) < warm - 0.7


def test_a_large_gamma_is_first_come_first_served():
    part = UniBoost(gamma=1e6)
    assert order(part, new("b", 1, 1e-3), new("a", 20_000)) == ["a", "b"]


def test_finished_ones_are_forgotten():
    part, t = UniBoost(), new("a", 100)
    ran(part, t, 100)
    part.observe_finish(t)
    assert not part._cached


@pytest.mark.parametrize("wrong", [{"gamma": 0.0}, {"token_s": -1.0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        UniBoost(**wrong)
