"""`heddle verify`: exact on recordings of our own simulations; what differs is explained."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.diagnosis.again import of_run, rollouts
from heddle.diagnosis.beside import beside
from heddle.diagnosis.causes import Differences, cause_of
from heddle.diagnosis.fitted import Constants, Matched, at_measured_speed, fit, halves
from heddle.diagnosis.own_runs import observed_run
from heddle.runs import load_run
from heddle_trace.observed.files import write_observed
from heddle_trace.observed.schema import ObservedEngine, ObservedRequest
from tests.app.conftest import ROOT
from tests.app.journals import Heddle, last_run
from tests.app.test_diagnose import request, seen

TINY = ROOT / "traces" / "tiny.jsonl"
SHARED = {"kernel": 1.6, "beside": 1.8, "left_by_host": 0.1}
EARLIER = {"duration_pct", "makespan_pct"}


def recorded(heddle: Heddle, policy: str, *words: object) -> Path:
    done = heddle("compare", TINY, "--policies", policy, "--set", "report.page=false", *words)
    assert done.exit_code == 0, done.output
    return last_run()


def answered(heddle: Heddle, *words: object) -> Any:
    done = heddle("verify", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def check_exact(found: Any, within_s: float = 1e-6) -> None:
    assert found["simulated_s"] == pytest.approx(found["measured_s"], abs=within_s)
    assert found["measured_s"] > 1.0
    for part in found["parts"]:
        assert part["difference_s"] == pytest.approx(0.0, abs=within_s), part
    for name, figure in found["figures"].items():
        if figure["measured"] is not None:
            assert figure["simulated"] == pytest.approx(figure["measured"], abs=within_s), name
    assert found["cause"]["name"] == "none"


def stated(policy: str, gpus: int = 2, *more: str) -> list[str]:
    keys = (f"policy.preset={policy}", f"cluster.gpus={gpus}", "logs.workload=coding", *more)
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.parametrize("policy", ["verl", "heddle", "heddle+fcfs"])
def test_a_simulated_run_is_predicted_exactly(heddle: Heddle, policy: str):
    run = recorded(heddle, policy, "--gpus", 2, "--max-running", 3, "--seed", 2)
    found = answered(heddle, run)
    check_exact(found)
    assert found["measured_s"] == pytest.approx(load_run(run).summary["makespan_s"])
    assert found["ran"]["policy"] == policy
    assert found["schema"] == "heddle.verify/1"


@pytest.mark.parametrize("policy", ["verl", "heddle"])
def test_measured_steps_that_are_written_and_read_are_predicted_exactly(
    heddle: Heddle, tmp_path: Path, policy: str
):
    run = recorded(heddle, policy, "--gpus", 2, "--max-running", 3, "--seed", 2)
    path = tmp_path / "observed.jsonl.gz"
    steps = observed_run(load_run(run))
    write_observed(path, steps.header, steps.observations())
    found = answered(heddle, path, *stated(policy, 2, "cluster.max_running=3", "seed=2"))
    check_exact(found)
    assert [step["label"] for step in found["steps"]] == [None]


def test_the_shipped_recording_is_predicted_as_recorded(heddle: Heddle):
    keys = ("cluster.gpu=cpu", "cluster.tp=1", "policy.preset=verl")
    profile = ROOT / "experiments/real_cpu/recorded.profile.json"
    words = [w for key in (f"cluster.model={profile}", *keys) for w in ("--set", key)]
    found = answered(heddle, ROOT / "traces" / "cpu-agents", *words)
    recorded = json.loads((ROOT / "experiments/real_cpu/recorded.json").read_text())
    (row,) = (each for each in recorded.values() if each["verify"] == found["verdict"])
    assert found["error_pct"] == pytest.approx(row["error_pct"])
    assert abs(found["error_pct"]) < 5.0 < abs(found["by_profile"]["error_pct"])
    gaps = sum(part["difference_s"] for part in found["parts"])
    assert gaps == pytest.approx(found["simulated_s"] - found["measured_s"])


def test_spans_of_another_framework_are_predicted_exactly(heddle: Heddle, tmp_path: Path):
    run = recorded(heddle, "verl", "--gpus", 2)
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(span) + "\n" for span in spans(run)))
    found = answered(heddle, path, *stated("verl"))
    check_exact(found, within_s=1e-5)
    assert {"llm", "tail", "unaccounted"} <= {part["part"] for part in found["parts"]}


def spans(run: Path) -> Iterator[dict[str, Any]]:
    """A run as RL-Insight records it: a span a generation."""
    for each in observed_run(load_run(run)).observations():
        assert isinstance(each, ObservedRequest)
        took_s = (each.queue_s or 0.0) + (each.prefill_s or 0.0) + (each.decode_s or 0.0)
        start_ns = round(1.76e18 + (each.start_s or 0.0) * 1e9)
        yield {
            "name": "gateway_generation",
            "start_time_unix_nano": start_ns,
            "end_time_unix_nano": start_ns + round(took_s * 1e9),
            "attributes": {
                "monitor.trace_source": "gateway",
                "state_lane_id": each.trajectory_id,
                "uid": each.group_id,
                "turn": each.step,
                "prompt_tokens": each.input_tokens,
                "completion_tokens": each.output_tokens,
            },
        }


def test_a_loop_is_predicted_exactly(heddle: Heddle):
    sizes = ("loop.groups=2", "loop.samples=2", "loop.batches=3", "loop.train_gpus=4")
    more = [word for each in (*sizes, "loop.repeat=true") for word in ("--set", each)]
    done = heddle(
        "loop", TINY, "--seeds", "1", "--regimes", "sync", "--gpus", 8, "--out", "runs", *more
    )
    assert done.exit_code == 0, done.output
    found = answered(heddle, last_run())
    check_exact(found)
    assert len(found["steps"]) == 3
    assert {"training", "update"} <= {part["part"] for part in found["parts"]}


def test_a_run_on_fake_engines_is_predicted(heddle: Heddle, trace: Path):
    speed = ("--set", "runtime.time_scale=0.02")
    done = heddle("run", trace, "--engine", "fake", "--engines", 2, "--policy", "verl", *speed)
    assert done.exit_code == 0, done.output
    found = answered(heddle, last_run())
    assert found["error_pct"] == pytest.approx(0.0, abs=30.0)
    gap_s = sum(part["difference_s"] for part in found["parts"])
    assert gap_s == pytest.approx(found["simulated_s"] - found["measured_s"])


def test_the_sentence_comes_first_and_lines_fit(heddle: Heddle):
    done = heddle("verify", recorded(heddle, "verl", "--gpus", 2))
    first, *rest = done.stdout.splitlines()
    assert first.startswith("Heddle predicts ")
    assert first.endswith("(+0.0 %): all within 2 % of what was measured.")
    assert max(map(len, rest)) <= 100
    assert any(line.startswith("part ") for line in rest)


def test_engines_and_slots_are_read_from_metrics_beside_requests(heddle: Heddle, tmp_path: Path):
    run = recorded(heddle, "verl", "--gpus", 2, "--max-running", 3)
    steps = observed_run(load_run(run))
    samples = [
        ObservedEngine(engine=f"e{at}", time_s=1.0, running=3.0, waiting=1.0) for at in range(2)
    ]
    path = tmp_path / "observed.jsonl"
    write_observed(path, steps.header, [*steps.observations(), *samples])
    found = answered(heddle, path, "--set", "cluster.model=qwen3-14b")
    assert found["ran"]["max_running"] == 3
    assert found["ran"]["engines"] == [{"gpu": "h100", "gpus": 2, "tp": 1}]
    check_exact(found)


def test_constants_are_found_again_on_the_half_that_was_not_fitted(heddle: Heddle):
    run = load_run(recorded(heddle, "verl", "--gpus", 2))
    ran = of_run(run, None, ())
    slower = Constants(kernel=1.25, host_s=0.004)
    ran = replace(ran, seen=ran.simulate(slower.adjusted))
    simulated = ran.simulate(Constants().adjusted)
    fitted = fit(ran, simulated, lambda _: None)
    assert fitted.before["duration_pct"] < -15.0
    assert abs(fitted.after["duration_pct"]) < 1.0
    assert abs(fitted.after["makespan_pct"]) < 1.0
    assert fitted.fitted_on + fitted.judged_on == load_run(run.path).summary["arrived"]
    assert beside(ran, simulated).error_pct < -15.0


def test_the_speed_of_decode_is_an_input_where_logs_record_it(heddle: Heddle, tmp_path: Path):
    run = load_run(recorded(heddle, "verl", "--gpus", 2))
    (slow,) = of_run(run, None, ()).simulate(Constants(kernel=1.25).adjusted)
    path = tmp_path / "observed.jsonl"
    write_observed(path, slow.header, slow.observations())
    found = answered(heddle, path, *stated("verl"))
    assert found["kernel"] == pytest.approx(1.25, abs=0.002)
    assert found["error_pct"] == pytest.approx(0.0, abs=0.3)
    assert found["by_profile"]["error_pct"] < -15.0
    said = heddle("verify", path, *stated("verl")).stdout
    assert f"at the measured speed of decode, {found['by_profile']['error_pct']:+.1f} % by" in said
    assert "mean TPOT is no prediction" in " ".join(said.split())


def test_nothing_but_decode_is_an_input(heddle: Heddle):
    run = load_run(recorded(heddle, "verl", "--gpus", 2))
    ran = of_run(run, None, ())
    (slow,) = ran.simulate(Constants(kernel=1.25).adjusted)
    later = [
        msgspec.structs.replace(
            each, end_s=(each.end_s or 0.0) + 500.0 * (each.tool is None), queue_s=0.0
        )
        for each in slow.observations()
        if isinstance(each, ObservedRequest)
    ]
    simulated = ran.simulate(Constants().adjusted)
    speeds = [
        at_measured_speed(replace(ran, seen=(each,)), simulated)[0] for each in (slow, seen(*later))
    ]
    assert speeds[0] == speeds[1]
    assert speeds[0].kernel == pytest.approx(1.25, abs=0.002)


def test_fit_says_the_error_on_the_other_half(heddle: Heddle):
    run = recorded(heddle, "verl", "--gpus", 2)
    found = answered(heddle, run, "--fit")["fit"]
    assert found["constants"] == {"kernel": 1.0, "host_s": 0.0}
    assert found["before"].keys() == found["after"].keys() == EARLIER
    assert "kernel times x 1.000, +0.00 ms an iteration" in heddle("verify", run, "--fit").stdout


@pytest.mark.parametrize(
    ("measured", "constants"),
    [
        ([3.0, 6.0, 12.0], Constants(kernel=1.5)),
        ([2.1, 4.3, 8.2], Constants(host_s=0.1)),
        ([2.0, 4.0, 8.0], Constants()),
    ],
)
def test_one_constant_is_enough_where_it_explains_all(measured: Any, constants: Constants):
    import numpy as np

    rows = Matched(np.array(measured), np.array([2.0, 4.0, 8.0]), np.array([1.0, 3.0, 2.0]))
    found = rows.best()
    assert (found.kernel, found.host_s) == (
        pytest.approx(constants.kernel),
        pytest.approx(constants.host_s),
    )


def test_halves_divide_groups_and_not_their_samples():
    made = [request(f"{g}{s}", 0.0, group_id=g, decode_s=1.0) for g in "abcd" for s in (0, 1)]
    assert halves((seen(*made),)) == [{"a0", "a1", "c0", "c1"}, {"b0", "b1", "d0", "d1"}]
    alone = [request(name, 0.0, group_id="g", decode_s=1.0) for name in "abc"]
    assert halves((seen(*alone),)) == [{"a", "c"}, {"b"}]


def test_steps_of_training_are_rollouts_of_their_own_unless_they_overlap():
    tokens = {"output_tokens": 5, "decode_s": 1.0}
    first = request("a", 0.0, rl_step=1, env_start_s=2.0, reward_s=4.0, **tokens)
    later = request("b", 9.0, rl_step=2, **tokens)
    one, other = rollouts(seen(first, later))
    assert (one.column("start_s").values[0], one.column("end_s").values[0]) == (2.0, 3.0)
    assert other.count == 1
    (both,) = rollouts(seen(first, request("b", -3.0, rl_step=2, output_tokens=5, decode_s=9.0)))
    assert both.count == 2


@pytest.mark.parametrize(
    ("seconds", "more", "name"),
    [
        ({"decode": 0.01}, {"makespan": 0.01}, "none"),
        ({"decode": 0.2}, {"left_by_host": 0.1}, "host time"),
        ({"decode": 0.2}, {"left_by_kernels": 0.1}, "kernel factor"),
        ({"decode": 0.2}, {"left_by_kernels": 0.1, **SHARED}, "shared cores"),
        ({"decode": 0.2}, {"left_by_kernels": 0.1, **SHARED, "kernel": 2.5}, "undetermined"),
        ({"decode": 0.2}, {"left_by_kernels": 0.1, **SHARED, "engines": (1, 1)}, "undetermined"),
        ({"decode": 0.2}, {}, "undetermined"),
        ({"decode": 0.2}, {"left_by_host": 0.1, "engines": (8, 4)}, "deployment"),
        ({"decode": 0.2}, {"left_by_host": 0.1, "engines": (0, 4)}, "host time"),
        ({"decode": 0.2}, {"left_by_kernels": 0.1, "left_by_host": 0.1}, "undetermined"),
        ({"prefill": 0.2}, {"hits": -0.2}, "prefix hits"),
        ({"prefill": 0.2, "decode": 0.2}, {"hits": -0.2}, "undetermined"),
        ({"tool": 0.2}, {}, "tool clock"),
        ({"tool": -0.2}, {}, "undetermined"),
        ({"tool": 0.1, "decode": 0.1}, {}, "undetermined"),
        ({"unaccounted": 0.2}, {}, "client"),
        ({"queue": 0.2}, {}, "queueing"),
        ({"queue": 0.2, "decode": 0.1}, {"left_by_host": 0.1}, "host time"),
    ],
)
def test_a_cause_is_named_only_where_differences_tell_it(
    seconds: dict[str, float], more: dict[str, Any], name: str
):
    usual = {"makespan": 0.2, "hits": 0.0, "engines": (2, 2)}
    left = {"left": 1.0, "left_by_host": 1.0, "left_by_kernels": 1.0}
    assert cause_of(Differences(seconds=seconds, **{**usual, **left, **more})).name == name


SAMPLES = Path(__file__).resolve().parents[1] / "trace" / "observed_logs"
STATED = ("--set", "cluster.gpus=2")


@pytest.mark.parametrize(
    ("sample", "words", "said"),
    [
        ("rl_insight.jsonl", (), "no cluster is stated, so what ran is unknown"),
        ("nemo_rl.json", STATED, "the logs lack sizes: no output tokens are recorded"),
        ("skyrl.log", STATED, "only engines or a trainer were observed"),
        ("vllm.prom", STATED, "only engines or a trainer were observed"),
        ("tracelab.jsonl", STATED, "the logs have no common clock"),
    ],
)
def test_what_cannot_be_simulated_is_one_message(
    refused: Callable[..., str], sample: str, words: tuple[str, ...], said: str
):
    assert said in refused("verify", SAMPLES / sample, *words)


def test_two_runs_at_once_are_refused(heddle: Heddle, refused: Callable[..., str]):
    run = recorded(heddle, "verl", "--gpus", 2)
    assert "name one RUN: each is verified by itself" in refused("verify", run, run)


def test_a_run_whose_trace_is_gone_is_refused(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    heddle("compare", trace, "--policies", "verl", "--set", "report.page=false")
    trace.unlink()
    said = refused("verify", last_run())
    assert "simulating it again takes the trace that it replayed" in said
