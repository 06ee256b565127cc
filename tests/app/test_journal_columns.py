"""The journal as columns gives back exactly what was put in."""

import math
import sys
import typing
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.runs.files import RunError
from heddle.runs.journal_entries import decode
from heddle.runs.journal_schema import schema
from heddle_core.commands import Command, Dispatch, SolvePlan
from heddle_core.events import Event, PlanSolved, RolloutStarted, Tick
from heddle_core.ids import EngineId, EngineShape, RolloutId
from heddle_core.journal import Entry
from heddle_core.plans import PlanProblem, ResourcePlan
from tests.app.journals import arrived, batches, dispatch, entry, table


@dataclass(frozen=True, slots=True)
class Problem:
    """A planning problem with nested values."""

    lengths: tuple[float, ...]
    by_tp: dict[int, float]
    charged_s: float = 1.5

    def solve(self) -> ResourcePlan:
        return ResourcePlan(engines=())


# Identifiers may hold any text; floats any value but NaN, which is not equal to itself.
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(EngineId, st.text(min_size=1).map(EngineId))
st.register_type_strategy(int, st.integers(-(2**62), 2**62))
PROBLEMS = st.builds(
    Problem,
    lengths=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    by_tp=st.dictionaries(st.integers(1, 8), st.floats(allow_nan=False), max_size=2),
)


def any_of(union: object) -> st.SearchStrategy[typing.Any]:
    classes = [c for c in typing.get_args(union) if c is not SolvePlan]
    return st.one_of([st.from_type(c) for c in classes])


EVENTS = any_of(Event)
COMMANDS = any_of(Command) | st.builds(SolvePlan, plan=st.integers(0, 9), problem=PROBLEMS)
PAIRS = st.lists(st.tuples(EVENTS, st.lists(COMMANDS, max_size=3)), max_size=8)


def with_causes(pairs: list[tuple[Event, list[Command]]]) -> list[Entry]:
    """Entries as a controller makes them: a command's cause is the number of its event."""
    return [
        Entry(event, tuple(msgspec.structs.replace(c, cause=number) for c in commands))
        for number, (event, commands) in enumerate(pairs)
    ]


ENTRIES = PAIRS.map(with_causes)


@settings(max_examples=60)
@given(entries=ENTRIES)
def test_every_event_and_command_comes_back_equal(entries: list[Entry]):
    assert list(decode(table(entries).to_batches())) == entries


def test_floats_come_back_bit_by_bit():
    awkward = [0.1 + 0.2, 5e-324, -0.0, math.inf, sys.float_info.max, 1 / 3]
    entries = [entry(Tick(time_s=0.0), dispatch("a", 0, "e0", priority=x)) for x in awkward]
    back = list(decode(table(entries).to_batches()))
    assert [e.commands[0].priority.hex() for e in back] == [x.hex() for x in awkward]


def test_infinities_survive_in_nested_values():
    plan = ResourcePlan(engines=(), estimated_makespan_s=math.inf)
    entries = [entry(PlanSolved(time_s=1.0, plan=1, resource_plan=plan))]
    assert list(decode(table(entries).to_batches())) == entries


def test_rows_have_order_and_cause():
    entries = [
        entry(RolloutStarted(time_s=0.0, rollout=RolloutId("r"), trajectories=1)),
        entry(arrived("a", at=1.5), dispatch("a", 0, "e0"), dispatch("a", 1, "e0")),
    ]
    first = [entry(Tick(time_s=0.0))] * 10
    _, batch = batches(first, entries)
    assert batch.column("seq").to_pylist() == [10, 11, 12, 13]
    assert batch.column("cause").to_pylist() == [None, None, 11, 11]
    assert batch.column("time_s").to_pylist() == [0.0, 1.5, 1.5, 1.5]
    assert batch.column("kind").to_pylist() == ["event", "event", "command", "command"]


def test_no_entries_make_no_rows():
    assert batches([])[0].num_rows == 0


def test_a_column_name_means_one_type():
    names = [f.name for f in schema()]
    assert len(names) == len(set(names))
    for cls in (*typing.get_args(Event), *typing.get_args(Command)):
        for name, hint in typing.get_type_hints(cls).items():
            nested = hint in (PlanProblem, ResourcePlan, EngineShape)
            assert name in names or nested or name in ("salvaged", "hints")


def test_an_unknown_name_is_refused():
    batch = table([entry(Tick(time_s=0.0))])
    other = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(["Yawned"]))
    changed = batch.set_column(batch.schema.get_field_index("name"), "name", other)
    with pytest.raises(RunError, match="Yawned"):
        list(decode(changed.to_batches()))


def test_a_problem_of_an_unknown_package_is_not_imported():
    entries = [entry(Tick(time_s=0.0), SolvePlan(plan=1, problem=Problem((1.0,), {2: 0.5})))]
    rows = table(entries)
    payload = rows.column("payload").to_pylist()
    foreign = [t and t.replace(Problem.__module__, "antigravity") for t in payload]
    changed = rows.set_column(
        rows.schema.get_field_index("payload"), "payload", pa.array(foreign, pa.string())
    )
    with pytest.raises(RunError, match="antigravity"):
        list(decode(changed.to_batches()))
    assert "antigravity" not in sys.modules


def test_dispatch_has_columns_of_its_own():
    assert set(typing.get_type_hints(Dispatch)) <= {f.name for f in schema()}
