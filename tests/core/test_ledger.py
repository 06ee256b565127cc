"""The ledger's accounts, and that its check can fail: every kind of corruption is seen."""

import pytest

from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.ledger import Ledger, LedgerError
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_engine, add_trajectory, ledger_of

E0, E1 = EngineId("e0"), EngineId("e1")


def started(ledger: Ledger, name: str, engine: EngineId = E0, context: int = 1_000) -> Trajectory:
    t = add_trajectory(ledger, name, engine, context_tokens=context)
    e = ledger.engine(engine)
    ledger.enqueue(t, e, 99.0)
    assert e.head() is t
    ledger.start(t, e)
    return t


def queued(ledger: Ledger, name: str, priority: float = 0.0) -> Trajectory:
    t = add_trajectory(ledger, name, E0)
    ledger.enqueue(t, ledger.engine(E0), priority)
    return t


# -- accounts ------------------------------------------------------------------------------------


def test_a_queue_is_by_priority_then_by_arrival():
    ledger = ledger_of(1)
    for name, priority in (("a", 1.0), ("b", 2.0), ("c", 2.0)):
        queued(ledger, name, priority)
    engine, order = ledger.engine(E0), []
    while (head := engine.head()) is not None:
        order.append(head.id)
        ledger.start(head, engine)
        ledger.check()
    assert order == ["b", "c", "a"]


def test_a_new_key_in_the_queue_leaves_a_stale_entry_that_is_skipped():
    ledger = ledger_of(1)
    a, b = queued(ledger, "a", 9.0), queued(ledger, "b", 5.0)
    engine = ledger.engine(E0)
    ledger.enqueue(a, engine, 1.0)
    assert engine.head() is b
    assert [t.id for t in engine.waiting()] == ["b", "a"]
    assert engine.in_flight == 2
    ledger.unqueue(b, engine)
    assert engine.head() is a


def test_slots_limit_what_fits():
    ledger = ledger_of(1, max_running=1)
    engine = ledger.engine(E0)
    waits = queued(ledger, "waits")
    assert engine.fits(waits)
    runs = add_trajectory(ledger, "runs", E0)
    ledger.enqueue(runs, engine, 1.0)
    ledger.start(runs, engine)
    assert not engine.fits(waits)
    ledger.end_run(runs, engine, 5)
    runs.phase = "tool"
    assert engine.fits(waits)
    ledger.check()


def test_an_idle_engine_takes_what_it_can_hold_whatever_is_parked_or_reserved():
    ledger = ledger_of(1)
    engine = ledger.engine(E0)
    parked = add_trajectory(ledger, "parked", E0, context_tokens=59_000)
    ledger.park(parked, engine)
    waits = queued(ledger, "waits")
    waits.context_tokens, waits.reserved_tokens = 50_000, 99_000
    assert engine.fits(waits)
    ledger.start(waits, engine)
    ledger.check()
    assert not engine.fits(queued(ledger, "second"))


def test_parked_kv_is_given_back_once_by_whichever_way_it_goes():
    ledger = ledger_of(1, 1)
    engine = ledger.engine(E0)
    contexts = {"returns": 1_000, "moves": 2_000, "ends": 4_000, "stays": 8_000}
    ts = {n: add_trajectory(ledger, n, E0, context_tokens=c) for n, c in contexts.items()}
    for t in ts.values():
        ledger.park(t, engine)
        ledger.check()
    assert engine.parked_kv_tokens == 15_000
    assert ledger.unpark(ts["returns"]) is engine
    assert ledger.unpark(ts["returns"]) is None
    assert engine.parked_kv_tokens == 14_000
    ledger.set_home(ts["moves"], E1)
    assert engine.parked_kv_tokens == 12_000
    assert ledger.engine(E1).parked_kv_tokens == 0, "who moves it says whether it is kept there"
    ledger.finish(ts["ends"])
    assert engine.parked_kv_tokens == 8_000
    ledger.set_home(ts["stays"], E0)
    assert engine.parked_kv_tokens == 8_000
    ledger.check()


