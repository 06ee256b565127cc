"""Figures of hand-made journals, worked out by hand."""

from typing import Any

import pyarrow as pa
import pytest

from heddle.runs.metrics import MetricsError, measure
from heddle_core.commands import Migrate, Predict, Preempt
from heddle_core.events import (
    EngineFailed,
    MigrationFinished,
    Predicted,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.journal import Entry
from tests.app.journals import (
    arrived,
    batches,
    dispatch,
    done,
    entry,
    measured,
    numbered,
    of_table,
    ready,
    steps_of,
)

A, B, E0, E1 = TrajectoryId("a"), TrajectoryId("b"), EngineId("e0"), EngineId("e1")


def finished(trajectory: str, at: float, outcome: Any = "completed") -> TrajectoryFinished:
    return TrajectoryFinished(time_s=at, trajectory=TrajectoryId(trajectory), outcome=outcome)


def story() -> list[Entry]:
    """`a` is preempted once, waits, uses a tool and moves; `b` waits for the first slot of e0."""
    return numbered(
        entry(ready("e0")),
        entry(ready("e1", tp=2)),
        entry(arrived("a", at=1.0, prompt=100), dispatch("a", 0, "e0")),
        entry(arrived("b", at=1.0, prompt=50)),
        entry(
            StepPreempted(
                time_s=3.0,
                trajectory=A,
                step=0,
                engine=E0,
                output_tokens=11,
                queued_s=0.25,
                prefill_s=0.75,
                decode_s=1.0,
            ),
            dispatch("b", 0, "e0"),
        ),
        entry(
            done("b", 0, "e0", at=5.0, tokens=21, reason="answer", prefill_s=1.0, decode_s=1.0),
            dispatch("a", 0, "e0"),
        ),
        entry(finished("b", 5.0)),
        entry(done("a", 0, "e0", at=7.0, tokens=11, prefill_s=0.5, decode_s=1.5, cached_tokens=96)),
        entry(
            ToolStarted(time_s=7.0, trajectory=A, step=0, tool="bash"),
            Migrate(trajectory=A, source=E0, target=E1),
        ),
        entry(
            MigrationFinished(
                time_s=8.0, trajectory=A, source=E0, target=E1, ok=True, kv_tokens=112
            )
        ),
        entry(
            ToolReturned(
                time_s=9.0,
                trajectory=A,
                step=0,
                tool="bash",
                ok=True,
                observation_tokens=30,
                context_tokens=152,
            ),
            dispatch("a", 1, "e1"),
        ),
        entry(
            done(
                "a",
                1,
                "e1",
                at=11.0,
                tokens=5,
                reason="answer",
                prefill_s=1.0,
                decode_s=1.0,
                cached_tokens=112,
                recomputes=1,
            )
        ),
        entry(finished("a", 11.0)),
    )


def test_steps_add_up_their_dispatches():
    first, second, other = steps_of(story()).to_pylist()
    assert first["trajectory"] == "a"
    assert (first["dispatches"], first["preemptions"], first["output_tokens"]) == (2, 1, 22)
    assert (first["runnable_s"], first["dispatched_s"], first["ended_s"]) == (1.0, 1.0, 7.0)
    # Runnable again at 3.0, when it was preempted; dispatched again at 5.0.
    assert first["queueing_s"] == 2.0
    assert (first["tool"], first["tool_s"], first["observation_tokens"]) == ("bash", 2.0, 30)
    assert (second["engine"], second["prompt_tokens"], second["tool"]) == ("e1", 152, None)
    assert (other["trajectory"], other["queueing_s"], other["reason"]) == ("b", 2.0, "answer")


def test_trajectories_add_up_their_steps():
    a, b = measured(story()).trajectories.to_pylist()
    assert (a["steps"], a["output_tokens"], a["migrations"], a["recomputes"]) == (2, 27, 1, 1)
    assert (a["queueing_s"], a["engine_queued_s"], a["tool_s"]) == (2.0, 0.25, 2.0)
    assert (b["arrived_s"], b["finished_s"], b["outcome"]) == (1.0, 5.0, "completed")


def test_summary_of_the_story():
    s = measured(story()).summary
    assert s["makespan_s"] == 10.0
    assert s["throughput_tok_s"] == pytest.approx(48 / 10)
    # e0 runs from 1 to 7 without a gap, e1 (two GPUs) from 9 to 11; both live for all 10 s.
    assert s["utilisation"] == pytest.approx((1 * 6 + 2 * 2) / (3 * 10))
    # Prompts: a 100, b 50, a again 100 + 11 kept, a's second step 152.
    assert s["prefix_hit"] == pytest.approx((96 + 112) / (100 + 50 + 111 + 152))
    assert s["prefix_hit_resumed"] == pytest.approx((96 + 112) / (111 + 152))
    assert s["tpot_mean_ms"] == pytest.approx(1e3 * (1 / 10 + 1 / 20 + 1.5 / 10 + 1 / 4) / 4)
    assert s["ttft_mean_s"] == pytest.approx((1.0 + 1.0 + 0.5 + 1.0) / 4)
    assert s["queueing_mean_s"] == pytest.approx((2.25 + 2.0 + 0.0) / 3)
    assert s["queueing_longest_s"] == 2.25
    assert (s["preemptions_policy"], s["preemptions_engine"], s["preemptions"]) == (1, 1, 2)
    assert (s["migrations"], s["migrations_ok"], s["migrated_kv_tokens"]) == (1, 1, 112)
    assert (s["arrived"], s["completed"], s["dispatches"], s["steps"]) == (2, 2, 4, 3)


def test_interference_compares_with_the_best_seen_at_the_same_tp_degree():
    s = measured(story()).summary
    # At TP 1 only b's step has 16 tokens or more: 0.05 s per token. At TP 2 there is one step.
    assert s["interference_reference"] == "best_seen"
    assert s["interference_factor"] == pytest.approx((1 + 1 + 1.5 + 1) / (0.05 * 40 + 0.25 * 4))


def test_interference_compares_with_a_profile_when_there_is_one():
    s = measured(story(), lambda gpu, tp, context: 0.025 / tp + 0.0 * context).summary
    assert s["interference_reference"] == "profile"
    assert s["interference_factor"] == pytest.approx(4.5 / (0.025 * 40 + 0.0125 * 4))


def test_a_failed_engine_ends_its_dispatches_and_saved_tokens_count():
    entries = [
        entry(ready("e0")),
        entry(ready("e1")),
        entry(arrived("a", prompt=100), dispatch("a", 0, "e0")),
        entry(
            EngineFailed(time_s=4.0, engine=E0, reason="fault", salvaged=((A, 7),)),
            dispatch("a", 0, "e1"),
        ),
        entry(done("a", 0, "e1", at=6.0, tokens=3, reason="answer", decode_s=1.0)),
        entry(finished("a", 6.0)),
    ]
    (step,) = steps_of(entries).to_pylist()
    assert (step["losses"], step["dispatches"], step["output_tokens"]) == (1, 2, 10)
    assert (step["engine"], step["queueing_s"]) == ("e1", 0.0)
    s = measured(entries).summary
    assert (s["engine_failures"], s["dispatches_lost"]) == (1, 1)
    # e0 was there for 4 s, e1 for 6; busy 4 and 2.
    assert s["utilisation"] == pytest.approx((4 + 2) / (4 + 6))
    # The prompt of the lost dispatch is not known to have been prefilled; the other has 7 more.
    assert s["prefix_hit"] == 0.0


def test_a_trajectory_left_over_refuses_a_summary():
    with pytest.raises(MetricsError, match="2 trajectories arrived, but 1 completed"):
        measured(story()[:-1])


def test_a_trajectory_that_ends_twice_refuses_a_summary():
    with pytest.raises(MetricsError, match="3 ends"):
        measured([*story(), entry(finished("b", 12.0))])


def test_a_requested_preemption_that_lost_the_race_is_none():
    entries = [
        entry(ready("e0")),
        entry(arrived("a"), dispatch("a", 0, "e0")),
        entry(arrived("b", at=0.5), Preempt(trajectory=A, step=0, engine=E0)),
        entry(done("a", 0, "e0", at=1.0, tokens=5), dispatch("b", 0, "e0")),
        entry(finished("a", 1.0)),
        entry(done("b", 0, "e0", at=2.0, tokens=5)),
        entry(finished("b", 2.0, "cancelled")),
    ]
    s = measured(entries).summary
    assert (s["preemptions"], s["completed"], s["cancelled"]) == (0, 1, 1)


def test_chunks_of_the_journal_make_no_difference():
    entries, steps = story(), list[pa.Table]()
    cut = pa.Table.from_batches(batches(entries[:3], entries[3:4], entries[4:]))
    found = measure(of_table(cut), on_steps=steps.append)
    assert found.summary == measured(entries).summary
    assert pa.concat_tables(steps).to_pylist() == steps_of(entries).to_pylist()


def test_an_answer_is_late_once_its_tool_has_ended():
    def predicted(at: float, step: int) -> Entry:
        return entry(
            ToolStarted(time_s=at, trajectory=A, step=step, tool="bash"),
            Predict(trajectory=A, step=step, estimate=9.0),
        )

    def answered(at: float, step: int) -> Entry:
        return entry(Predicted(time_s=at, trajectory=A, step=step, remaining_tokens=9.0))

    def returned(at: float, step: int) -> Entry:
        return entry(
            ToolReturned(
                time_s=at,
                trajectory=A,
                step=step,
                tool="bash",
                ok=True,
                observation_tokens=9,
                context_tokens=120,
            ),
            dispatch("a", step + 1, "e0"),
        )

    def made(step: int, at: float) -> Entry:
        return entry(done("a", step, "e0", at=at, tokens=5))

    journal = [
        entry(ready("e0")),
        entry(arrived("a"), dispatch("a", 0, "e0")),
        *(made(0, 1.0), predicted(1.0, 0), answered(1.1, 0), returned(1.2, 0)),
        *(made(1, 2.0), predicted(2.0, 1), returned(2.0, 1), answered(2.1, 1)),
        *(made(2, 3.0), predicted(3.0, 2), returned(3.1, 2)),
        *(made(3, 3.2), predicted(3.2, 3), answered(3.3, 2)),
        entry(finished("a", 3.4)),
    ]
    summary = measured(journal).summary
    # In time: that of step 0. Late: of steps 1 and 2. Never answered: of step 3.
    assert (summary["predictions"], summary["predictions_late"]) == (4, 3)
