"""What a trace records of an RL loop: reward, its time, the environment's start, the RL step."""

import json
from pathlib import Path

import numpy as np
import pytest

from heddle_trace import MissingRules, complete, describe, problems, read_trace, synth, write_trace
from heddle_trace.errors import TraceError
from heddle_trace.importers import import_trace
from heddle_trace.loop_fields import with_loop_fields
from heddle_trace.resample import resample
from heddle_trace.schema import TrajectoryScript
from heddle_trace.shrink import shrunk
from heddle_trace.table import Records, Scripts
from tests.trace.builders import record, trace

FIXTURES = Path(__file__).parent / "fixtures"
LOOP_FIELDS = ("reward", "reward_s", "env_start_s", "rl_step")
FULL = {"reward": -0.5, "reward_s": 12.5, "env_start_s": 3.0, "step": 7}


def fields(script: TrajectoryScript) -> tuple[object, ...]:
    return script.reward, script.reward_s, script.env_start_s, script.rl_step


def test_fields_survive_files_columns_and_scripts(tmp_path: Path):
    records = [record(trajectory_id="a", **FULL), record(trajectory_id="b")]
    read = read_trace(write_trace_to(tmp_path / "t.jsonl", records))
    assert list(read.records) == records
    scripts, _ = complete(read, rules=MissingRules(), seed=0)
    assert [fields(s) for s in scripts] == [(-0.5, 12.5, 3.0, 7), (None, None, None, None)]
    assert [fields(s) for s in scripts.take(np.array([1, 0]))] == [
        (None, None, None, None),
        (-0.5, 12.5, 3.0, 7),
    ]
    assert Scripts.of(list(scripts)) == scripts
    kept = scripts.take(slice(1, 2))
    assert [name for name in LOOP_FIELDS if kept.has(name)] == [
        name for name in LOOP_FIELDS if scripts.has(name)
    ]


def write_trace_to(path: Path, records: list) -> Path:
    write_trace(path, records)
    return path


def test_a_trace_without_them_has_no_columns():
    scripts, _ = complete(trace(record()), rules=MissingRules(), seed=0)
    assert not any(map(scripts.has, LOOP_FIELDS))
    assert fields(scripts[0]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("reward", "good", "give a number from -1e+09"),
        ("reward", 1e12, "give a number from -1e+09"),
        ("reward_s", -1.0, "give seconds from 0"),
        ("env_start_s", 1e9, "30 days"),
        ("step", -1, "give a whole number from 0"),
        ("step", 1.5, "give a whole number from 0"),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path: Path, field: str, value: object, remedy: str):
    path = tmp_path / "bad.jsonl"
    good = {"trajectory_id": "a", "group_id": "g", "workload": "w", "prompt_tokens": 1}
    steps = [{"output_tokens": 1}]
    lines = [{**good, "steps": steps}, {**good, "trajectory_id": "b", "steps": steps, field: value}]
    path.write_text("\n".join(map(json.dumps, lines)))
    (problem,) = problems(path)
    assert (problem.line, problem.field) == (2, field)
    assert remedy in problem.message
    with pytest.raises(TraceError, match=f"line 2: {field}"):
        read_trace(path)


def test_a_draw_and_a_smaller_copy_keep_them():
    records = Records.of([record(trajectory_id=f"t{k}", reward=k / 8, step=k) for k in range(4)])
    drawn, _ = resample(trace(*records), groups=1, samples=8, seed=1)
    assert sorted(r.reward for r in drawn) == [0.0, 0.0, 0.125, 0.125, 0.25, 0.25, 0.375, 0.375]
    assert all(r.reward == r.step / 8 for r in drawn)
    small = shrunk(record(**FULL), 2.0)
    assert (small.reward, small.reward_s, small.step) == (-0.5, 12.5, 7)


def test_describe_has_their_spread():
    stats = describe(trace(*(record(trajectory_id=f"t{k}", reward_s=k, step=k) for k in (2, 4))))
    assert stats.reward_s.mean == 3.0
    assert stats.rl_steps == (2, 4)
    assert stats.reward.n == stats.env_start_s.n == 0
    assert describe(trace(record())).rl_steps is None


def test_synthetic_services_move_nothing_else():
    plain = synth("search", 64, 1, samples_per_group=4)
    full = with_loop_fields(plain, seed=1, steps=4, env_start_s=3.0, reward_s=20.0)
    assert [r.steps for r in plain] == [r.steps for r in full]
    assert [r.step for r in full] == [k // 16 for k in range(64)]
    assert np.median([r.env_start_s for r in full]) == pytest.approx(3.0, rel=0.3)
    assert np.median([r.reward_s for r in full]) == pytest.approx(20.0, rel=0.3)
    assert all(r.reward_s is None and r.step is None for r in plain)
    with pytest.raises(TraceError, match="give 1 to 16, the number of prompts"):
        with_loop_fields(plain, seed=1, steps=17)
    with pytest.raises(TraceError, match="reward_s is -1"):
        with_loop_fields(plain, seed=1, reward_s=-1.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tau2.json", {"reward"}),
        ("openai_chat_tasks.json", {"reward"}),
        ("inspect.json", {"reward", "reward_s"}),
        ("inspect.eval", {"reward", "reward_s"}),
        ("verl.jsonl", {"reward", "step"}),
        ("mooncake.jsonl", set()),
    ],
)
def test_importers_fill_what_their_logs_record(tmp_path: Path, name: str, expected: set[str]):
    import_trace([FIXTURES / name], tmp_path / "t.jsonl")
    found = read_trace(tmp_path / "t.jsonl").records
    assert {key for r in found for key in FULL if getattr(r, key) is not None} == expected
    if "reward_s" in expected:
        assert found[0].reward == 1.0
        assert found[0].reward_s == pytest.approx(1.0)


def test_conversations_with_a_score_and_a_step_keep_them(tmp_path: Path):
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": messages, "score": 1, "step": 3}, {"messages": messages, "reward": "?"}]
    path = tmp_path / "dump.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    import_trace([path], tmp_path / "t.jsonl", format="openai-chat")
    scored, unscored = read_trace(tmp_path / "t.jsonl").records
    assert (scored.reward, scored.step) == (1.0, 3)
    assert (unscored.reward, unscored.step) == (None, None)
