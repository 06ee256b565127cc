"""`heddle run` with fake engines: the same run directory as a simulation, in real time."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig, RuntimeConfig
from heddle.engines import engine_facts, vllm_settings
from heddle.runs import load_run
from heddle.runs.conditions import lateness_figures, lateness_note
from heddle_core.events import EngineFailed, EngineReady, StepFinished, TrajectoryFinished
from heddle_runtime.clock import Lateness
from heddle_runtime.vllm.checks import EngineSetupError
from heddle_runtime.vllm.settings import VllmSettings
from tests.app.journals import ONE_RUN, Heddle, run_of
from tests.patience import PATIENCE_S

COMMAND = (sys.executable, "-m", "heddle.cli")
FAST = ("--engine", "fake", "--set", "runtime.time_scale=0.01", "--max-running", "2")


def row_of(heddle: Heddle, *args: object) -> dict:
    done = heddle("run", *args, *FAST, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("policy", ["verl", "heddle"])
def test_a_fake_run_is_never_faster_than_its_simulation_and_makes_every_token(
    heddle: Heddle, trace: Path, policy: str
):
    began_s = time.monotonic()
    run = row_of(heddle, trace, "--policy", policy, "--engines", 2)
    wall_s = time.monotonic() - began_s
    told = heddle(*ONE_RUN, trace, "--policies", policy, "--gpus", 2, "--max-running", 2, "--json")
    simulated = run_of(told)
    assert run.keys() == simulated.keys()
    # A recorded second lasts a hundredth of a real one; how much longer depends on the machine.
    assert simulated["makespan_s"] * 0.98 <= run["makespan_s"] <= wall_s / 0.01
    journal = load_run(run["run"])
    assert journal.manifest["driver"] == "heddle_runtime"
    assert journal.manifest["world"]["engine"] == "fake"
    made = sum(
        e.event.output_tokens for e in journal.entries() if isinstance(e.event, StepFinished)
    )
    recorded = [json.loads(line) for line in trace.read_text().splitlines()]
    assert made == sum(s["output_tokens"] for t in recorded for s in t["steps"])


def test_a_run_replays_on_a_fresh_controller(heddle: Heddle, trace: Path):
    run = row_of(heddle, trace, "--policy", "heddle")
    assert "the same" in heddle("replay", run["run"]).stdout


def test_engines_of_several_degrees_are_distinguished(heddle: Heddle, trace: Path):
    run = load_run(row_of(heddle, trace, "--engines", 2, "--tp", "1,2")["run"])
    ready = [e.event for e in run.entries() if isinstance(e.event, EngineReady)]
    assert [(e.engine, e.shape.tp) for e in ready] == [("e0", 1), ("e1", 2)]
    assert run.config.cluster.gpus == 3


def test_a_requested_failure_happens_and_loses_nothing(heddle: Heddle, trace: Path):
    row = row_of(
        heddle, trace, "--set", "cluster.failures=e0@0.4", "--set", "cluster.engine_start_s=1"
    )
    run = load_run(row["run"])
    events = [e.event for e in run.entries()]
    assert [e.engine for e in events if isinstance(e, EngineFailed)] == ["e0"]
    ends = [e.outcome for e in events if isinstance(e, TrajectoryFinished)]
    assert ends == ["completed"] * 6


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--engines", "2", "--tp", "1,2,4"), "--tp 1,2,4 names 3 engines"),
        (("--tp", "one"), "write a TP degree"),
        (("--engines", "0", "--tp", "1"), "must be 1 or more"),
        (("--tp", "3"), "TP"),
        (("--set", "runtime.time_scale=0"), "time_scale must be more than 0"),
        (("--engine", "vllm"), "--model-dir"),
        (("--set", "runtime.pin_s=-1"), "pin_s must be from 0 to 31,536,000 seconds"),
        (
            ("--set", "runtime.start_limit_s=0"),
            "start_limit_s must be more than 0 and at most 31,536,000 seconds",
        ),
        (("--set", "runtime.tool_limit_s=-1"), "tool_limit_s must be more than 0"),
        (
            ("--set", "runtime.tool_limit_s=inf"),
            "tool_limit_s must be more than 0 and at most 31,536,000 seconds",
        ),
        (("--set", "runtime.tool_limit_s=nan"), "tool_limit_s must be more than 0"),
        (("--set", "runtime.time_scale=inf"), "time_scale must be more than 0"),
        (("--set", "runtime.pin_s=inf"), "pin_s must be from 0 to 31,536,000 seconds"),
        (
            ("--set", "runtime.start_limit_s=inf"),
            "start_limit_s must be more than 0 and at most 31,536,000 seconds",
        ),
        (("--set", "runtime.max_context=-5"), "max_context must be from 1"),
        (("--set", "runtime.max_batched_tokens=0"), "max_batched_tokens must be from 1"),
        (("--set", "runtime.temperature=inf"), "temperature must be from 0 to 100"),
        (("--set", f"runtime.kv_mib={10**30}"), "runtime.kv_mib"),
        (("--policy", "nosuch"), "nosuch"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    refused: Callable[..., str], trace: Path, args: tuple[str, ...], says: str
):
    said = refused("run", trace, *args)
    assert says in said
    assert len(said.splitlines()) == 1
    assert not list(Path().glob("runs/*"))


@pytest.mark.parametrize(
    ("policy", "planned"), [("verl", []), ("verl+consolidate", [1, 2]), ("heddle", [1, 2])]
)
def test_the_degrees_that_a_policy_may_choose_are_checked(
    refused: Callable[..., str],
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    planned: list[int],
):
    def facts(config: RunConfig, largest_tokens: int, planned_tps: list[int]) -> None:
        raise EngineSetupError(f"may choose {planned_tps}")

    monkeypatch.setattr("heddle.running.engine_facts", facts)
    real = ("--engine", "vllm", "--model-dir", ".", "--engines", 2)
    assert f"may choose {planned}" in refused("run", trace, *real, "--policy", policy)


def test_a_degree_that_may_be_chosen_and_cannot_run_is_named(
    trace: Path, monkeypatch: pytest.MonkeyPatch
):
    def check(settings: VllmSettings, *, tp_degrees: tuple[int, ...], largest_tokens: int) -> None:
        if 2 in tp_degrees:
            raise EngineSetupError("TP 2 does not divide the model's 3 heads")

    monkeypatch.setattr("heddle.engines.check_engines", check)
    config = RunConfig(
        trace=str(trace),
        cluster=ClusterConfig(gpus=2),
        runtime=RuntimeConfig(engine="vllm", model_dir="m"),
    )
    with pytest.raises(
        EngineSetupError, match=r"TP 2, which cannot run.*3 heads.*tp_choices=\[1\]"
    ):
        engine_facts(config, 1000, [1, 2])


def test_engines_are_set_up_by_the_configuration(trace: Path):
    runtime = RuntimeConfig(engine="vllm", model_dir="m", pin_s=1.5, kv_mib=64, dtype="float32")
    made = vllm_settings(RunConfig(trace=str(trace), seed=3, runtime=runtime))
    assert (made.pin_s, made.kv_bytes, made.dtype, made.seed) == (1.5, 64 << 20, "float32", 3)


def started(folder: Path, *args: object) -> "subprocess.Popen[str]":
    """A run whose directory is there and whose steps are under way."""
    trace = Path(__file__).resolve().parents[2] / "traces" / "tiny.jsonl"
    process = subprocess.Popen(
        [*COMMAND, "run", trace, "--engine", "fake", "--engines", "2", *map(str, args)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and _ready_engines(folder) < 2:
        time.sleep(0.05)
    time.sleep(1.5)
    return process


def _ready_engines(folder: Path) -> int:
    manifests = [json.loads(p.read_text()) for p in folder.glob("runs/*/manifest.json")]
    return sum(len((manifest["world"] or {}).get("engines", ())) for manifest in manifests)


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGINT, 130, "Interrupted.\n"),
        (signal.SIGTERM, 143, "Interrupted: ended by SIGTERM.\n"),
        (signal.SIGHUP, 129, "Interrupted: ended by SIGHUP.\n"),
    ],
)
def test_a_signal_cancels_what_runs_and_leaves_a_journal(
    tmp_path: Path, number: signal.Signals, status: int, says: str
):
    process = started(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith(says)
    (path,) = (tmp_path / "runs").iterdir()
    run = load_run(path, unfinished=True)
    assert run.status == "interrupted"
    ends = [e.event for e in run.entries() if isinstance(e.event, TrajectoryFinished)]
    assert len(ends) == 12
    assert {e.outcome for e in ends} <= {"completed", "cancelled"}
    assert "cancelled" in [e.outcome for e in ends]


def test_many_interrupts_leave_a_run_marked_interrupted(tmp_path: Path):
    process = started(tmp_path)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    out, err = process.communicate(timeout=PATIENCE_S)
    (path,) = (tmp_path / "runs").iterdir()
    run = load_run(path, unfinished=True)
    assert run.status == "interrupted", err
    assert out == ""
    assert [e.event for e in run.entries() if isinstance(e.event, EngineReady)]


def test_the_manifest_describes_each_engine(heddle: Heddle, trace: Path):
    run = load_run(row_of(heddle, trace, "--engines", 2, "--tp", "1,2")["run"])
    ready = [e.event for e in run.entries() if isinstance(e.event, EngineReady)]
    engines = run.manifest["world"]["engines"]
    assert [(e.engine, e.shape.tp, e.kv_capacity_tokens) for e in ready] == [
        (name, facts["tp"], facts["kv_capacity_tokens"]) for name, facts in engines.items()
    ]


@pytest.mark.parametrize(
    ("lateness", "share", "says"),
    [
        (Lateness(100, 0.5, 1.0), 0.005, None),
        (Lateness(100, 2.0, 4.0), 0.02, "Its times are too long by about that much"),
        (Lateness(100, 0.5, 30.0), 0.03, "Its times are too long by about that much"),
        (Lateness(100, 6.0, 8.0), 0.06, "not valid for comparison"),
        (Lateness(1000, 0.1, 90.0), 0.09, "not valid for comparison"),
    ],
)
def test_lateness_of_one_call_or_of_all_for_each_trajectory_counts(
    lateness: Lateness, share: float, says: str | None
):
    figures = lateness_figures(lateness, makespan_s=100.0, trajectories=10)
    assert figures["late_share"] == pytest.approx(share)
    assert figures["comparable"] == (share <= 0.05)
    note = lateness_note(figures)
    assert note is None if says is None else note is not None and says in note


def test_a_run_whose_event_loop_fell_behind_is_marked_and_every_reader_says_so(
    heddle: Heddle, trace: Path, tmp_path: Path
):
    # A recorded second in 10 µs: no machine handles the events in that time.
    late = ("--engines", 2, "--engine", "fake", "--set", "runtime.time_scale=0.00001")
    done = heddle("run", trace, *late, "--json")
    row = json.loads(done.stdout)
    assert row["late_share"] > 0.05
    assert "not valid for comparison" in done.stderr
    summary = load_run(row["run"]).summary
    assert summary["comparable"] is False
    assert summary["late_share"] == row["late_share"]
    assert 0 < summary["late_mean_s"] <= summary["late_max_s"]
    figures = heddle("report", row["run"], "-o", tmp_path / "figures")
    assert "not valid for comparison" in figures.stderr
    assert "comparable" in figures.stdout
    page = heddle("report", row["run"], "-o", tmp_path / "run.html")
    assert "not valid for comparison" in page.stderr
    checked = heddle("profile", "check", row["run"], "--json")
    assert "not valid for comparison" in checked.stderr
    assert json.loads(checked.stdout)["runs"][0]["late_share"] == row["late_share"]


def test_a_simulated_run_is_never_late(heddle: Heddle, trace: Path):
    done = heddle(*ONE_RUN, trace, "--json")
    assert run_of(done)["late_share"] == 0.0
    assert "late" not in done.stderr
