"""Measured steps in the formats of others: round trips of our own, clocks of hosts, bad input."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.diagnosis.own_runs import observed_run
from heddle.diagnosis.parts import diagnose
from heddle.runs import load_run
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.reading import read_observed
from heddle_trace.observed.schema import ObservedRequest
from tests.app.journals import Heddle, last_run
from tests.app.test_diagnose import FIXTURES, QUICK, answered, seen
from tests.app.test_verify import answered as verified
from tests.app.test_verify import check_exact, recorded, spans, stated

UNIX_S = 1.76e9
LLM = ("queue_s", "prefill_s", "decode_s")


def own(run: Path) -> list[ObservedRequest]:
    found = observed_run(load_run(run)).observations()
    return [each for each in found if isinstance(each, ObservedRequest)]


def by_trajectory(made: list[ObservedRequest]) -> Iterator[list[ObservedRequest]]:
    found: dict[str, list[ObservedRequest]] = {}
    for each in made:
        found.setdefault(each.trajectory_id, []).append(each)
    return (sorted(rows, key=lambda each: each.start_s or 0.0) for rows in found.values())


def llm_s(each: ObservedRequest) -> float:
    return sum(getattr(each, name) or 0.0 for name in LLM)


def ended_s(each: ObservedRequest) -> float:
    return (each.start_s or 0.0) + llm_s(each)


def generated(each: ObservedRequest) -> tuple[float, float]:
    start_s = UNIX_S + (each.start_s or 0.0)
    return start_s, start_s + llm_s(each)


def with_one_part(made: list[ObservedRequest]) -> ObservedSteps:
    """The run with the parts that formats of whole generations have."""
    none = dict.fromkeys(LLM)
    return seen(*(msgspec.structs.replace(r, llm_s=llm_s(r), engine=None, **none) for r in made))


def prime_rl(made: list[ObservedRequest]) -> str:
    lines = []
    for rows in by_trajectory(made):
        calls = [
            {
                "time": dict(zip(("start", "end"), generated(each), strict=True)),
                "usage": {
                    "prompt_tokens": (each.input_tokens or 0) - (each.cached_tokens or 0),
                    "cached_input_tokens": each.cached_tokens,
                    "completion_tokens": each.output_tokens,
                },
            }
            for each in rows
        ]
        first = rows[0]
        trace = {"id": first.trajectory_id, "calls": calls, "timing": {}}
        lines.append(json.dumps({"group": {"id": first.group_id}, "traces": [trace]}) + "\n")
    return "".join(lines)


def slime_trace(made: list[ObservedRequest]) -> str:
    rows = []
    for samples in by_trajectory(made):
        items = []
        for each in samples:
            start_s, end_s = generated(each)
            counts = {
                "prompt_tokens": each.input_tokens,
                "cached_tokens": each.cached_tokens,
                "completion_tokens": each.output_tokens,
            }
            items.append(
                {
                    "name": "sglang_generate",
                    "state": "closed_span",
                    "start_ts": round(start_s, 6),
                    "end_ts": round(end_s, 6),
                    "attrs": {"end_attrs": counts},
                }
            )
        name, group = samples[0].trajectory_id, samples[0].group_id
        rows.append({"trace_id": name, "group_index": group, "items": items})
    return json.dumps({"cache_version": 2, "pt_path": "rollout_0.pt", "rows": rows})


def nemo_rl(made: list[ObservedRequest]) -> str:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "vllm_rollouts"}}
    ]
    for tid, rows in enumerate(by_trajectory(made)):
        name = {"name": f"step 0 {rows[0].trajectory_id}"}
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": name})
        times = [
            ("sample", rows[0].start_s or 0.0, rows[-1].end_s or 0.0),
            *(("generation", r.start_s or 0.0, ended_s(r)) for r in rows),
            *(
                (
                    "env_step",
                    (r.start_s or 0.0) + llm_s(r),
                    (r.start_s or 0.0) + llm_s(r) + r.tool_s,
                )
                for r in rows
                if r.tool_s
            ),
        ]
        for kind, start_s, end_s in times:
            each = {"ph": "X", "pid": 1, "tid": tid, "name": kind}
            events.append({**each, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6})
    return json.dumps({"traceEvents": events})


def agent_perf_bench(made: list[ObservedRequest]) -> str:
    rows = [
        {
            "success": True,
            "session_id": each.trajectory_id,
            "turn_index": each.step,
            "dispatch_started_at_ms": round((each.start_s or 0.0) * 1e3, 2),
            "ttft_ms": round(((each.queue_s or 0.0) + (each.prefill_s or 0.0)) * 1e3, 2),
            "e2el_ms": round(llm_s(each) * 1e3, 2),
            "input_tokens": each.input_tokens,
            "output_tokens": each.output_tokens,
        }
        for rows in by_trajectory(made)
        for each in rows
    ]
    return json.dumps({"config": {}, "summary": {}, "per_request": rows})


def rl_insight(run: Path) -> str:
    return "".join(json.dumps(span) + "\n" for span in spans(run))


@pytest.fixture
def run(heddle: Heddle) -> Path:
    return recorded(heddle, "verl", "--gpus", 2)


def check_parts(found: ObservedSteps, expected: ObservedSteps, within_s: float) -> None:
    (step,), _, _ = diagnose(found)
    (other,), _, _ = diagnose(expected)
    assert step.parts.keys() == other.parts.keys()
    assert {"tool", "tail"} <= step.parts.keys()
    for part, seconds in other.parts.items():
        assert step.parts[part] == pytest.approx(seconds, abs=within_s), part
    assert step.trajectories == other.trajectories > 1


@pytest.mark.parametrize(
    ("name", "write", "within_s"),
    [
        ("traces.jsonl", prime_rl, 1e-4),
        ("rollout_0.trace_timeline_cache.json", slime_trace, 1e-4),
        ("perfetto.json", nemo_rl, 1e-3),
    ],
)
def test_a_recording_in_a_foreign_format_has_the_same_parts(
    run: Path, tmp_path: Path, name: str, write: Callable[..., str], within_s: float
):
    made = own(run)
    (tmp_path / name).write_text(write(made))
    read = read_observed([tmp_path / name])
    expected = with_one_part(made)
    check_parts(read.steps, expected, within_s)
    if "output_tokens" in read.steps.requests:
        for column in ("input_tokens", "cached_tokens", "output_tokens"):
            assert read.steps.column(column).ints.sum() == expected.column(column).ints.sum()


def test_a_recording_as_results_of_a_benchmark_has_its_generations(run: Path, tmp_path: Path):
    made = own(run)
    path = tmp_path / "results.json"
    path.write_text(agent_perf_bench(made))
    steps = read_observed([path]).steps
    decode_s, first_s = (steps.seconds(name).sum() for name in ("decode_s", "prefill_s"))
    assert decode_s == pytest.approx(sum(each.decode_s or 0.0 for each in made), abs=0.01)
    assert first_s + decode_s == pytest.approx(sum(map(llm_s, made)), abs=0.01)


@pytest.mark.parametrize(
    ("name", "write"), [("traces.jsonl", prime_rl), ("rollout_0.cache.json", slime_trace)]
)
def test_what_ran_is_predicted_exactly_from_formats_with_tokens(
    heddle: Heddle, run: Path, tmp_path: Path, name: str, write: Callable[..., str]
):
    (tmp_path / name).write_text(write(own(run)))
    check_exact(verified(heddle, tmp_path / name, *stated("verl")), within_s=1e-4)


def test_of_a_benchmark_prefill_holds_the_queue_of_the_engine(heddle: Heddle, tmp_path: Path):
    heddle("trace", "synth", "math", "--trajectories", 12, "--samples", 1, "-o", "all.jsonl")
    lines = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    alone = [{**row, "steps": [{**row["steps"][0], "tool": None, "tool_s": None}]} for row in lines]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alone))
    words = ("--policies", "verl", "--gpus", 1, "--max-running", 4, "--set", "report.page=false")
    done = heddle("compare", "t.jsonl", *words)
    assert done.exit_code == 0, done.output
    made = own(last_run())
    assert sum(each.queue_s or 0.0 for each in made) > 1.0
    (tmp_path / "results.json").write_text(agent_perf_bench(made))
    on = stated("verl", 1, "cluster.max_running=4", "logs.workload=math")
    check_exact(verified(heddle, tmp_path / "results.json", *on), within_s=1e-3)


def otlp(generations: list[dict[str, Any]], hosts: Callable[[int], tuple[str, float]]) -> str:
    """A line a span, whose host has a clock that is ahead."""
    lines = []
    for at, span in enumerate(generations):
        host, ahead_s = hosts(at)
        ahead = round(ahead_s * 1e9)
        span = {
            **span,
            "startTimeUnixNano": span.pop("start_time_unix_nano") + ahead,
            "endTimeUnixNano": span.pop("end_time_unix_nano") + ahead,
            "attributes": [
                {"key": k, "value": {"intValue" if isinstance(v, int) else "stringValue": v}}
                for k, v in span["attributes"].items()
            ],
        }
        named = {"attributes": [{"key": "host.name", "value": {"stringValue": host}}]}
        line = {"resourceSpans": [{"resource": named, "scopeSpans": [{"spans": [span]}]}]}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def test_hosts_whose_clocks_differ_are_put_on_one(heddle: Heddle, run: Path, tmp_path: Path):
    (tmp_path / "one.jsonl").write_text(otlp(list(spans(run)), lambda _: ("a", 0.0)))
    whole = otlp(list(spans(run)), lambda at: ("b", -7.0) if at % 3 == 1 else ("a", 0.0))
    (tmp_path / "two.jsonl").write_text(whole)
    one, two = (read_observed([tmp_path / f"{n}.jsonl"]) for n in ("one", "two"))
    assert not one.notes.assumed
    ((said, count),) = two.notes.assumed.items()
    assert said.startswith("spans of b, whose clock differs, moved by +")
    assert count == sum(1 for at in range(one.steps.count) if at % 3 == 1)
    moved_s = float(said.split("+")[1].split()[0])
    assert 0.0 < moved_s <= 7.0 + 1e-6
    done = heddle("diagnose", tmp_path / "two.jsonl", *QUICK)
    assert f"{count} {said}" in done.stderr


def lane(*generations: tuple[str, float, float], session: tuple[str, float, float] | None) -> str:
    found = [("gateway", each) for each in generations]
    found += [("session", session)] if session else []
    rows = [
        {
            "start_time_ns": round((UNIX_S + start_s) * 1e9),
            "end_time_ns": round((UNIX_S + end_s) * 1e9),
            "resource": {"attributes": {"host.name": host}},
            "attributes": {
                "monitor.trace_source": kind,
                "state_lane_id": "lane",
                "turn": turn,
                "completion_tokens": 5,
            },
        }
        for turn, (kind, (host, start_s, end_s)) in enumerate(found)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("generations", "session", "moved"),
    [
        ([("g", 5.0, 7.0), ("g", 8.0, 9.0)], ("t", 0.0, 6.0), "spans of t, * moved by +3.000 s"),
        ([("g", -4.0, 1.0), ("g", 2.0, 3.0)], ("t", 0.0, 9.0), "spans of t, * moved by -4.000 s"),
        ([("g", 1.0, 2.0), ("h", -6.0, -5.0)], None, "spans of h, * moved by +8.000 s"),
        ([("g", 1.0, 2.0), ("h", 3.0, 4.0)], ("t", 0.0, 6.0), ""),
    ],
)
def test_the_smallest_offset_puts_spans_within_and_after_others(
    tmp_path: Path,
    generations: list[tuple[str, float, float]],
    session: tuple[str, float, float] | None,
    moved: str,
):
    path = tmp_path / "spans.jsonl"
    path.write_text(lane(*generations, session=session))
    notes = read_observed([path]).notes
    said = [text.replace("whose clock differs, ", "* ") for text in notes.assumed]
    assert said == ([moved] if moved else [])


def test_clocks_that_no_constant_explains_are_one_message(
    refused: Callable[..., str], tmp_path: Path
):
    path = tmp_path / "spans.jsonl"
    path.write_text(
        lane(("g", 10.0, 12.0), ("h", 1.0, 2.0), session=None)
        + lane(("h", 30.0, 50.0), ("g", 5.0, 6.0), session=None).replace('"lane"', '"other"')
    )
    said = refused("diagnose", path, *QUICK)
    assert "spans.jsonl: the clocks of hosts (" in said
    assert "differ, and by no constant: diagnose the spans of one host" in said


SKYRL = (FIXTURES / "skyrl.log").read_text()
SLIME = (FIXTURES / "slime.log").read_text()
SUMMARY = (FIXTURES / "agent_perf_bench_summary.jsonl").read_text()
RESULTS = (FIXTURES / "agent_perf_bench.json").read_text()
TIMELINE = (FIXTURES / "rollout_4.trace_timeline_cache.json").read_text()
PRIME = (FIXTURES / "prime_rl.jsonl").read_text()
VLLM = (FIXTURES / "vllm.prom").read_text()
NEMO = (FIXTURES / "nemo_rl.json").read_text()


BAD = {
    "a cut dict": ("a.log", SKYRL[:-160], "the metrics of step 2 are cut off"),
    "two SkyRL runs": ("a.log", SKYRL + SKYRL, "step 1 is logged again: two runs, or one that"),
    "negative": ("a.log", SKYRL.replace("'7.0000'", "'-7.0'"), "step 1 or a part of it takes a"),
    "no number": ("a.log", SKYRL.replace("'60.0000'", "'6-0'"), "'6-0' is no number"),
    "two slime runs": ("a.log", SLIME + SLIME, "step 0 is logged again: two runs"),
    "parts": ("a.log", SLIME.replace("train_time': 40", "train_time': 400"), "two runs are in one"),
    "a cut cache": ("a.json", TIMELINE[:-900], "a.json: after record 1: "),
    "a backward span": ("a.json", TIMELINE.replace("72005.0", "71000.0"), "lasts -1000 s"),
    "cut results": ("a.json", RESULTS[:-300], "a.json: after record "),
    "no clock": ("a.json", RESULTS.replace("dispatch_started", "d"), "only durations, on no clock"),
    "two rows": ("a.jsonl", SUMMARY + SUMMARY, "is a second run: keep the row of one"),
    "no duration": ("a.jsonl", SUMMARY.replace("50.0", "0.0"), "duration_s: expected float > 0.0"),
    "many": ("a.prom", VLLM.replace(" 2.0 ", " 1e308 "), "running: 1e+308 is too large"),
    "far": (
        "a.json",
        re.sub(r'"ts": ?\d+', '"ts": 1e300', NEMO),
        "e+294 is too large",
    ),
    "a cut row": ("a.jsonl", PRIME[:-30], "line 5: malformed JSON"),
    "tokens": ("a.jsonl", PRIME.replace('prompt_tokens": 40', 'prompt_tokens": -4'), "prompt_tok"),
}


@pytest.mark.parametrize("fault", BAD)
def test_damaged_logs_are_one_message(refused: Callable[..., str], tmp_path: Path, fault: str):
    name, text, said = BAD[fault]
    (tmp_path / name).write_text(text)
    message = refused("diagnose", tmp_path / name, *QUICK)
    assert said in message
    assert str(tmp_path / name) in message


@pytest.mark.parametrize("text", [SKYRL, SLIME], ids=["skyrl", "slime"])
def test_logs_of_two_runs_in_a_folder_are_refused(
    refused: Callable[..., str], tmp_path: Path, text: str
):
    for name in ("one", "two"):
        (tmp_path / f"{name}.log").write_text(text)
    said = refused("diagnose", tmp_path)
    assert "one.log and " in said
    assert "are two runs, each with a clock of its own: name one" in said


def test_of_two_sources_in_a_folder_one_has_to_be_named(
    refused: Callable[..., str], tmp_path: Path
):
    (tmp_path / "a.log").write_text(SKYRL)
    (tmp_path / "b.log").write_text(SLIME)
    said = refused("diagnose", tmp_path)
    assert "a.log is skyrl, " in said
    assert "are measured steps of two sources; name the files of one" in said


def test_damaged_records_are_left_out_on_request(heddle: Heddle, tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text(SKYRL[:-160])
    done = heddle("diagnose", path, *QUICK, "--set", "logs.skip_bad=true")
    assert done.exit_code == 0, done.output
    assert "left out 1 damaged records" in done.stderr


def test_metrics_of_prime_rl_alone_are_whole_steps(heddle: Heddle, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(PRIME.splitlines()[-1] + "\n")
    found = answered(heddle, path, *QUICK)
    parts = {each["part"]: each["seconds"] for each in found["parts"]}
    assert parts == pytest.approx({"rollout": 13.0, "training": 5.0, "unaccounted": 2.0})
    assert "No trajectory is recorded" in found["verdict"]


def test_exported_rows_of_a_tracker_are_the_steps_of_the_console(tmp_path: Path):
    rows = [
        {"_step": 1, "timing/step": 10.0, "timing/generate": 6.0, "note": "x"},
        {"_step": 2, "timing/step": 10.0, "timing/generate": 4.0, "timing/sync_weights": 1.0},
    ]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_observed([path])
    assert read.format == "skyrl"
    assert not read.notes.dropped
    steps, _, _ = diagnose(read.steps)
    assert [step.parts["rollout"] for step in steps] == [6.0, 4.0]
    assert [step.label for step in steps] == [1, 2]


def test_samples_of_slime_are_of_the_rollout_in_the_name_of_their_file(tmp_path: Path):
    named = FIXTURES / "rollout_4.trace_timeline_cache.json"
    other = tmp_path / "samples.trace_timeline_cache.json"
    other.write_bytes(named.read_bytes())
    for path, rl_step in ((named, 4), (other, None)):
        made = read_observed([path]).steps.observations()
        steps = [each.rl_step for each in made if isinstance(each, ObservedRequest)]
        assert steps, path
        assert set(steps) == {rl_step}, path


def test_a_trace_in_two_files_counts_once(heddle: Heddle, tmp_path: Path):
    for part in ("all", "effective"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "traces.jsonl").write_text("\n".join(PRIME.splitlines()[:2]) + "\n")
    read = read_observed([tmp_path])
    assert read.notes.dropped == {"traces that are in two files": 2}
    assert read.steps.count == 3


def test_spans_without_turns_are_compared_with_their_session_alone(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    text = lane(("g", 20.0, 22.0), ("h", 1.0, 2.0), session=("g", 0.0, 30.0))
    path.write_text(text.replace('"turn"', '"number"'))
    read = read_observed([path])
    assert not read.notes.assumed
    assert read.steps.seconds("tool_s").tolist() == [18.0, 0.0]


def test_a_trace_of_megabytes_is_recognised_by_its_beginning(tmp_path: Path):
    path = tmp_path / "traces.jsonl"
    nodes = json.dumps({"nodes": [{"token_ids": [123456] * 200_000}]})[1:-1]
    path.write_text(PRIME.splitlines()[0].replace('"nodes": []', nodes) + "\n")
    assert path.stat().st_size > 1 << 20
    read = read_observed([path])
    assert (read.format, read.steps.count) == ("prime-rl", 2)


def test_lines_of_other_processes_and_colours_do_not_matter(tmp_path: Path):
    prefix = "\x1b[36m(skyrl_entrypoint pid=9)\x1b[0m "
    lines = [f"{prefix}{line}\x1b[0m" for line in SKYRL.splitlines()]
    evaluated = f"{prefix}Step 0: \n{{'eval/all/avg_score': '0.5000', 'timing/eval': '3.0'}}\n"
    (tmp_path / "ray.log").write_text(evaluated + "\n".join(lines) + "\n")
    (tmp_path / "plain.log").write_text(SKYRL)
    ray, plain = (read_observed([tmp_path / f"{name}.log"]) for name in ("ray", "plain"))
    assert ray.steps.phases == plain.steps.phases
    assert ray.notes.dropped == {"steps without their time": 1}


@pytest.mark.parametrize("scopes", [5, ["x"], [{"spans": 9}], [{"spans": [3]}]])
def test_spans_in_no_known_form_are_passed_over(tmp_path: Path, scopes: object):
    whole = (FIXTURES / "vllm_spans.jsonl").read_text().rstrip()
    odd = json.dumps({"resourceSpans": [{"resource": 7, "scopeSpans": scopes}]})
    (tmp_path / "odd.jsonl").write_text(f"{whole}\n{odd}\n")
    assert read_observed([tmp_path / "odd.jsonl"]).steps.count == 4


def test_spans_are_put_in_order_of_their_starts(tmp_path: Path):
    lines = (FIXTURES / "vllm_spans.jsonl").read_text().splitlines()
    found = []
    for name, order in (("as.jsonl", lines), ("back.jsonl", lines[::-1])):
        (tmp_path / name).write_text("\n".join(order) + "\n")
        made = read_observed([tmp_path / name]).steps.observations()
        requests = [each for each in made if isinstance(each, ObservedRequest)]
        found.append(sorted(requests, key=lambda each: (each.trajectory_id, each.step or 0)))
    assert found[0] == found[1]
    assert [each.tool_s for each in found[0]].count(None) == 2
