"""ThunderAgent's rules, one by one; KV of 1,000 tokens an engine, buffers of 100."""

import pytest

from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId, EngineShape
from heddle_core.ledger import Ledger
from heddle_core.parts.placement.pause_restore import PauseRestore
from heddle_core.trajectory import Phase, Trajectory
from tests.core.ledgers import add_trajectory

E0, E1 = EngineId("e0"), EngineId("e1")


def cluster(*kv: int) -> Ledger:
    ledger = Ledger()
    for i, tokens in enumerate(kv):
        ledger.add_engine(
            Engine(
                id=EngineId(f"e{i}"),
                shape=EngineShape("h100", 1),
                max_running=16,
                kv_capacity_tokens=tokens,
            )
        )
    return ledger


def at(
    ledger: Ledger,
    name: str,
    home: str | None,
    tokens: int,
    phase: Phase = "running",
    step: int = 1,
) -> Trajectory:
    return add_trajectory(ledger, name, home, phase=phase, context_tokens=tokens, step=step)


def begun(ledger: Ledger, **settings: float) -> PauseRestore:
    """A part that has placed a first trajectory, which has ended."""
    part = PauseRestore(**settings)
    t = at(ledger, "first", None, 1)
    part.place(t, ledger)
    ledger.held.clear()
    del ledger.trajectories[t.id]
    part.finished(t)
    return part


def review(part: PauseRestore, ledger: Ledger, *backlog: Trajectory) -> list[tuple[str, str]]:
    ledger.now_s += 5.0
    return list(part.release({t.id: t for t in backlog}, ledger))


def test_a_new_trajectory_goes_where_most_kv_is_left_or_is_paused():
    ledger, part = cluster(1_000, 1_500), PauseRestore()
    placed = []
    for i in range(4):
        t = at(ledger, f"t{i}", None, 500, step=0)
        placed.append(part.place(t, ledger))
    # 1,500 -> 900, 1,000 -> 400, 900 -> 300; then 600 fit nowhere.
    assert placed == ["e1", "e0", "e1", None]


def test_an_active_trajectory_stays_through_its_tools():
    ledger = cluster(1_000, 9_000)
    part = begun(ledger)
    t = at(ledger, "a", "e0", 900)
    at(ledger, "b", "e0", 900)
    assert part.place(t, ledger) == "e0"


def test_it_reviews_only_at_its_interval():
    ledger = cluster(1_000)
    part = begun(ledger)
    a = at(ledger, "a", "e0", 2_000, "tool")
    ledger.now_s = 4.9
    assert part.release({}, ledger) == []
    assert part.place(a, ledger) == "e0"
    ledger.now_s = 5.0
    part.release({}, ledger)
    assert part.place(a, ledger) is None
    assert part.review_s == 5.0


def test_those_in_a_tool_pause_first_the_least_context_first():
    ledger = cluster(1_000)
    part = begun(ledger)
    # 300 + 250 + 200 + 150 and 4 buffers need 1,300: two have to pause.
    running = at(ledger, "running", "e0", 150)
    tools = [at(ledger, f"tool{n}", "e0", n, "tool") for n in (300, 250, 200)]
    assert review(part, ledger) == []
    assert part.place(running, ledger) == "e0"
    assert [part.place(t, ledger) for t in tools] == ["e0", "e0", None]


def test_those_at_the_engine_pause_after_their_step():
    ledger = cluster(1_000)
    part = begun(ledger)
    large, small, queued = (
        at(ledger, "large", "e0", 700),
        at(ledger, "small", "e0", 300),
        at(ledger, "queued", "e0", 310, "queued"),
    )
    review(part, ledger)
    # 1,610 with buffers: without the small one 1,210, without the queued one too 800.
    assert part.place(small, ledger) is None
    assert part.place(queued, ledger) is None
    assert part.place(large, ledger) == "e0"


def test_one_that_pauses_after_its_step_does_not_pause_again_in_place_of_another():
    ledger = cluster(1_000)
    part = begun(ledger)
    a, b = at(ledger, "a", "e0", 200), at(ledger, "b", "e0", 800)
    review(part, ledger)
    assert [part.place(t, ledger) for t in (a, b)] == [None, "e0"]
    c = at(ledger, "c", "e0", 300)
    review(part, ledger)
    assert [part.place(t, ledger) for t in (a, b, c)] == [None, "e0", None]


def test_an_engine_that_has_enough_pauses_none():
    ledger = cluster(1_000, 1_000)
    part = begun(ledger)
    fits = at(ledger, "fits", "e1", 100, "tool")
    full = [at(ledger, f"t{i}", "e0", 600, "tool") for i in range(2)]
    review(part, ledger)
    assert part.place(fits, ledger) == "e1"
    assert [part.place(t, ledger) for t in full] == [None, "e0"]


def paused(ledger: Ledger, part: PauseRestore, name: str, tokens: int, step: int) -> Trajectory:
    """A trajectory that the part has paused while its engine was full, and that waits."""
    blocker = at(ledger, "blocker", "e0", 9_999)
    t = at(ledger, name, "e0", tokens, "tool", step)
    review(part, ledger)
    del ledger.trajectories[blocker.id]
    part.finished(blocker)
    assert part.place(t, ledger) is None
    ledger.hold(t)
    return t


