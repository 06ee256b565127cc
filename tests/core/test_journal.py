"""Entries are recorded as they happen; the first that other code answers otherwise is named."""

from heddle_core import Entry, collecting, first_divergence, recorded
from heddle_core.commands import Command, Dispatch, Preempt
from heddle_core.events import Event, Tick
from heddle_core.ids import EngineId, TrajectoryId

E0 = EngineId("e0")
A, B = TrajectoryId("a"), TrajectoryId("b")


def dispatch(name: TrajectoryId) -> Dispatch:
    return Dispatch(trajectory=name, step=0, engine=E0, priority=0.0)


def ticks(*answers: tuple[Command, ...]) -> list[Entry]:
    return [Entry(Tick(time_s=float(i)), commands) for i, commands in enumerate(answers)]


def saying(*answers: tuple[Command, ...]):
    left = iter(answers)
    return lambda event: next(left)


def test_a_recorded_handle_returns_the_same_commands_and_calls_the_sink():
    sunk: list[Entry] = []
    handle = recorded(saying((dispatch(A),), ()), collecting(sunk))
    first, second = Tick(time_s=0.0), Tick(time_s=1.0)
    assert handle(first) == (dispatch(A),)
    assert handle(second) == ()
    assert sunk == [Entry(first, (dispatch(A),)), Entry(second, ())]


def test_equal_answers_do_not_diverge_even_as_another_kind_of_sequence():
    answers = ((dispatch(A),), (), (dispatch(B), dispatch(A)))
    entries = ticks(*answers)
    assert first_divergence(entries, saying(*answers)) is None
    assert first_divergence(entries, lambda e: list(answers[int(e.time_s)])) is None
    assert first_divergence([], saying()) is None


def test_the_first_divergence_ends_the_replay():
    seen: list[Event] = []

    def handle(event: Event) -> tuple[Command, ...]:
        seen.append(event)
        return ()

    entries = ticks((), (dispatch(A),), (dispatch(B),))
    found = first_divergence(entries, handle)
    assert found is not None
    assert (found.index, found.event) == (1, entries[1].event)
    assert (found.recorded, found.replayed) == ((dispatch(A),), ())
    assert len(seen) == 2


def divergence(was: tuple[Command, ...], is_now: tuple[Command, ...]) -> str:
    found = first_divergence(ticks(was), saying(is_now))
    assert found is not None
    return str(found)


def test_a_divergence_names_the_first_command_that_differs():
    text = divergence((dispatch(A), dispatch(B)), (dispatch(A), dispatch(A)))
    assert text.startswith("entry 0, Tick(time_s=0.0): recorded Dispatch(trajectory='b'")
    assert "replayed Dispatch(trajectory='a'" in text


def test_a_divergence_names_what_is_missing_or_new():
    preempt = Preempt(trajectory=A, step=0, engine=E0)
    assert "not replayed Preempt(" in divergence((dispatch(A), preempt), (dispatch(A),))
    assert "replayed besides Preempt(" in divergence((dispatch(A),), (dispatch(A), preempt))


def test_the_order_of_commands_counts():
    assert divergence((dispatch(A), dispatch(B)), (dispatch(B), dispatch(A)))
