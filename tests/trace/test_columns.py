"""Records and scripts in columns: the same as objects, in less memory."""

import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from heddle_trace import (
    MissingRules,
    StepScript,
    TraceError,
    TrajectoryRecord,
    TrajectoryScript,
    complete,
    read_trace,
    shuffled,
    synth,
    write_trace,
)
from heddle_trace.columns import ColumnBuilder
from heddle_trace.step_table import ScriptSteps
from heddle_trace.table import Records, Scripts
from tests.trace.builders import call, record, step, trace
from tests.trace.reference_complete import reference
from tests.trace.test_files import rollouts

TRACES = Path(__file__).parents[2] / "traces"
SAMPLE = MissingRules(
    tool_s="sample", tool_tokens="sample", prompt_tokens="sample", output_tokens="sample"
)
ZERO = MissingRules(
    tool_s="zero",
    tool_tokens="zero",
    prompt_tokens="zero",
    output_tokens="sample",
    cap_tool_s=0.5,
)


@given(rollout=rollouts, data=st.data())
def test_records_from_columns_are_the_records_that_went_in(rollout, data):
    columns = Records.of(rollout)
    assert columns == rollout
    assert rollout == columns
    assert Records.of(columns) is columns
    assert [columns[i] for i in range(-len(rollout), 0)] == list(rollout)
    assert columns[1:] == rollout[1:]
    order = data.draw(st.permutations(range(len(rollout))))
    taken = columns.take(np.array(order))
    assert list(taken) == [rollout[i] for i in order]
    assert Records.of(tuple(taken)) == taken
    made = [s.output_tokens for i in order for s in rollout[i].steps]
    assert taken.step("output_tokens").plain() == made


def test_records_of_other_values_differ():
    one, other = (Records.of([record(call(tool_s=s), step())]) for s in (0.5, 0.25))
    assert one != other
    assert one != [record(call(), step()), record()]
    assert one != "records"


def with_gaps(records: Records, share: float, seed: int) -> tuple[TrajectoryRecord, ...]:
    rng = np.random.default_rng(seed)

    def damaged(one: TrajectoryRecord) -> TrajectoryRecord:
        steps = []
        for each in one.steps:
            other = {
                "output_tokens": [None, 0],
                "tool": [None, "user", "a", "None"],
                "tool_s": [None, 0.0],
                "tool_tokens": [None],
                "input_tokens": [0, 5, 500, 20_000],
                "cached_tokens": [0, 5, 500],
            }
            changes = {
                name: values[rng.integers(len(values))]
                for name, values in other.items()
                if rng.random() < share
            }
            steps.append(msgspec.structs.replace(each, **changes))
        return msgspec.structs.replace(
            one,
            steps=tuple(steps),
            prompt_tokens=None if rng.random() < share else one.prompt_tokens,
            arrival_s=[None, 0.0, 3.5][rng.integers(3)],
            workload=["coding", "other"][rng.integers(2)],
            truncated=[None, True, False][rng.integers(3)],
        )

    return tuple(damaged(one) for one in records)