def test_parked_kv_counts_what_it_was_even_when_the_context_is_rewritten():
    ledger = ledger_of(1)
    t = add_trajectory(ledger, "t", E0, context_tokens=9_000)
    ledger.park(t, ledger.engine(E0))
    t.context_tokens = 10
    ledger.check()
    ledger.unpark(t)
    assert ledger.engine(E0).parked_kv_tokens == 0


def test_an_ended_run_frees_what_was_taken_and_lowers_the_estimate():
    ledger = ledger_of(1)
    t = started(ledger, "t", context=2_000)
    engine = ledger.engine(E0)
    assert engine.estimated_kv_tokens == 2_000
    t.remaining_tokens = 100.0
    ledger.begin_preemption(t, engine)
    ledger.end_run(t, engine, 30)
    assert (t.output_tokens, t.context_tokens, t.remaining_tokens) == (30, 2_030, 70.0)
    assert (engine.estimated_kv_tokens, engine.in_flight, engine.preempting) == (0, 0, 0)
    with pytest.raises(LedgerError, match="does not run"):
        ledger.end_run(t, engine, 1)


def test_a_trajectory_ends_from_any_phase_and_leaves_nothing_behind():
    ledger = ledger_of(1)
    engine = ledger.engine(E0)
    ts = [started(ledger, "runs"), queued(ledger, "waits"), add_trajectory(ledger, "held")]
    in_tool = add_trajectory(ledger, "in-tool", E0)
    ledger.park(in_tool, engine)
    ledger.begin_preemption(ts[0], engine)
    for t in (*ts, in_tool):
        ledger.finish(t)
        ledger.check()
    assert ledger.unfinished == 0
    assert not ledger.trajectories
    assert not ledger.ended
    left = (engine.in_flight, engine.sessions, engine.estimated_kv_tokens, engine.parked_kv_tokens)
    assert left == (0, 0, 0, 0)
    assert not ledger.held


def test_a_dying_engines_queue_and_guests_are_held_or_homeless():
    ledger = ledger_of(1)
    first, second = queued(ledger, "first", 1.0), queued(ledger, "second", 9.0)
    guest = add_trajectory(ledger, "guest", E0)
    engine = ledger.engine(E0)
    ledger.close_engine(engine)
    ledger.close_engine(engine)
    assert ledger.engines == []
    waiting = sorted(engine.waiting(), key=lambda t: t.ticket)
    assert waiting == [first, second]
    for t in waiting:
        ledger.unqueue(t, engine)
        ledger.hold(t)
    ledger.set_home(guest, None)
    engine.alive = False
    assert engine.sessions == 0
    ledger.check()


# -- what a driver must not say (4) ----------------------------------------------------------------


def test_time_that_runs_backwards_is_refused_and_equal_times_are_not():
    ledger = Ledger()
    ledger.advance(2.0)
    ledger.advance(2.0)
    for wrong in (1.999, float("nan"), -1.0):
        with pytest.raises(LedgerError, match="backwards"):
            ledger.advance(wrong)
    assert ledger.now_s == 2.0


def test_unknown_and_duplicate_ids_are_refused():
    ledger = ledger_of(1)
    with pytest.raises(LedgerError, match="never ready"):
        ledger.engine(E1)
    with pytest.raises(LedgerError, match="never ready"):
        ledger.report(E1, 5)
    with pytest.raises(LedgerError, match="ready twice"):
        add_engine(ledger, "e0")
    with pytest.raises(LedgerError, match="never arrived"):
        ledger.trajectory(TrajectoryId("nobody"))
    t = add_trajectory(ledger, "t")
    with pytest.raises(LedgerError, match="arrived twice"):
        add_trajectory(ledger, "t")
    ledger.finish(t)
    with pytest.raises(LedgerError, match="cannot go from 'finished'"):
        ledger.finish(t)


def test_a_sample_is_kept_with_its_time():
    ledger = ledger_of(1)
    ledger.advance(3.0)
    ledger.report(E0, 77, 3)
    engine = ledger.engine(E0)
    assert (engine.reported_s, engine.reported_kv_used_tokens) == (3.0, 77)
    assert engine.reported_preemptions == 3
    assert engine.running_steps == 0


