"""`heddle profile`: measure, fit and check, from end to end on engines that keep time only."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.runs import load_run
from heddle_calibrate.check import Checked, Figure, rankings, simulation_of_run
from heddle_calibrate.sweeps import read_sweep
from heddle_core.commands import SolvePlan
from heddle_core.events import PlanSolved, Tick
from heddle_core.ids import EngineId
from heddle_core.plans import ResourcePlan
from heddle_rollout.clock import Clock
from heddle_runtime.virtual_time import run_virtual
from heddle_runtime.vllm.settings import SUPPORTED, Installed, Platform
from heddle_sim.config import SimulationConfig
from heddle_sim.profile_files import PROFILE_FOLDER, load_profile, read_profile
from heddle_trace import synth, write_trace
from tests.app.journals import BRIEF, ONE_RUN, Heddle, entry, run_of
from tests.app.test_journal_columns import Problem

SMALL = (
    "--model",
    "qwen3-8b",
    "--gpu",
    "h200",
    "--max-running",
    8,
    "--set",
    "profile.max_context=2048",
)


def done(heddle: Heddle, *args: object, status: int = 0) -> str:
    result = heddle(*args)
    assert result.exit_code == status, result.output
    return str(result.stdout)


@pytest.fixture
def profile(heddle: Heddle) -> Path:
    """A profile of the shipped one's engine, by way of a sweep."""
    done(heddle, "profile", "measure", "--engine", "fake", *SMALL, "-o", "sweep.json")
    done(heddle, "profile", "fit", "sweep.json", "-o", "mine.json")
    return Path("mine.json")


# -- measure and fit ------------------------------------------------------------------------------


def test_a_sweep_names_its_machine_and_measurements(heddle: Heddle) -> None:
    args = ("--engine", "fake", *SMALL, "--tp", "1,2", "-o", "sweep.json")
    said = done(heddle, "profile", "measure", *args)
    assert said.startswith("sweep.json: ")
    sweep = read_sweep(Path("sweep.json"))
    assert sweep.tps == (1, 2)
    assert (sweep.model, sweep.gpu, sweep.engine, sweep.size) == (
        "qwen3-8b",
        "h200",
        "fake",
        "small",
    )
    assert sweep.hardware["cores"] >= 1
    assert sweep.versions["heddle"]
    assert sweep.command.startswith("heddle")
    assert sweep.kv_bytes_per_token == load_profile("qwen3-8b", "h200").kv_bytes_per_token


def test_equal_seeds_measure_alike(heddle: Heddle) -> None:
    for out in ("a.json", "b.json"):
        done(heddle, "profile", "measure", "--engine", "fake", *SMALL, "-o", out)
    a, b = read_sweep(Path("a.json")), read_sweep(Path("b.json"))
    assert (a.decode, a.prefill, a.loops) == (b.decode, b.prefill, b.loops)


def test_a_fit_prints_and_keeps_its_error_on_what_was_held_out(
    heddle: Heddle, profile: Path
) -> None:
    said = done(heddle, "profile", "fit", "sweep.json", "-o", "again.json")
    for part in ("decode, held out", "prompts beside decoding, held out", "loops, held out"):
        assert part in said
    assert "use it as --model again.json" in said
    again = read_profile(Path("again.json"))
    assert again == read_profile(profile)
    assert again.at(1).errors["decode_unseen"]["worst_pct"] < 1.0
    assert again.errors["measured"]["unseen"]["makespan_worst_pct"] < 2.0
    fitted = json.loads(
        done(heddle, "profile", "fit", "sweep.json", "-o", "again.json", "--force", "--json")
    )
    assert fitted["schema"] == "heddle.fit/1"
    assert fitted["errors"]["tables"]["1"] == again.at(1).errors


def test_several_sweeps_are_fitted_together(
    heddle: Heddle, profile: Path, refused: Callable[..., str]
) -> None:
    sweep = Path("sweep.json").read_text()
    Path("later.json").write_text(sweep)
    done(heddle, "profile", "fit", "sweep.json", "later.json", "-o", "both.json")
    both = json.loads(Path("both.json").read_text())
    assert both["source"]["files"] == ["sweep.json", "later.json"]
    Path("other.json").write_text(sweep.replace('"max_running": ', '"max_running": 9'))
    said = refused("profile", "fit", "sweep.json", "other.json", "-o", "no.json")
    assert "other.json: max_running is" in said
    assert not Path("no.json").exists()