def test_waiting_steps_are_restored_longest_first_each_where_most_is_left():
    ledger = cluster(1_000, 700)
    part = begun(ledger)
    backlog = [paused(ledger, part, f"t{n}", n, step=2) for n in (200, 500, 400)]
    # 600 to e0 (400 left), 500 to e1 (200 left), 300 to e0.
    assert review(part, ledger, *backlog) == [("t500", "e0"), ("t400", "e1"), ("t200", "e0")]


def test_those_that_go_on_come_before_new_ones_and_these_before_those_in_a_tool():
    ledger = cluster(1_000)
    part = begun(ledger)
    new = paused(ledger, part, "new", 400, step=0)
    on = paused(ledger, part, "on", 400, step=3)
    tool = at(ledger, "tool", "e0", 10, "tool")
    blocker = at(ledger, "blocker", "e0", 9_999)
    review(part, ledger)
    for t in (blocker,):
        del ledger.trajectories[t.id]
        part.finished(t)
    assert review(part, ledger, new, on) == [("on", "e0"), ("new", "e0")]
    # 1,000 are needed by these two: the one in the tool stays paused.
    assert part.place(tool, ledger) is None


def test_late_in_a_run_new_ones_come_no_sooner_before_those_that_go_on():
    ledger = cluster(1_000)
    ledger.now_s = 1_000.0
    part = begun(ledger)
    new = paused(ledger, part, "new", 500, step=0)
    on = paused(ledger, part, "on", 300, step=3)
    at(ledger, "active", "e0", 100)
    # Of the 800 that are left the one that goes on needs 400, the new one 600.
    assert review(part, ledger, new, on) == [("on", "e0")]


def test_one_that_is_restored_in_its_tool_goes_to_its_new_engine_without_waiting():
    ledger = cluster(1_000, 2_000)
    part = begun(ledger)
    t = at(ledger, "tool", "e0", 10, "tool")
    blocker = at(ledger, "blocker", "e0", 9_999)
    review(part, ledger)
    del ledger.trajectories[blocker.id]
    part.finished(blocker)
    assert review(part, ledger) == []
    assert part.place(t, ledger) == "e1"


def test_kv_of_a_long_tool_call_decays_for_those_that_would_be_restored():
    for decay, restored in ((True, [("t", "e0")]), (False, [])):
        ledger = cluster(1_000)
        part = begun(ledger, decay=decay)
        t = paused(ledger, part, "t", 500, step=2)
        tool = at(ledger, "tool", "e0", 700, "tool")
        tool.tool_started_s = ledger.now_s + 5.0 - 2.0
        # 2 s before the review: 700 / 4 + 100 leave 725 of 1,000; undecayed 200.
        assert review(part, ledger, t) == restored


def test_a_pausing_step_that_still_runs_leaves_nothing_to_those_that_wait():
    ledger = cluster(1_000)
    part = begun(ledger)
    t = paused(ledger, part, "t", 300, step=2)
    at(ledger, "large", "e0", 550)
    at(ledger, "small", "e0", 540)
    assert review(part, ledger, t) == []
    # The small one pauses after its step; until then 1,290 of 1,000 are in use.
    assert review(part, ledger, t) == []


def test_after_half_an_hour_it_is_restored_whatever_fits():
    ledger = cluster(1_000)
    part = begun(ledger)
    t = paused(ledger, part, "t", 500, step=2)
    at(ledger, "large", "e0", 900)
    assert review(part, ledger, t) == []
    ledger.now_s += 1_795.0
    assert review(part, ledger, t) == [("t", "e0")]


def test_an_engine_without_active_trajectories_takes_any():
    ledger, part = cluster(1_000), PauseRestore()
    assert part.place(at(ledger, "t", None, 950, step=0), ledger) == "e0"
    later = begun(cluster(1_000))
    other = cluster(1_000)
    t = paused(other, later, "t", 950, step=1)
    assert review(later, other, t) == [("t", "e0")]


def test_a_lost_engine_is_replaced_and_a_restoration_to_it_is_void():
    ledger = cluster(1_000, 2_000)
    part = begun(ledger)
    t = at(ledger, "tool", "e0", 10, "tool")
    blocker = at(ledger, "blocker", "e0", 9_999)
    review(part, ledger)
    del ledger.trajectories[blocker.id]
    part.finished(blocker)
    review(part, ledger)
    ledger.close_engine(ledger.engine(E1))
    at(ledger, "there", "e1", 900, "tool")
    review(part, ledger)
    assert part.place(t, ledger) == "e0"
    ledger.set_home(t, None)
    assert part.place(t, ledger) == "e0"


@pytest.mark.parametrize("wrong", [{"review_s": 0.0}, {"buffer_tokens": 0}])
def test_settings_without_an_interval_or_a_buffer_are_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        PauseRestore(**wrong)