# -- the check sees what is wrong (1, 3, 8, 9) -----------------------------------------------------


def two_slots(ledger: Ledger) -> tuple[Engine, Trajectory, Trajectory]:
    return ledger.engine(E0), ledger.trajectories["runs"], ledger.trajectories["waits"]


def lose_from_queue(ledger: Ledger) -> None:
    two_slots(ledger)[2].ticket = -1


def lose_from_held(ledger: Ledger) -> None:
    ledger.held.clear()


def run_twice(ledger: Ledger) -> None:
    engine, _, waits = two_slots(ledger)
    engine.running[waits.id] = waits


def run_nowhere(ledger: Ledger) -> None:
    two_slots(ledger)[0].running.clear()


def home_without_phase(ledger: Ledger) -> None:
    two_slots(ledger)[1].home = None


def end_at_home(ledger: Ledger) -> None:
    two_slots(ledger)[1].phase = "finished"


def wait_for_nothing(ledger: Ledger) -> None:
    ledger.trajectories["in-tool"].phase = "migrating"
    ledger.unpark(ledger.trajectories["in-tool"])


def predict_without_a_request(ledger: Ledger) -> None:
    ledger.trajectories["in-tool"].phase = "predicting"


def predict_and_migrate(ledger: Ledger) -> None:
    t = ledger.trajectories["in-tool"]
    t.phase, t.predictions_due, t.migrating_to = "predicting", 1, EngineId("e0")


def miscount_sessions(ledger: Ledger) -> None:
    two_slots(ledger)[0].sessions += 1


def miscount_in_flight(ledger: Ledger) -> None:
    two_slots(ledger)[0].in_flight -= 1


def too_many_slots(ledger: Ledger) -> None:
    two_slots(ledger)[0].max_running = 0


def miscount_kv(ledger: Ledger) -> None:
    two_slots(ledger)[0].estimated_kv_tokens += 1


def too_much_kv(ledger: Ledger) -> None:
    started(ledger, "more")
    two_slots(ledger)[0].kv_capacity_tokens = 1_500


def miscount_parked(ledger: Ledger) -> None:
    two_slots(ledger)[0].parked_kv_tokens = 0


def park_a_runner(ledger: Ledger) -> None:
    two_slots(ledger)[1].parked = True


def preempt_without_a_command(ledger: Ledger) -> None:
    two_slots(ledger)[0].preempting = 1


def preempt_two(ledger: Ledger) -> None:
    engine, runs, _ = two_slots(ledger)
    ledger.begin_preemption(runs, engine)
    ledger.begin_preemption(started(ledger, "more"), engine)


def preempt_from_the_queue(ledger: Ledger) -> None:
    two_slots(ledger)[2].phase = "preempting"


def work_for_the_dead(ledger: Ledger) -> None:
    two_slots(ledger)[0].alive = False


def accept_when_closed(ledger: Ledger) -> None:
    ledger.engines.clear()


CORRUPTIONS = [
    lose_from_queue,
    lose_from_held,
    run_twice,
    run_nowhere,
    home_without_phase,
    end_at_home,
    wait_for_nothing,
    predict_without_a_request,
    predict_and_migrate,
    miscount_sessions,
    miscount_in_flight,
    too_many_slots,
    miscount_kv,
    too_much_kv,
    miscount_parked,
    park_a_runner,
    preempt_without_a_command,
    preempt_two,
    preempt_from_the_queue,
    work_for_the_dead,
    accept_when_closed,
]


def busy() -> Ledger:
    """One trajectory in every place that a trajectory can be in."""
    ledger = ledger_of(1)
    started(ledger, "runs")
    queued(ledger, "waits")
    in_tool = add_trajectory(ledger, "in-tool", E0)
    ledger.park(in_tool, ledger.engine(E0))
    add_trajectory(ledger, "held")
    return ledger


def test_a_sound_ledger_passes_its_check():
    busy().check()


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_the_check_sees_what_is_wrong(corrupt):
    ledger = busy()
    corrupt(ledger)
    with pytest.raises(AssertionError):
        ledger.check()