def test_a_fit_can_be_given_names(heddle: Heddle, profile: Path) -> None:
    args = ("sweep.json", "-o", "named.json", "--model", "mine", "--gpu", "gh200")
    done(heddle, "profile", "fit", *args)
    named = read_profile(Path("named.json"))
    assert (named.model, named.gpu) == ("mine", "gh200")


def test_a_profile_file_serves_every_verb_that_takes_a_model(
    heddle: Heddle, profile: Path, trace: Path
) -> None:
    cluster = ("--model", profile, "--gpus", 2, "--max-running", 2)
    shipped = ("--model", "qwen3-8b", "--gpu", "h200", "--gpus", 2, "--max-running", 2)
    for policies in ("verl", "verl,heddle"):
        assert "qwen3-8b" in done(heddle, "compare", trace, *cluster, "--policies", policies)
    write_trace("four.jsonl", synth("coding", 8, seed=5, samples_per_group=2))
    plan = json.loads(done(heddle, "plan", "four.jsonl", *BRIEF, *cluster[:4], "--json"))
    assert plan["cluster"]["model"] == "qwen3-8b"
    mine = run_of(heddle(*ONE_RUN, trace, *cluster, "--json"))
    other = run_of(heddle(*ONE_RUN, trace, *shipped, "--json"))
    assert mine["makespan_s"] == pytest.approx(other["makespan_s"], rel=0.01)
    run = ("run", trace, "--engine", "fake", "--set", "runtime.time_scale=0.001", "--json")
    assert json.loads(done(heddle, *run, "--model", profile))["makespan_s"] > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--tp", "two"), "two is no list such as 4,8"),
        (("--tp", "0"), "0 is no list such as 4,8"),
        (("--tp", "16"), "cannot run at TP 16"),
        (("--max-running", 0), "--max-running 0: must be from 1"),
        (("--set", "profile.max_context=-5"), "profile.max_context -5: must be from 1"),
        (("--set", "profile.max_context=64"), "measuring takes 160 or more"),
        (("--model", "qwen9"), "unknown model 'qwen9'"),
        (("-o", "nowhere/sweep.json"), "nowhere: no such folder"),
        (("--engine", "vllm", "--model-dir", "there"), "vLLM is not installed: "),
        (("--engine", "vllm"), "--model-dir"),
        (("--set", "profile.share=rows.csv"), "profile.share is of engines of yours"),
    ],
)
def test_a_sweep_that_cannot_begin_states_the_reason(
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.setattr("heddle_runtime.vllm.checks.installed_vllm", lambda: None)
    status = 1 if "measuring takes" in said else 2
    out = () if "-o" in args else ("-o", "sweep.json")
    message = refused("profile", "measure", *SMALL, *args, *out, status=status)
    assert said in message
    assert not Path("sweep.json").exists()


@pytest.mark.parametrize(
    ("platform", "kv_transfer", "sleeps"),
    [("cuda", "none", True), ("cuda", "nixl", False), ("cpu", "none", False)],
)
def test_engines_of_a_sweep_can_sleep_where_they_have_gpus(
    monkeypatch: pytest.MonkeyPatch, platform: Platform, kv_transfer: Any, sleeps: bool
) -> None:
    from heddle.calibration.measure import settings_of
    from heddle.config import RunConfig, RuntimeConfig

    installed = Installed(SUPPORTED["cpu"], platform)
    monkeypatch.setattr("heddle.calibration.measure.installed_vllm", lambda: installed)
    runtime = RuntimeConfig(engine="vllm", model_dir="model", kv_transfer=kv_transfer)
    assert settings_of(RunConfig(trace="traces.jsonl", runtime=runtime)).sleep_mode is sleeps


def test_a_model_that_is_none_or_too_short_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="makes the tiny model")
    pytest.importorskip("safetensors", reason="makes the tiny model")
    from heddle_runtime.tiny_model import make_tiny_model

    installed = Installed(SUPPORTED["cpu"], "cpu")
    monkeypatch.setattr("heddle_runtime.vllm.checks.installed_vllm", lambda: installed)
    measure = ("profile", "measure", "--engine", "vllm", "--model-dir", "model", "-o", "s.json")
    assert "there is no such model folder" in refused(*measure)
    make_tiny_model("model")
    assert "profile.max_context 40000: must be from 1 to 32768" in refused(
        *measure, "--set", "profile.max_context=40000"
    )
    assert "TP" in refused(*measure, "--tp", 3)


