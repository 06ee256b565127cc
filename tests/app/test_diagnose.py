"""`heddle diagnose`: parts that sum to the measured step, of logs and of runs of our own."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle.diagnosis.intervals import requests
from heddle.diagnosis.own_runs import observed_run
from heddle.diagnosis.parts import PHASES, diagnose
from heddle.diagnosis.verdict import diagnosed
from heddle.runs import load_run
from heddle_trace import read_trace
from heddle_trace.columns import TraceColumn
from heddle_trace.importers.notes import Notes
from heddle_trace.observed.columns import ObservedSteps, observed
from heddle_trace.observed.core import ParsedObservation
from heddle_trace.observed.reading import OBSERVED_FORMATS, read_observed
from heddle_trace.observed.schema import SCHEMA, Observation, ObservedHeader, ObservedRequest, Phase
from tests.app.conftest import ROOT
from tests.app.journals import Heddle, last_run

FIXTURES = Path(__file__).resolve().parents[1] / "trace" / "observed_logs"
SAMPLES = {
    "tracelab.jsonl": {"llm": 17.5, "tool": 5.0},
    "nemo_rl.json": {
        "llm": 14.5,
        "training": 9.0,
        "tool": 2.0,
        "update": 2.0,
        "reward": 1.5,
        "idle": 1.0,
    },
    "vllm.prom": {
        "decode": 16.0,
        "stalled": 10.0,
        "no_request": 10.0,
        "queue": 8 / 3,
        "prefill": 4 / 3,
    },
    "rl_insight.jsonl": {"llm": 9.0, "tool": 3.0},
    "rl_insight_hosts.jsonl": {"llm": 8.0, "tool": 2.0},
    "prime_rl.jsonl": {
        "llm": 6.5,
        "training": 5.0,
        "reward": 2.5,
        "idle": 2.0,
        "env_start": 2.0,
        "tool": 2.0,
    },
    "rollout_4.trace_timeline_cache.json": {"llm": 9.5, "reward": 2.5, "tool": 2.0},
    "agent_perf_bench.json": {"decode": 3.5, "prefill": 1.5, "queue": 0.5},
    "agent_perf_bench_summary.jsonl": {"decode": 40.0, "prefill": 10.0},
    "vllm_spans.jsonl": {"decode": 7.0, "prefill": 1.25, "tool": 1.25, "queue": 0.5},
}
WHOLE = {
    "skyrl.log": {
        "training": 60.0,
        "llm": 50.0,
        "tool": 30.0,
        "tail": 30.0,
        "update": 14.0,
        "env_start": 8.0,
        "other": 3.0,
        "unaccounted": 5.0,
    },
    "slime.log": {
        "rollout": 105.0,
        "training": 80.0,
        "update": 10.0,
        "other": 4.0,
        "unaccounted": 1.0,
    },
}
"""Samples of steps as a whole."""
QUICK = ("--set", "diagnose.budget_s=0")


def seen(*observations: Observation, clock: str = "shared") -> ObservedSteps:
    header = ObservedHeader(schema=SCHEMA, source="test", clock=clock)
    return observed(header, (ParsedObservation("here", each) for each in observations), Notes())


def request(name: str, start_s: float, step: int = 0, **more: Any) -> ObservedRequest:
    return ObservedRequest(trajectory_id=name, step=step, start_s=start_s, **more)


def parts(found: ObservedSteps) -> dict[str, float]:
    (step,), _, _ = diagnose(found)
    assert sum(step.parts.values()) == pytest.approx(step.end_s - step.start_s)
    return {name: pytest.approx(s) for name, s in step.parts.items() if s > 1e-9}


def answered(heddle: Heddle, *words: object) -> Any:
    done = heddle("diagnose", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SAMPLES)
def test_parts_of_a_sample_sum_to_its_measured_step(heddle: Heddle, name: str):
    found = answered(heddle, FIXTURES / name, *QUICK)
    measured = {each["part"]: each["seconds"] for each in found["parts"]}
    assert measured.pop("unaccounted") == pytest.approx(0.0, abs=1e-6)
    assert measured == {part: pytest.approx(s) for part, s in SAMPLES[name].items()}
    assert found["measured_s"] == pytest.approx(sum(measured.values()))


@pytest.mark.parametrize("name", WHOLE)
def test_of_whole_steps_it_says_what_cannot_be_told(heddle: Heddle, name: str):
    found = answered(heddle, FIXTURES / name, *QUICK)
    measured = {each["part"]: each["seconds"] for each in found["parts"]}
    assert measured == {part: pytest.approx(s) for part, s in WHOLE[name].items()}
    assert found["measured_s"] == pytest.approx(200.0)
    assert found["verdict"].endswith("what steps and their phases took, a rollout on average.")
    assert "No trajectory is recorded" in found["verdict"]
    assert "no output tokens are recorded" in answered(heddle, FIXTURES / name)["no_remedies"]


def test_every_format_has_a_sample():
    formats = {read_observed([FIXTURES / name]).format for name in (*SAMPLES, *WHOLE)}
    assert formats | {"observed"} == OBSERVED_FORMATS.keys()


def test_spans_of_vllm_are_trajectories_by_their_trace_and_engines_by_their_resource():
    found = read_observed([FIXTURES / "vllm_spans.jsonl"]).steps
    assert found.column("trajectory_id").plain() == ["1" * 32] * 2 + ["2" * 32] * 2
    assert found.column("engine").plain() == ["vllm/aaaaaaaa"] * 2 + ["vllm/bbbbbbbb"] * 2
    assert found.column("tool_s").plain() == pytest.approx([2.0, None, 0.5, None])
    assert found.column("output_tokens").plain() == [70, 50, 80, 80]


def test_metrics_of_two_servers_are_two_engines(tmp_path: Path):
    line = 'vllm:num_requests_{}{{engine="0",model_name="tiny"}} {}'
    for name, running in (("a.prom", 1), ("b.prom", 2)):
        rows = [f"# TIME {at}\n" + line.format("running", running) for at in (1.5e9, 1.5e9 + 1)]
        (tmp_path / name).write_text("\n".join(rows))
    engines = read_observed([tmp_path / "a.prom", tmp_path / "b.prom"]).steps.engines
    assert engines["engine"].plain() == ["a.prom/0"] * 2 + ["b.prom/0"] * 2
    assert engines["running"].plain() == [1, 1, 2, 2]


def test_the_shipped_recording_is_accounted_for_as_its_page_says(heddle: Heddle):
    found = answered(heddle, ROOT / "traces" / "cpu-agents", *QUICK)
    shares = {each["part"]: each["share"] for each in found["parts"]}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert abs(shares["unaccounted"]) < 0.05
    assert found["verdict"] in (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    recorded = json.loads((ROOT / "experiments/real_cpu/recorded.json").read_text())
    assert found["verdict"] in {row["diagnose"] for row in recorded.values()}


def test_the_sentence_names_the_largest_parts(heddle: Heddle):
    done = heddle("diagnose", FIXTURES / "nemo_rl.json", *QUICK)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("48 % of your step is generation")
    assert "; 30 % is training; 7 % " in first
    assert any(line.split() == ["measured", "30.0", "100.0", "%"] for line in rest)
    assert max(map(len, rest)) <= 100


@pytest.mark.parametrize("policy", ["verl", "heddle"])
def test_a_run_of_our_own_is_accounted_for(heddle: Heddle, trace: Path, policy: str):
    heddle("compare", trace, "--policies", policy, "--gpus", 2, "--set", "report.page=false")
    run = last_run()
    found = answered(heddle, run, *QUICK)
    summary = load_run(run).summary
    shares = {each["part"]: each["share"] for each in found["parts"]}
    assert found["measured_s"] == pytest.approx(summary["makespan_s"])
    assert abs(shares["unaccounted"]) < 1e-6
    assert {"decode", "tool"} <= shares.keys()
    assert found["longest"][0]["lasts_s"] == pytest.approx(found["measured_s"])


def test_requests_of_a_run_have_its_figures(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl", "--gpus", 2, "--set", "report.page=false")
    run = load_run(last_run())
    steps, found = run.steps.to_pydict(), observed_run(run)
    assert found.seconds("decode_s").sum() == pytest.approx(sum(steps["decode_s"]))
    assert found.seconds("tool_s").sum() == pytest.approx(sum(steps["tool_s"]))
    assert found.column("output_tokens").ints.sum() == sum(steps["output_tokens"])


def test_parts_of_a_loop_are_those_of_its_batches(heddle: Heddle, trace: Path):
    sizes = ("loop.groups=2", "loop.samples=2", "loop.batches=4", "loop.train_gpus=4")
    more = [word for each in (*sizes, "loop.repeat=true") for word in ("--set", each)]
    done = heddle(
        "loop", trace, "--seeds", "1", "--regimes", "sync", "--gpus", 8, "--out", "runs", *more
    )
    assert done.exit_code == 0, done.output
    run = last_run()
    batches = json.loads((run / "rl_steps.json").read_text())["steps"]
    steps = answered(heddle, run, *QUICK)["steps"]
    assert [step["label"] for step in steps] == [batch["batch"] for batch in batches]
    for step, batch in zip(steps, batches, strict=True):
        assert step["end_s"] - step["start_s"] == pytest.approx(batch["step_s"])
        assert step["parts"]["training"] == pytest.approx(batch["training_s"])
        assert step["parts"].get("update", 0.0) == pytest.approx(batch["update_s"])
        assert sum(step["parts"].values()) == pytest.approx(batch["step_s"])


def test_waiting_while_no_engine_has_a_request_is_a_stall_and_no_queue():
    found = seen(
        request("a", 0.0, queue_s=4.0, decode_s=2.0),
        request("b", 0.0, tool_s=6.0),
    )
    assert parts(found) == {"stalled": 2.0, "decode": 1.0, "tool": 3.0}


def test_a_stall_is_no_part_of_the_tail():
    short = [request(f"s{i}", 0.0, decode_s=1.0) for i in range(31)]
    found = seen(
        *short,
        request("long", 0.0, decode_s=5.0, queue_s=0.0, tool_s=1.0),
        request("long", 6.0, 1, queue_s=3.0, decode_s=1.0),
    )
    assert parts(found) == {"decode": 1.0, "tail": 6.0, "stalled": 3.0}


def test_a_trainer_takes_the_time_that_trajectories_have_too():
    found = seen(
        request("a", 0.0, decode_s=10.0),
        Phase(phase="training", start_s=4.0, end_s=7.0),
        Phase(phase="update", start_s=6.0, end_s=8.0),
    )
    assert parts(found) == {"decode": 6.0, "training": 3.0, "update": 1.0}
    assert PHASES[:2] == ("training", "update")


def test_prefill_of_what_another_engine_had_is_told_apart():
    tokens = {"input_tokens": 300, "cached_tokens": 0, "output_tokens": 0, "prefill_s": 3.0}
    first = {"input_tokens": 100, "cached_tokens": 0, "output_tokens": 100, "prefill_s": 1.0}
    moved = seen(
        request("a", 0.0, engine="e0", **first), request("a", 1.0, 1, engine="e1", **tokens)
    )
    assert parts(moved) == {"prefill": 2.0, "prefill_moved": 2.0}
    same = seen(
        request("a", 0.0, engine="e0", **first), request("a", 1.0, 1, engine="e0", **tokens)
    )
    assert parts(same) == {"prefill": 2.0, "prefill_again": 2.0}


def test_what_no_part_explains_is_unaccounted():
    assert parts(seen(request("a", 0.0, decode_s=2.0, end_s=10.0))) == {
        "decode": 2.0,
        "unaccounted": 8.0,
    }


def test_a_shared_second_is_divided_by_the_trajectories():
    rng = np.random.default_rng(1)
    made = [
        request(f"t{i}", float(at), decode_s=float(d), tool_s=float(t))
        for i, (at, d, t) in enumerate(rng.uniform(0.1, 9.0, (40, 3)))
    ]
    found = seen(*made)
    (step,), _, _ = diagnose(found)
    cut, grid = requests(found).intervals(), np.linspace(step.start_s, step.end_s, 20_001)[:-1]
    ends = found.column("end_s").values
    since = np.sort(ends)[len(ends) - step.longest - 1]
    now = (cut.start_s[None] <= grid[:, None]) & (grid[:, None] < cut.end_s[None])
    active = now.sum(axis=1)
    width = (step.end_s - step.start_s) / len(grid)
    decode = (now & (cut.part == 3)[None]).sum(axis=1)[(grid < since) & (active > 0)]
    share = decode / active[(grid < since) & (active > 0)]
    assert step.parts["decode"] == pytest.approx(share.sum() * width, rel=0.01)


def test_measured_steps_are_written_and_read_again(heddle: Heddle, tmp_path: Path):
    kept = tmp_path / "kept.jsonl.gz"
    first = answered(
        heddle, FIXTURES / "nemo_rl.json", *QUICK, "--set", f"diagnose.observed={kept}"
    )
    again = answered(heddle, kept, *QUICK)
    assert again["parts"] == first["parts"]
    assert again["steps"] == first["steps"]


def test_a_trace_with_times_is_diagnosed_by_trajectory(heddle: Heddle, tmp_path: Path):
    row = {"trajectory_id": "a", "group_id": "g", "workload": "w", "prompt_tokens": 10}
    steps = [
        {"output_tokens": 5, "llm_s": 2.0, "t_s": 0.0, "tool": "bash", "tool_s": 1.0},
        {"output_tokens": 5, "llm_s": 3.0, "t_s": 4.0},
    ]
    path = tmp_path / "timed.jsonl"
    path.write_text(json.dumps({**row, "env_start_s": 2.0, "steps": steps}) + "\n")
    found = {each["part"]: each["seconds"] for each in answered(heddle, path, *QUICK)["parts"]}
    assert found == {"llm": 5.0, "env_start": 2.0, "tool": 1.0, "unaccounted": 1.0}
    assert read_trace(path).records[0].env_start_s == 2.0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"start_s": 0.0, "end_s": -5.0}], "line 2: end_s: the clock goes backwards by 5.000 s"),
        ([{"start_s": 0.0, "end_s": 1.0, "decode_s": 9.0}], "its parts take 9.000 s"),
        ([{"start_s": 0.0, "decode_s": -1.0}], "line 2: decode_s"),
        ([{"start_s": 0.0, "decode_s": 1.0, "step": 2**63}], "line 2: step"),
        (
            [{"start_s": 0.0, "decode_s": 9.0}, {"step": 1, "start_s": 2.0, "decode_s": 1.0}],
            "line 3: start_s: begins 7.000 s before the request before it has ended",
        ),
        ([{"start_s": 0.0, "input_tokens": 5}], "has no times, so no part of a step is measured"),
        ([], "holds no measured step"),
    ],
)
def test_damaged_steps_are_one_message(
    refused: Callable[..., str], tmp_path: Path, lines: list[dict[str, Any]], said: str
):
    path = tmp_path / "steps.jsonl"
    header = {"type": "observed", "schema": SCHEMA, "source": "s", "clock": "shared"}
    rows = [{"type": "request", "trajectory_id": "a", "step": 0, **line} for line in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    assert said in refused("diagnose", path, *QUICK)


def test_a_truncated_file_names_its_line(refused: Callable[..., str], tmp_path: Path):
    text = (FIXTURES / "tracelab.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[: len(text) - 200])
    said = refused("diagnose", tmp_path / "cut.jsonl", *QUICK)
    assert "cut.jsonl: line 4: malformed JSON" in said
    assert "logs.skip_bad=true" in said


def test_two_runs_in_one_folder_are_refused(refused: Callable[..., str], tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_bytes((FIXTURES / "nemo_rl.json").read_bytes())
    assert "are two runs, each with a clock of its own: name one" in refused("diagnose", tmp_path)


def test_metrics_need_times_and_names_of_engines(refused: Callable[..., str], tmp_path: Path):
    path = tmp_path / "m.prom"
    path.write_text('vllm:num_requests_running{model_name="m"} 1.0\n')
    assert "samples without times" in refused("diagnose", path, *QUICK)
    path.write_text("# TIME 1767225600\n" + 'vllm:num_requests_running{model_name="m"} 1.0\n' * 2)
    assert "no label tells two engines apart" in refused("diagnose", path, *QUICK)


def test_scrapes_after_one_another_are_read(heddle: Heddle, tmp_path: Path):
    one = 'vllm:num_requests_running{model_name="m"} 1.0\n'
    path = tmp_path / "engine0.prom"
    path.write_text(f"# TIME 1767225600\n{one}# TIME 1767225605\n{one}")
    found = answered(heddle, path, *QUICK)
    assert [each["engine"] for each in found["engines"]] == ["engine0.prom"]
    assert found["measured_s"] == 5.0


def test_the_folder_of_several_runs_is_refused(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    two = ("--policies", "verl,slime", "--gpus", 2, "--seeds", 1, "--set", "report.page=false")
    heddle("compare", trace, *two)
    (folder,) = Path("runs").iterdir()
    assert "holds several runs: name one" in refused("diagnose", folder)


def test_remedies_are_settings_with_a_simulated_saving(heddle: Heddle, tmp_path: Path):
    heddle("trace", "synth", "search", "--trajectories", 48, "--samples", 4, "-o", "t.jsonl")
    words = ("--policies", "verl", "--gpus", 4, "--seeds", 1, "--set", "report.page=false")
    heddle("compare", "t.jsonl", *words)
    found = answered(heddle, last_run(), "--set", "diagnose.budget_s=0.001")
    assert found["remedies"] or found["no_remedies"]
    for remedy in found["remedies"]:
        # Without time there is one simulation of each, which tells of no interval.
        assert remedy["low"] is remedy["high"] is None
        assert 0.0 < remedy["saving"] < 1.0
        assert remedy["block"]


def test_requests_that_no_engine_has_are_stalled(heddle: Heddle, tmp_path: Path):
    (tmp_path / "spans.jsonl").write_bytes((FIXTURES / "rl_insight.jsonl").read_bytes())
    rows = [(0, 1), (2, 0), (3, 0), (4, 1), (12, 1)]
    text = "".join(
        f'vllm:num_requests_running{{engine="0"}} {running} {1784772000 + at}000\n'
        for at, running in rows
    )
    (tmp_path / "engine.prom").write_text(text)
    said = answered(heddle, tmp_path, *QUICK)
    found = {e["part"]: e["seconds"] for e in said["parts"]}
    assert found["stalled"] == pytest.approx(2.0)
    assert found["llm"] == pytest.approx(SAMPLES["rl_insight.jsonl"]["llm"] - 2.0)
    (engine,) = said["engines"]
    assert engine["busy_s"] == pytest.approx(said["measured_s"] - 2.0)
    assert engine["mean_batch"] == pytest.approx(1.0)
    assert sum(engine["batch"]) == pytest.approx(engine["busy_s"] / said["measured_s"] * 100, abs=1)


def test_steps_that_overlap_are_refused(refused: Callable[..., str], tmp_path: Path):
    rows = [
        {"type": "observed", "schema": SCHEMA, "source": "s", "clock": "shared"},
        {"type": "phase", "phase": "step", "start_s": 0.0, "end_s": 9.0},
        {"type": "phase", "phase": "step", "start_s": 5.0, "end_s": 12.0},
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused("diagnose", path, *QUICK)
    assert "begins 4.0 s before the one before it has ended: two runs" in said


def test_memory_for_parts_is_below_150_bytes_a_request():
    count, rng = 1 << 19, np.random.default_rng(1)
    code = np.arange(count, dtype=np.int32)
    start_s = rng.uniform(0.0, 600.0, count)
    columns = {
        "trajectory_id": TraceColumn("word", code // 32, [f"t{n}" for n in range(count // 32)]),
        "engine": TraceColumn("word", code % 2, ["a", "b"]),
        "start_s": TraceColumn("real", start_s),
        "end_s": TraceColumn("real", start_s + 3.0),
        **{name: TraceColumn("real", np.ones(count)) for name in ("queue_s", "prefill_s")},
        "decode_s": TraceColumn("real", np.ones(count)),
    }
    found = replace(seen(), requests=columns, count=count)
    tracemalloc.start()
    (step,), _, _ = diagnose(found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(step.parts.values()) == pytest.approx(step.end_s - step.start_s)
    assert peak < 150 * count


def test_memory_for_samples_of_engines_does_not_grow_with_their_square():
    count, engines = 1 << 17, 256
    code = np.arange(count, dtype=np.int32) % engines
    columns = {
        "engine": TraceColumn("word", code, [f"e{n}" for n in range(engines)]),
        "time_s": TraceColumn("real", np.arange(count) / 7.0),
        "running": TraceColumn("real", np.ones(count)),
        "waiting": TraceColumn("real", np.zeros(count)),
    }
    tracemalloc.start()
    found = diagnosed(replace(seen(), engines=columns), "")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.engines) == engines
    assert found.parts["llm"] == pytest.approx(found.total_s)
    assert peak < 200 * count
