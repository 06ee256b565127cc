"""Moves between engines that hand out no KV: the target prefills, beside what it does."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from heddle_core.commands import Command, Migrate
from heddle_core.defaults import SPARE_SLOTS
from heddle_core.events import (
    EngineFailed,
    EngineStopped,
    Event,
    MigrationFinished,
    RolloutStarted,
    StepFinished,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
)
from heddle_core.ids import EngineId, EngineShape
from heddle_rollout.engines import EngineRefusedError
from heddle_sim.latency import LatencyTable
from tests.rollout.one_world import E0, E1, A, B, Run, answer, dispatch, script, start, step
from tests.sim.one_engine import table

pytestmark = pytest.mark.usefixtures("clock")

MOVE = Migrate(trajectory=A, source=E0, target=E1)
E2 = EngineId("e2")
SMALL = EngineShape("small", 1)

SIZES = 8 + SPARE_SLOTS


def roomy(**changes: Any) -> LatencyTable:
    """The table of `one_engine`, with room for the spare slots of an engine of 8."""
    base_s = [1.0 + 0.1 * batch for batch in range(SIZES + 1)]
    return table(base_s=base_s, per_context_s=[0.0] * (SIZES + 1), **changes)


def moving(
    *others: Any, tool_s: float = 10.0, prompt: int = 320, slots: int = 8, **changes: Any
) -> Run:
    """As in `test_cluster`: a step of 20 blocks at e0, a move as its tool starts, on at e1."""
    over = []

    def extra(event: Event) -> Sequence[Command] | None:
        match event:
            case RolloutStarted():
                return [start(E0), start(E1, slots=slots)]
            case TrajectoryArrived(trajectory="b"):
                return [dispatch(B, 0, E1)]
            case ToolStarted(trajectory="a"):
                return [MOVE]
            case MigrationFinished() | ToolReturned(trajectory="a"):
                over.append(event)
                return [dispatch(A, 1, E1)] if len(over) == 2 else []
        return None

    after = step(prompt + 10, 1, shared=prompt + 1, tool=None)
    a = script("a", step(prompt, 1, tool_s=tool_s), after)
    engines: dict[str, Any] = {"engines": (E0, E1), "table": lambda shape: roomy()}
    settings = {**engines, "moves_by": "prefill"} | changes
    return Run(a, *others, extra=extra, **settings)


def test_an_engine_that_its_table_cannot_hold_is_refused_and_not_made_smaller() -> None:
    moving(slots=SIZES - SPARE_SLOTS)
    with pytest.raises(EngineRefusedError, match=f"max_running must be 1 to {SIZES}"):
        moving(slots=SIZES - SPARE_SLOTS + 1)


def test_the_target_prefills_what_the_source_held_and_the_step_finds_it() -> None:
    run = moving()
    moved = run.one(MigrationFinished)
    assert (moved.ok, moved.kv_tokens, moved.way) == (True, 320, "prefill")
    # One iteration without decoding: 1 s and 3.2 s of prefill, begun when the tool starts.
    assert moved.time_s == pytest.approx(4.2 + 4.2)
    first, second = run.all(StepFinished)
    assert (first.engine, second.engine, second.cached_tokens) == ("e0", "e1", 320)
    assert second.time_s == pytest.approx(4.2 + 10.0 + 1.1)


def test_a_tool_that_is_quicker_waits_for_the_prefill() -> None:
    run = moving(tool_s=1.0)
    assert run.one(MigrationFinished).time_s == pytest.approx(8.4)
    assert run.all(StepFinished)[1].time_s == pytest.approx(8.4 + 1.1)


def test_a_prefill_slows_decoding_steps_on_the_target() -> None:
    """A move of KV would have cost b nothing; so late, it meets a's next ten tokens as well."""
    b = answer("b", 100, 11)
    prefilled, moved = moving(b), moving(b, moves_by="kv")
    [by_prefill] = [e for e in prefilled.all(StepFinished) if e.trajectory == B]
    [by_kv] = [e for e in moved.all(StepFinished) if e.trajectory == B]
    assert by_kv.time_s == pytest.approx(13.0)
    assert by_prefill.time_s == pytest.approx(13.0 + 3.2 + 0.1)


def test_a_full_engine_has_slots_to_spare_for_it() -> None:
    run = moving(answer("b", 100, 30), slots=1)
    [b] = [e for e in run.all(StepFinished) if e.trajectory == B]
    assert run.one(MigrationFinished).time_s < b.time_s


def test_the_token_of_a_prefill_move_is_dropped() -> None:
    run = moving()
    assert sum(e.output_tokens for e in run.all(StepFinished)) == 2
    assert len(run.all(StepFinished)) == 2


def test_a_context_that_the_target_cannot_hold_is_not_prefilled_there() -> None:
    """e1 has another table than e0, by the GPU class."""
    sizes = {"g": roomy(), "small": roomy(kv_capacity_tokens=320)}

    def extra(event: Event) -> Sequence[Command] | None:
        match event:
            case RolloutStarted():
                return [
                    start(E0),
                    msgspec.structs.replace(start(E1), shape=SMALL),
                ]
            case ToolStarted():
                return [MOVE]
            case ToolReturned():
                return [dispatch(A, 1, E0)]
        return None

    a = script("a", step(320, 1, tool_s=10.0), step(330, 1, shared=321, tool=None))
    run = Run(a, extra=extra, table=lambda shape: sizes[shape.gpu], moves_by="prefill")
    moved = run.one(MigrationFinished)
    assert (moved.time_s, moved.kv_tokens, moved.way) == (pytest.approx(4.2), 0, "none")


@pytest.mark.parametrize(("engine", "ok"), [(E0, True), (E1, False)])
def test_only_the_death_of_the_target_ends_it(engine: EngineId, ok: bool) -> None:
    def extra(event: Event) -> Sequence[Command] | None:
        match event:
            case ToolStarted():
                return [MOVE]
            case ToolReturned():
                return [dispatch(A, 1, E2)]
        return None

    a = script("a", step(320, 1, tool_s=10.0), step(330, 1, shared=321, tool=None))
    run = Run(
        a,
        engines=(E0, E1, E2),
        extra=extra,
        faults=((6.0, engine),),
        moves_by="prefill",
        table=lambda shape: roomy(),
    )
    moved = run.one(MigrationFinished)
    assert moved.ok is ok
    failed = run.one(EngineFailed)
    assert failed.salvaged == ()
    assert run.events.index(failed) < run.events.index(moved)
    assert moved.time_s == pytest.approx(8.4 if ok else 6.0)
    assert not run.all(EngineStopped)