def test_no_file_is_replaced_without_force(refused: Callable[..., str], heddle: Heddle) -> None:
    Path("sweep.json").write_text("mine")
    measure = ("profile", "measure", "--engine", "fake", *SMALL, "-o", "sweep.json")
    assert "sweep.json: exists" in refused(*measure)
    assert Path("sweep.json").read_text() == "mine"
    Path("sweep.json").unlink()
    done(heddle, *measure)


def test_a_sweep_that_breaks_off_keeps_what_it_has(
    heddle: Heddle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heddle_sim.engine_client import SimLauncher

    def dying(config: SimulationConfig, clock: Clock) -> SimLauncher:
        launcher = SimLauncher(config, clock)
        clock.call_at(123.0, launcher.fail, EngineId("m1"))
        return launcher

    monkeypatch.setattr("heddle.calibration.measure.SimLauncher", dying)
    result = heddle("profile", "measure", "--engine", "fake", *SMALL, "-o", "sweep.json")
    assert result.exit_code == 1
    assert "Error: engine m1 failed: injected fault" in result.stderr
    kept = read_sweep(Path("sweep.json"))
    assert 0 < len(kept.decode) < 90
    assert kept.notes == ("broke off: MeasureError: engine m1 failed: injected fault",)


def test_an_interrupted_sweep_is_kept_too(heddle: Heddle, monkeypatch: pytest.MonkeyPatch) -> None:
    import heddle_calibrate.measure.one_engine as one

    usual, calls = one.abort, 0

    async def interrupting(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        await usual(*args)

    monkeypatch.setattr(one, "abort", interrupting)
    result = heddle("profile", "measure", "--engine", "fake", *SMALL, "-o", "sweep.json")
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    kept = read_sweep(Path("sweep.json"))
    assert len(kept.aborts) == 2
    assert "broke off: KeyboardInterrupt" in kept.notes[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "heddle.sweep/1", "deco', "sweep.json: not JSON to its end"),
        ('{"schema": "heddle.run/1"}', "its schema is 'heddle.run/1', not 'heddle.sweep/1'"),
        ('{"schema": "heddle.sweep/1"}', "missing required field"),
        ("[]", "sweep.json"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(
    refused: Callable[..., str], text: str, said: str
) -> None:
    Path("sweep.json").write_text(text)
    assert said in refused("profile", "fit", "sweep.json", "-o", "p.json")
    assert not Path("p.json").exists()


@pytest.mark.parametrize("content", [b'{"schema": "\xff"}', b'{"schema":' + b"[" * 100_000])
def test_a_sweep_that_is_no_text_or_nested_too_deeply_is_refused(
    refused: Callable[..., str], trace: Path, content: bytes
) -> None:
    Path("odd.json").write_bytes(content)
    said = refused("profile", "fit", "odd.json", "-o", "p.json")
    assert "odd.json: not JSON to its end" in said
    assert "odd.json is not a profile" in refused(*ONE_RUN, trace, "--model", "odd.json")


def test_a_profile_needs_a_name_that_verbs_will_know(
    refused: Callable[..., str], profile: Path
) -> None:
    assert "ends in .json" in refused("profile", "fit", "sweep.json", "-o", "profile")


def test_a_sweep_with_too_few_points_is_refused(refused: Callable[..., str], profile: Path) -> None:
    data = json.loads(Path("sweep.json").read_text())
    data["decode"] = [trial for trial in data["decode"] if trial["batch"] == 1]
    Path("sweep.json").write_text(json.dumps(data))
    said = refused("profile", "fit", "sweep.json", "-o", "p.json")
    assert "at TP 1 the sweep has 1 batch sizes (decode), a fit needs 2" in said


# -- check ----------------------------------------------------------------------------------------


@pytest.fixture
def run(heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Run on fake engines in virtual time, so that nothing but the model decides."""

    def made(*args: object, policy: str = "verl") -> Path:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "run", run_virtual)
            said = done(
                heddle, "run", trace, "--engine", "fake", "--max-running", 2, "--json",
                "--policy", policy, *args,
            )  # fmt: skip
        return Path(json.loads(said)["run"])

    return made


def figures(heddle: Heddle, *args: object, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        done(heddle, "profile", "check", *args, "--json", status=status)
    )
    assert found["schema"] == "heddle.check/1"
    return found


def test_engines_that_follow_the_profile_are_simulated_without_error(
    heddle: Heddle, run: Callable[..., Path]
) -> None:
    runs = [run(policy=policy) for policy in ("verl", "heddle")]
    found = figures(
        heddle,
        *runs,
        "--set",
        "profile.max_makespan_error=0.01",
        "--set",
        "profile.same_ranking=true",
    )
    for each in found["runs"]:
        for name in ("makespan_s", "completion_p50_s", "completion_p99_s", "tpot_mean_ms"):
            assert each[name]["error_pct"] == pytest.approx(0.0, abs=1e-3), name
        assert each["prefix_hit"]["error_pct"] == pytest.approx(0.0, abs=1e-3)
        assert each["finish_order"] == pytest.approx(1.0)
    (ranking,) = found["rankings"]
    assert sorted(ranking["measured"]) == ["heddle", "verl"]
    assert ranking["measured"] == ranking["simulated"]
    assert ranking["alike"] == ranking["pairs"] <= 1


def test_a_death_in_the_run_happens_in_the_simulation_too(
    heddle: Heddle, run: Callable[..., Path]
) -> None:
    path = run("--set", "cluster.failures=e0@0.4", "--set", "cluster.engine_start_s=1")
    (each,) = figures(heddle, path)["runs"]
    assert each["makespan_s"]["error_pct"] == pytest.approx(0.0, abs=1e-3)


def slower(profile: Path, by: float) -> Path:
    data = json.loads(profile.read_text())
    for table in data["tables"].values():
        for section, column in (("decode", "base_ms"), ("decode", "context_us"), ("prefill", "ms")):
            table[section][column] = [value * by for value in table[section][column]]
    path = Path(f"slower-{profile.name}")
    path.write_text(json.dumps(data))
    return path


def test_a_profile_that_is_too_slow_shows_and_fails_the_check(
    heddle: Heddle, run: Callable[..., Path]
) -> None:
    path = run()
    wrong = slower(PROFILE_FOLDER / "qwen3-14b.h100.json", 3.0)
    (each,) = figures(heddle, path, "--model", wrong)["runs"]
    assert each["tpot_mean_ms"]["error_pct"] > 100
    assert each["makespan_s"]["error_pct"] > 10
    bounds = (
        "--set",
        "profile.max_makespan_error=5",
        "--set",
        "profile.max_p99_error=10",
        "--set",
        "profile.max_tpot_error=5",
    )
    result = heddle("profile", "check", path, "--model", wrong, *bounds)
    assert result.exit_code == 1
    assert "failed: " in result.stderr
    assert "allowed 5 %" in result.stderr
    for word in ("makespan_s", "completion_p99_s", "tpot_mean_ms"):
        assert word in result.stderr
        assert word in result.stdout
    found = figures(heddle, path, "--model", wrong, *bounds, status=1)
    assert len(found["failed"]) == 3


def test_kv_space_is_the_runs_own(heddle: Heddle, run: Callable[..., Path]) -> None:
    """A profile that was measured with little KV does not make a run's engines small."""
    path = run()
    data = json.loads((PROFILE_FOLDER / "qwen3-14b.h100.json").read_text())
    data["tables"]["1"]["kv_capacity_tokens"] = 1_000
    Path("small.json").write_text(json.dumps(data))
    (each,) = figures(heddle, path, "--model", "small.json")["runs"]
    assert each["makespan_s"]["error_pct"] == pytest.approx(0.0, abs=1e-3)


def test_one_run_has_nothing_to_rank(heddle: Heddle, run: Callable[..., Path]) -> None:
    result = heddle("profile", "check", run(), "--set", "profile.same_ranking=true")
    assert result.exit_code == 1
    assert "nothing to rank" in result.stderr


def test_runs_that_cannot_be_checked_are_refused_with_the_reason(
    refused: Callable[..., str], heddle: Heddle, run: Callable[..., Path], trace: Path
) -> None:
    Path("empty").mkdir()
    assert "empty: not a run directory" in refused("profile", "check", "empty")
    assert "nowhere: not a run directory" in refused("profile", "check", "nowhere")
    simulated = run_of(heddle(*ONE_RUN, trace, "--gpus", 2, "--json"))["run"]
    assert "is a simulated run" in refused("profile", "check", simulated)
    path = run()
    other = PROFILE_FOLDER / "qwen3-8b.h100.json"
    assert "is a profile of model 'qwen3-8b'" in refused("profile", "check", path, "--model", other)
    a100 = PROFILE_FOLDER / "qwen3-14b.a100.json"
    assert "is a profile of GPU class 'a100'" in refused("profile", "check", path, "--model", a100)
    assert "cannot read the profile gone.json" in refused(
        "profile", "check", path, "--model", "gone.json"
    )
    text = trace.read_text()
    trace.write_text(text.replace('"output_tokens": 40', '"output_tokens": 41'))
    assert "the file that is there now has sha256" in refused("profile", "check", path)
    trace.unlink()
    assert "takes the trace that it replayed" in refused("profile", "check", path)


def test_a_run_that_broke_off_is_no_truth(
    refused: Callable[..., str], run: Callable[..., Path]
) -> None:
    path = run()
    manifest = path / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace('"finished"', '"interrupted"'))
    assert "was interrupted before it finished" in refused("profile", "check", path)


def checked(policy: str, measured: float, simulated: float, kind: str = "k") -> Checked:
    figure = Figure(measured=measured, simulated=simulated, error_pct=None)
    return Checked(
        run=policy,
        policy=policy,
        seed=0,
        trace="t",
        kind=kind,
        figures={"makespan_s": figure},
        finish_order=None,
    )


def test_policies_are_ranked_by_their_mean_makespans() -> None:
    runs = [
        checked("a", 100.0, 90.0),
        checked("b", 80.0, 95.0),
        checked("c", 60.0, 50.0),
        checked("c", 64.0, 52.0),
    ]
    (ranking,) = rankings(runs, tie_pct=1.0)
    assert ranking.measured == ("c", "b", "a")
    assert ranking.simulated == ("c", "a", "b")
    assert (ranking.alike, ranking.pairs) == (2, 3)
    assert ranking.spread_pct == pytest.approx(4 / 62 * 100)


def test_makespans_closer_than_repeated_runs_are_not_ranked() -> None:
    close = [checked("a", 100.0, 90.0), checked("b", 100.5, 80.0)]
    assert rankings(close, tie_pct=1.0)[0].pairs == 0
    assert rankings(close, tie_pct=0.1)[0].pairs == 1
    noisy = [*close, checked("a", 110.0, 90.0)]
    assert rankings(noisy, tie_pct=0.1)[0].pairs == 0


def test_runs_of_different_clusters_are_not_ranked_together() -> None:
    apart = [checked("a", 100.0, 90.0), checked("b", 50.0, 80.0, kind="other")]
    assert rankings(apart, tie_pct=1.0) == []


def test_a_check_reads_the_run_as_it_is(heddle: Heddle, run: Callable[..., Path]) -> None:
    path = run(policy="heddle")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    done(heddle, "profile", "check", path)
    assert {f.name: f.read_bytes() for f in path.iterdir() if f.is_file()} == before
    assert load_run(path).status == "finished"


def test_a_search_for_a_plan_takes_as_long_as_in_the_run():
    search = SolvePlan(plan=1, problem=Problem((1.0,), {2: 0.5}))
    found = ResourcePlan(engines=())
    entries = [
        entry(Tick(time_s=3.0), search),
        entry(PlanSolved(time_s=5.5, plan=1, resource_plan=found)),
    ]
    of_profile = SimulationConfig(
        table=lambda shape: pytest.fail("no table is needed"),
        transfer_fixed_s=0.0,
        transfer_bytes_per_s=1e9,
    )
    assert simulation_of_run(entries, of_profile).planning_s == 2.5
    assert simulation_of_run(entries[1:], of_profile).planning_s is None
