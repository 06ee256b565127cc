"""Steps that need a while to reach their engine."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineRefusedError
from tests.sim.one_engine import A, B, Bench, C


def test_a_step_counts_as_waiting_until_the_engine_sees_it() -> None:
    bench = Bench(arrival_s=0.25)
    bench.start(A, prompt=100, output=11)
    assert (bench.engine.waiting, bench.engine.running) == (1, 0)
    assert bench.engine.trajectories() == [A]
    bench.run()
    now, result = bench.ends[A]
    assert result.queued_s == pytest.approx(0.25)
    assert now == pytest.approx(13.25)


def test_a_step_on_its_way_cannot_be_started_again() -> None:
    bench = Bench(arrival_s=0.25)
    bench.start(A, prompt=100, output=11)
    with pytest.raises(EngineRefusedError, match="has a step here already"):
        bench.start(A, prompt=100, output=11)


def test_a_step_on_its_way_is_aborted_at_once_and_once() -> None:
    bench = Bench(arrival_s=5.0)
    bench.start(A, prompt=100, output=11)
    bench.at(1.0, lambda: bench.engine.abort(A))
    bench.at(2.0, lambda: bench.start(A, prompt=100, output=1))
    bench.run()
    now, result = bench.ends[A]
    assert (now, result.finished, result.tokens) == (pytest.approx(9.0), True, 1)
    assert bench.engine.decoded_tokens == 1


def test_a_step_on_its_way_is_lost_with_its_engine() -> None:
    bench = Bench(arrival_s=5.0)
    bench.start(A, prompt=100, output=11)
    assert bench.engine.fail() == [(A, 0)]
    bench.run()
    assert bench.ends == {}


Work = list[tuple[int, int, int]]


@example(work=[(3, 1, 1), (4, 199, 1), (8, 1, 1), (19, 1, 1)], arrival=1)
@given(
    work=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 300), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    ),
    arrival=st.integers(1, 40),
)
def test_a_late_engine_is_one_whose_steps_are_started_later(work: Work, arrival: int) -> None:
    """Times are multiples of a power of two, so that both sums are exact.

    No step arrives just as an iteration ends, which takes multiples of 0.01 s: of two events at one
    time the one that was scheduled first comes first, and here that differs.
    """

    def ends(arrival_s: float, shift_s: float) -> dict[TrajectoryId, float]:
        bench = Bench(arrival_s=arrival_s)
        for i, (at, prompt, output) in enumerate(work):
            name = TrajectoryId(f"t{i}")
            bench.at(
                at / 4 + i / 1024 + shift_s,
                lambda name=name, p=prompt, o=output: bench.start(name, prompt=p, output=o),
            )
        bench.run()
        return {name: bench.end_s(name) for name in bench.ends}

    assert ends(arrival / 4, 0.0) == ends(0.0, arrival / 4)


def test_steps_that_arrive_together_are_admitted_as_they_were_started() -> None:
    bench = Bench(arrival_s=0.5, max_running=1)
    for name in (B, A, C):
        bench.start(name, prompt=100, output=1)
    bench.run()
    assert sorted(bench.ends, key=bench.end_s) == [B, A, C]
