"""Recordings of our own in the formats of others, and read back: exact in what each carries."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.diagnosis.own_runs import observed_run
from heddle.diagnosis.verdict import diagnosed
from heddle.runs import load_run
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.files import write_observed
from heddle_trace.observed.reading import ReadSteps, read_observed
from heddle_trace.observed.records import requests_of
from heddle_trace.observed.schema import ObservedRequest
from heddle_trace.schema import StepRecord, TrajectoryRecord
from tests.app.journals import Heddle, last_run
from tests.app.test_diagnose import QUICK, answered
from tests.app.test_observed_formats import (
    UNIX_S,
    by_trajectory,
    ended_s,
    llm_s,
    nemo_rl,
    otlp,
    own,
)
from tests.app.test_verify import TINY, check_exact, recorded, spans, stated
from tests.app.test_verify import answered as verified

NEVER = {"env_start_s", "lost_s", "reward_s", "tool_ok", "rl_step"}
"""Fields that no recording of these tests has."""


@pytest.fixture
def run(heddle: Heddle) -> Path:
    return recorded(heddle, "verl", "--gpus", 2, "--max-running", 3)


@pytest.fixture
def loop(heddle: Heddle) -> ObservedSteps:
    sizes = ("loop.groups=2", "loop.samples=4", "loop.batches=3", "loop.train_gpus=4")
    more = [word for each in (*sizes, "loop.repeat=true") for word in ("--set", each)]
    done = heddle(
        "loop", TINY, "--seeds", "1", "--regimes", "sync", "--gpus", 8, "--out", "runs", *more
    )
    assert done.exit_code == 0, done.output
    return observed_run(load_run(last_run()))


def check(read: ReadSteps, made: Sequence[ObservedRequest], absent: set[str]) -> None:
    """Every field that the format carries is as it was; `absent` are all the others."""
    fields = set(ObservedRequest.__struct_fields__) - NEVER
    assert fields - read.steps.requests.keys() == absent
    assert not read.notes.dropped
    assert read.notes.damaged == 0
    back = [r for r in read.steps.observations() if isinstance(r, ObservedRequest)]
    pairs = zip(by_trajectory(back), by_trajectory(list(made)), strict=True)
    for mine, theirs in pairs:
        zero = (theirs[0].start_s or 0.0) - (mine[0].start_s or 0.0)
        for one, other in zip(mine, theirs, strict=True):
            assert (one.start_s or 0.0) + zero == pytest.approx(other.start_s, abs=1e-5)
            for name in fields - absent - {"trajectory_id", "group_id", "start_s", "end_s", "tool"}:
                value = llm_s(other) if name == "llm_s" else getattr(other, name) or 0
                assert (getattr(one, name) or 0) == pytest.approx(value, abs=1e-5), name


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(UNIX_S + at_s, UTC).isoformat()


def tracelab(made: list[ObservedRequest]) -> Iterator[dict[str, Any]]:
    for rows in by_trajectory(made):
        for each in rows:
            given = "tool_result" if each.step else "user_message"
            result = {"tool_name": each.tool, "result_at": iso(ended_s(each) + (each.tool_s or 0))}
            yield {
                "session_id": each.trajectory_id,
                "round_index": each.step,
                "timing_events": [
                    {"event_type": given, "timestamp": iso(each.start_s or 0.0)},
                    {"event_type": "text", "timestamp": iso(ended_s(each))},
                ],
                "tools": [result] if each.tool else [],
                "input_tokens_total": each.input_tokens,
                "prefix_tokens": each.cached_tokens,
                "output_tokens": each.output_tokens,
            }


def dynamo(made: list[ObservedRequest]) -> Iterator[dict[str, Any]]:
    yield {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64}
    for rows in by_trajectory(made):
        for each in rows:
            before = rows[each.step - 1]
            after = {"request_id": f"{each.trajectory_id}/{each.step - 1}", "trigger": "completion"}
            waits = [{**after, "delay_ms": (before.tool_s or 0.0) * 1e3}]
            yield {
                "request_id": f"{each.trajectory_id}/{each.step}",
                "play_id": each.group_id,
                "session_id": each.trajectory_id,
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "not_before_ms": (each.start_s or 0.0) * 1e3,
                "dependencies": waits if each.step else [],
            }


def vllm_spans(made: list[ObservedRequest]) -> Iterator[dict[str, Any]]:
    for number, rows in enumerate(by_trajectory(made)):
        for each in rows:
            start_ns = round((UNIX_S + (each.start_s or 0.0)) * 1e9)
            latency = {f"in_model_{n}": getattr(each, f"{n}_s") for n in ("prefill", "decode")}
            times = {"in_queue": each.queue_s, **latency}
            tokens = {"prompt": each.input_tokens, "completion": each.output_tokens}
            found = [
                *((f"gen_ai.latency.time_{k}", {"doubleValue": v}) for k, v in times.items()),
                *((f"gen_ai.usage.{k}_tokens", {"intValue": f"{v}"}) for k, v in tokens.items()),
            ]
            span = {
                "traceId": f"{number:032x}",
                "name": "llm_request",
                "startTimeUnixNano": f"{start_ns}",
                "endTimeUnixNano": f"{start_ns + round(llm_s(each) * 1e9)}",
                "attributes": [{"key": key, "value": value} for key, value in found],
            }
            name = {"key": "service.name", "value": {"stringValue": each.engine}}
            resource = {"attributes": [name]}
            yield {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}


def sampled(made: list[ObservedRequest], system: str) -> Iterator[str]:
    """Metrics of engines at each time at which something changes."""
    sums = {"queue": "queue_s", "prefill": "prefill_s", "decode": "decode_s"}
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
    if system == "sglang":
        names = {"running": "num_running_reqs", "waiting": "num_queue_reqs"}
        sums = {"queue": "queue_s"}
    runs_s: list[tuple[float, float, float, ObservedRequest]] = []
    for r in made:
        times = (r.start_s or 0.0, (r.start_s or 0.0) + (r.queue_s or 0.0), ended_s(r))
        start_s, begun_s, end_s = (round(at, 6) for at in times)
        runs_s.append((start_s, begun_s, end_s, r))
    for at_s in sorted({at for each in runs_s for at in each[:3]}):
        yield f"# TIME {UNIX_S + at_s:.6f}"
        for engine in sorted({str(each.engine) for each in made}):
            here = [each for each in runs_s if each[-1].engine == engine]
            values = {
                names["running"]: sum(begun <= at_s < end for _, begun, end, _ in here),
                names["waiting"]: sum(start <= at_s < begun for start, begun, _, _ in here),
            }
            for part, field in sums.items():
                name = "queue_time_seconds_sum" if system == "sglang" else ""
                ended = (getattr(r, field) or 0.0 for _, _, end, r in here if end <= at_s)
                values[name or f"request_{part}_time_seconds_sum"] = sum(ended)
            for name, value in values.items():
                yield f'{system}:{name}{{instance="{engine}"}} {value!r}'


def tracker(loop: ObservedSteps) -> Iterator[dict[str, float]]:
    """Steps of a training as their parts, each from the end of the one before."""
    for step in diagnosed(loop, "").steps:
        parts = dict(step.parts)
        rest = {n: parts.pop(n, 0.0) for n in ("training", "update", "unaccounted")}
        yield {**rest, "rollout": sum(parts.values()), "step": step.end_s - step.start_s}


def skyrl(loop: ObservedSteps) -> Iterator[str]:
    for number, each in enumerate(tracker(loop), start=1):
        timing = {
            "timing/generate": each["rollout"],
            "timing/sync_weights": each["update"],
            "timing/train_critic_and_policy": each["training"],
            "timing/step": each["step"],
            "generate/trajectory_time_completion_mean": each["rollout"] / 2.0,
        }
        yield f"Step {number}: \n{ {k: f'{v:.4f}' for k, v in timing.items()} }"


def slime(loop: ObservedSteps) -> Iterator[str]:
    for number, each in enumerate(tracker(loop)):
        times = {
            "perf/rollout_time": each["rollout"],
            "perf/update_weights_time": each["update"],
            "perf/train_time": each["training"],
            "perf/train_wait_time": each["step"] - each["training"],
            "perf/step_time": each["step"],
        }
        yield f"perf {number}: {times}"


def perfetto(loop: ObservedSteps) -> Iterator[str]:
    """NeMo-RL's rollouts, and the driver's timers beside them."""
    made = [each for each in loop.observations() if isinstance(each, ObservedRequest)]
    trace = json.loads(nemo_rl(made))
    names = {"training": "policy_training", "update": "weight_sync", "step": "total_step_time"}
    steps = [(step.start_s, step.end_s, "step") for step in diagnosed(loop, "").steps]
    found = [*steps, *((each.start_s, each.end_s, each.phase) for each in loop.phases)]
    driver = {"name": "process_name", "args": {"name": "driver"}}
    trace["traceEvents"].append({"ph": "M", "pid": 2, **driver})
    for start_s, end_s, name in found:
        timer = {"ph": "X", "pid": 2, "tid": 0, "name": names[name]}
        trace["traceEvents"].append({**timer, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6})
    yield json.dumps(trace)


def written(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tracelab_carries_times_and_tokens_of_each_trajectory_by_itself(
    heddle: Heddle, run: Path, tmp_path: Path
):
    made = own(run)
    path = written(tmp_path / "rounds.jsonl", tracelab(made))
    check(
        read_observed([path]),
        made,
        {"group_id", "queue_s", "prefill_s", "decode_s", "engine"},
    )
    found = answered(heddle, path, *QUICK)
    parts = {each["part"]: each["seconds"] for each in found["parts"]}
    assert parts["llm"] == pytest.approx(sum(map(llm_s, made)), abs=1e-3)
    assert parts["tool"] == pytest.approx(sum(each.tool_s or 0.0 for each in made), abs=1e-3)
    assert parts["unaccounted"] == pytest.approx(0.0, abs=1e-3)
    assert "the time of your trajectories" in found["verdict"]


def test_agentic_mooncake_carries_all_but_generations(heddle: Heddle, run: Path, tmp_path: Path):
    made = own(run)
    path = written(tmp_path / "plays.jsonl", dynamo(made))
    read = read_observed([path])
    check(
        read,
        made,
        {"queue_s", "prefill_s", "decode_s", "llm_s", "cached_tokens", "engine"},
    )
    assert read.steps.header.clock == "shared"
    assert "No time of a generation is recorded." in answered(heddle, path, *QUICK)["verdict"]
    done = heddle("verify", path, *stated("verl"))
    assert done.exit_code == 2
    assert "no time of a generation to compare with" in done.stderr


def test_spans_of_vllm_carry_parts_and_engines_and_are_predicted_exactly(
    heddle: Heddle, run: Path, tmp_path: Path
):
    made = own(run)
    path = written(tmp_path / "spans.jsonl", vllm_spans(made))
    check(read_observed([path]), made, {"group_id", "llm_s", "tool", "cached_tokens"})
    found = verified(heddle, path, *stated("verl", 2, "cluster.max_running=3"))
    # A group shares its prompt: without names of groups fewer prefixes are cached.
    alone = [msgspec.structs.replace(each, group_id=None) for each in made]
    write_observed(tmp_path / "own.jsonl", observed_run(load_run(run)).header, alone)
    expected = verified(heddle, tmp_path / "own.jsonl", *stated("verl", 2, "cluster.max_running=3"))
    for key in ("measured_s", "simulated_s"):
        assert found[key] == pytest.approx(expected[key], abs=1e-4)
    assert abs(found["error_pct"]) < 0.1


def test_spans_of_rl_insight_as_otlp_carry_tokens_and_are_predicted_exactly(
    heddle: Heddle, run: Path, tmp_path: Path
):
    path = tmp_path / "spans.jsonl"
    path.write_text(otlp(list(spans(run)), lambda _: ("a", 0.0)))
    check(
        read_observed([path]),
        own(run),
        {"queue_s", "prefill_s", "decode_s", "engine", "cached_tokens"},
    )
    check_exact(verified(heddle, path, *stated("verl", 2, "cluster.max_running=3")), within_s=1e-4)


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_metrics_carry_the_batches_of_engines_and_no_trajectory(
    run: Path, tmp_path: Path, system: str
):
    made = own(run)
    path = tmp_path / "metrics.prom"
    path.write_text("\n".join(sampled(made, system)) + "\n")
    read = read_observed([path])
    assert (read.format, read.steps.count, read.steps.requests) == ("prometheus", 0, {})
    found, ran = diagnosed(read.steps, ""), diagnosed(observed_run(load_run(run)), "")
    for mine, theirs in zip(found.engines, ran.engines, strict=True):
        assert mine.engine == theirs.engine
        assert mine.busy_s == pytest.approx(theirs.busy_s, abs=1e-3)
        assert mine.mean_batch == pytest.approx(theirs.mean_batch, abs=1e-3)
    took = {n: sum(getattr(r, f"{n}_s") for r in made) for n in ("queue", "prefill", "decode")}
    if system == "sglang":
        took = {"queue": took["queue"], "llm": took["prefill"] + took["decode"]}
    parts = found.parts
    served_s = sum(parts[name] for name in took)
    for name, seconds in took.items():
        share = seconds / sum(took.values())
        assert parts[name] == pytest.approx(served_s * share, abs=1e-3), name
    assert sum(parts.values()) == pytest.approx(found.total_s)


@pytest.mark.parametrize(
    ("name", "write"), [("a.log", skyrl), ("b.log", slime), ("c.json", perfetto)]
)
def test_metrics_of_a_training_carry_its_phases(
    loop: ObservedSteps, tmp_path: Path, name: str, write: Callable[..., Iterator[str]]
):
    path = tmp_path / name
    path.write_text("\n".join(write(loop)) + "\n")
    steps = read_observed([path]).steps
    found, ran = diagnosed(steps, ""), diagnosed(loop, "")
    assert len(found.steps) == len(ran.steps) == 3
    whole = name != "c.json"
    assert found.whole == whole
    for mine, theirs in zip(found.steps, ran.steps, strict=True):
        assert mine.end_s - mine.start_s == pytest.approx(theirs.end_s - theirs.start_s, abs=1e-3)
        for part in ("training", "update", "unaccounted"):
            assert mine.parts.get(part, 0.0) == pytest.approx(theirs.parts.get(part, 0.0), abs=1e-3)
        if whole:
            assert mine.trajectories == 0
            assert not mine.parts.keys() & {"decode", "prefill", "queue", "tool"}
        else:
            assert mine.parts["tool"] == pytest.approx(theirs.parts["tool"], abs=1e-3)
            assert mine.parts["tail"] == pytest.approx(theirs.parts["tail"], abs=1e-3)


def test_the_first_request_alone_has_the_start_of_the_environment_and_the_last_the_reward():
    steps = tuple(StepRecord(output_tokens=5, input_tokens=n) for n in (20, 30, 40))
    record = TrajectoryRecord(
        workload="agent",
        trajectory_id="a",
        group_id="g",
        prompt_tokens=10,
        arrival_s=7.0,
        env_start_s=2.0,
        reward_s=3.0,
        steps=steps,
    )
    found = [*requests_of(record)]
    assert [each.start_s for each in found] == [5.0, None, None]
    assert [each.env_start_s for each in found] == [2.0, None, None]
    assert [each.reward_s for each in found] == [None, None, 3.0]
    assert [each.input_tokens for each in found] == [10, 30, 40]
