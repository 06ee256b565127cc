"""Events of a journal back into records; tests/app has the way through real runs."""

import pytest

from heddle_core.events import (
    EngineFailed,
    EngineReady,
    Scored,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_trace import TraceError
from heddle_trace.extract import extract

T, E = TrajectoryId("t"), EngineId("e0")


def arrived(time_s: float = 0.0, name: TrajectoryId = T) -> TrajectoryArrived:
    return TrajectoryArrived(
        time_s=time_s,
        rollout=RolloutId("r"),
        trajectory=name,
        group=GroupId("g"),
        task="coding",
        prompt_tokens=100,
    )


def finished(time_s: float, step: int, tokens: int, reason="tool_call") -> StepFinished:
    return StepFinished(
        time_s=time_s, trajectory=T, step=step, engine=E, output_tokens=tokens, reason=reason
    )


def preempted(time_s: float, step: int, tokens: int) -> StepPreempted:
    return StepPreempted(time_s=time_s, trajectory=T, step=step, engine=E, output_tokens=tokens)


def started(time_s: float, step: int, tool: str = "bash") -> ToolStarted:
    return ToolStarted(time_s=time_s, trajectory=T, step=step, tool=tool)


def returned(time_s: float, step: int, added: int, context: int, tool="bash", ok=True):
    return ToolReturned(
        time_s=time_s,
        trajectory=T,
        step=step,
        tool=tool,
        ok=ok,
        observation_tokens=added,
        context_tokens=context,
    )


def ended(time_s: float, outcome="completed", name: TrajectoryId = T) -> TrajectoryFinished:
    return TrajectoryFinished(time_s=time_s, trajectory=name, outcome=outcome)


def test_steps_are_put_together_from_what_was_preempted_lost_and_finished():
    (record,), report = extract(
        [
            EngineReady(
                time_s=0.0,
                engine=E,
                shape=EngineShape("h100", 1),
                kv_capacity_tokens=1,
                max_running=1,
            ),
            arrived(2.0),
            preempted(3.0, 0, 7),
            EngineFailed(time_s=4.0, engine=E, reason="", salvaged=((T, 5),)),
            finished(6.0, 0, 8),
            started(6.0, 0),
            returned(6.5, 0, 30, 150),
            finished(9.0, 1, 11),
            started(9.0, 1, tool=""),
            returned(9.0, 1, 0, 120, tool="", ok=None),
            finished(10.0, 2, 4),
            started(10.0, 2, tool="submit"),
            ended(11.25, "truncated"),
        ],
        source="run r",
        model="m",
    )
    assert report.left_out == {}
    first, second, third = record.steps
    assert (first.output_tokens, first.tool, first.tool_s, first.tool_tokens) == (
        20,
        "bash",
        0.5,
        30,
    )
    assert (first.t_s, first.llm_s, first.tool_ok, first.input_tokens) == (0.0, 4.0, True, None)
    # Nothing ran after the second; then the agent compacted its history.
    assert (second.tool, second.tool_s, second.tool_tokens) == (None, None, 0)
    assert (second.t_s, second.llm_s) == (4.5, 2.5)
    assert (third.input_tokens, third.tool, third.tool_s) == (120, "submit", 1.25)
    assert (third.tool_tokens, third.tool_ok) == (None, None)
    assert (record.arrival_s, record.truncated, record.prompt_tokens) == (2.0, True, 100)
    assert (record.source, record.model) == ("run r", "m")


def test_trajectories_without_an_end_are_left_out_and_counted():
    names = [TrajectoryId(name) for name in "abcd"]
    events = [arrived(0.0, name) for name in names]
    events += [arrived(), finished(1.0, 0, 3, "answer"), ended(1.0)]
    events += [ended(2.0, "failed", names[0]), ended(2.0, "cancelled", names[1])]
    records, report = extract(events)
    assert [r.trajectory_id for r in records] == ["t"]
    assert report.left_out == {"failed": 1, "cancelled": 1, "unfinished": 2}


def test_a_trajectory_that_fell_silent_between_two_steps_ends_with_its_last_answer():
    silent = [arrived(), finished(1.0, 0, 3), started(1.0, 0), returned(2.0, 0, 7, 110)]
    silent += [finished(4.0, 1, 5), started(4.0, 1), ended(1804.0, "cancelled")]
    (record,), report = extract(silent, with_silent=True)
    assert [step.output_tokens for step in record.steps] == [3, 5]
    assert (record.steps[1].tool, record.steps[1].tool_s) == (None, None)
    assert report.left_out == {}
    with pytest.raises(TraceError, match="--with-silent"):
        extract(silent)


def test_a_trajectory_cancelled_in_a_step_is_left_out_though_silent_ones_are_kept():
    other = TrajectoryId("other")
    events = [arrived(), finished(1.0, 0, 3), started(1.0, 0), returned(2.0, 0, 7, 110)]
    events += [preempted(3.0, 1, 2), ended(3.0, "cancelled")]
    events += [arrived(3.0, other), ended(4.0, "cancelled", other)]
    with pytest.raises(TraceError, match="2 cancelled"):
        extract(events, with_silent=True)


@pytest.mark.parametrize(
    "events",
    [
        [finished(1.0, 0, 3)],
        [arrived(), finished(1.0, 0, 3), finished(2.0, 1, 3)],
        [arrived(), returned(1.0, 0, 3, 4)],
    ],
)
def test_events_that_no_run_has_are_reported(events):
    with pytest.raises(TraceError, match="the journal does not add up at"):
        extract(events)


def test_a_run_without_a_whole_trajectory_is_reported():
    with pytest.raises(TraceError, match="no trajectory of this run came to its end"):
        extract([arrived()])


@pytest.mark.parametrize(("reward", "kept"), [(0.25, 0.25), (0.0, None), (None, None)])
def test_a_loops_rewards_and_their_times_are_kept(reward: float | None, kept: float | None):
    (record,), _ = extract(
        [
            arrived(),
            finished(2.0, 0, 8, reason="answer"),
            ended(2.0),
            Scored(time_s=32.5, trajectory=T, reward=reward),
        ]
    )
    # A loop on a trace without rewards gives 0 to all: nothing that was recorded.
    assert (record.reward, record.reward_s) == (kept, 30.5)