@pytest.mark.parametrize("rules", [SAMPLE, ZERO], ids=["sample", "zero"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("workload", ["coding", "math"])
def test_gaps_are_filled_as_step_by_step(workload, share, rules):
    records = with_gaps(synth(workload, 150, 3, samples_per_group=5), share, seed=7)
    scripts, _ = complete(trace(*records), rules=rules, seed=11)
    assert list(scripts) == reference(records, rules, 11)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl*")), ids=lambda path: path.name)
def test_shipped_traces_are_completed_as_step_by_step(path):
    read = read_trace(path)
    scripts, _ = complete(read, rules=MissingRules(), seed=2)
    assert list(scripts) == reference(read.records, MissingRules(), 2)


def test_the_first_place_without_anything_to_draw_is_named():
    gap = call(tool="x", tool_s=None)
    made = trace(
        record(step(5), trajectory_id="a", workload="known"),
        record(gap, step(None), trajectory_id="b", group_id="h", prompt_tokens=None),
    )
    said = "prompt_tokens is missing ('b', step 0) and nothing is recorded to sample from, for "
    with pytest.raises(TraceError) as refused:
        complete(made, rules=SAMPLE, seed=0)
    assert f"{said}group h or workload coding; use another rule" in str(refused.value)
    with pytest.raises(TraceError, match=r"tool_s is missing .* for tool x or any tool;"):
        complete(made, rules=replace(SAMPLE, prompt_tokens="zero"), seed=0)


SCRIPTS = [
    TrajectoryScript(
        f"t{i}",
        f"g{i % 2}",
        "coding",
        float(i),
        tuple(
            StepScript(100 + i, 0, 7, ["a", None, "b"][k], 0.5, [True, False, None][k], 3)
            for k in range(1 + i % 3)
        ),
        truncated=bool(i % 2),
    )
    for i in range(7)
]


def test_scripts_from_columns_are_the_scripts_that_went_in():
    columns = Scripts.of(SCRIPTS)
    assert columns == SCRIPTS
    assert list(columns) == SCRIPTS
    assert Scripts.of(columns) is columns
    assert columns[-1] == SCRIPTS[-1]
    assert columns[2:5] == SCRIPTS[2:5]
    assert columns != SCRIPTS[:-1]
    assert columns[3].steps[-1] == SCRIPTS[3].steps[-1]
    assert columns[5].steps[1:] == SCRIPTS[5].steps[1:]
    assert replace(columns[5], task="x") == replace(SCRIPTS[5], task="x")


def test_figures_of_scripts_follow_their_order_and_selection():
    columns = Scripts.of(SCRIPTS).take(np.array([5, 0, 3]))
    assert columns.total("output_tokens").tolist() == [21, 7, 7]
    assert columns.counts.tolist() == [3, 1, 1]
    assert columns.first.tolist() == [0, 3, 4]
    assert columns.largest_context().tolist() == [112, 107, 110]
    assert columns.step("prompt_tokens").plain() == [105, 105, 105, 100, 103]
    assert columns.take(columns.counts > 1).ids == ["t5"]


def test_no_scripts_are_a_workload_too():
    nothing = Scripts.of(())
    assert len(nothing) == 0
    assert nothing.total("output_tokens").sum() == 0
    assert shuffled(nothing, 5) == nothing


def test_contexts_beyond_32_bits_are_kept_whole():
    steps = [step(10_000_000, tool="x", tool_s=0.0, tool_tokens=10_000_000) for _ in range(300)]
    scripts, _ = complete(trace(record(*steps)), rules=MissingRules(), seed=0)
    assert int(scripts.largest_context().max()) == 100 + 299 * 20_000_000 + 10_000_000
    assert scripts[0].steps[299].prompt_tokens == 100 + 299 * 20_000_000
    assert list(scripts) == reference([record(*steps)], MissingRules(), 0)


def test_pickled_scripts_share_their_arrays():
    scripts, _ = complete(trace(*synth("coding", 50, 1)), rules=MissingRules(), seed=0)
    assert pickle.loads(pickle.dumps(scripts)) == scripts
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(scripts, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(data, buffers=buffers)
    assert back == scripts
    assert np.shares_memory(back.table.rows, scripts.table.rows)
    one = pickle.loads(pickle.dumps(scripts[3]))
    assert isinstance(one.steps, ScriptSteps)
    assert one == scripts[3]


def test_a_trace_takes_tens_of_bytes_a_step(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    written = write_trace(path, synth("coding", 2_000, 1))
    steps = len(Records.of(written.records).step("tool").values)
    complete(read_trace(path), rules=MissingRules(), seed=0)  # imports and caches
    tracemalloc.start()
    try:
        read = read_trace(path)
        scripts, _ = complete(read, rules=MissingRules(), seed=0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(scripts) == 2_000
    assert held < 90 * steps, f"{held / steps:.0f} bytes a step"


def test_a_trace_is_written_in_less_memory_than_its_text(tmp_path):
    path = tmp_path / "t.jsonl"
    records = synth("coding", 10_000, 1)
    tracemalloc.start()
    try:
        write_trace(path, records)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size


def test_columns_widen_and_keep_what_was_not_recorded_before():
    number, nothing = ColumnBuilder("number"), ColumnBuilder("real")
    for part in ([None, None], [1, None], [2**40], [None], [3]):
        number.add(part)
        nothing.add([None] * len(part))
    column = number.joined()
    assert column is not None
    assert column.plain() == [None, None, 1, None, 2**40, None, 3]
    assert nothing.joined() is None
