"""The command line: exit statuses, what goes where, and one message for each mistake."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.runs import files as run_files
from heddle.runs import load_run
from heddle_core.events import EngineReady
from tests.app.journals import ONE_RUN, Heddle, last_run, run_of, unlisted
from tests.patience import PATIENCE_S

COMMAND = (sys.executable, "-m", "heddle.cli")
CLUSTER = ("--gpus", "2", "--max-running", "2")
FAKE = ("--engine", "fake", "--set", "runtime.time_scale=0.01")


def test_compare_shows_trace_cluster_bound_table_and_runs(heddle: Heddle, trace: Path):
    done = heddle("compare", trace, "--policies", "verl,slime", "--seeds", "2", *CLUSTER)
    assert done.exit_code == 0, done.output
    verdict, _, heads, *rows = done.stdout.splitlines()
    assert verdict.startswith("Run ")
    assert heads.split()[:4] == ["policy", "makespan_s", "vs", "best"]
    assert sorted(line.split()[0] for line in rows[:2]) == ["slime", "verl"]
    assert " 1.00 " in rows[0]
    at = rows.index("history  prior:coding")
    lines = rows[at - 3 : at + 4]
    assert lines[0].startswith("trace    small: 6 trajectories, 3 groups")
    assert lines[1].startswith("cluster  2 x h100, qwen3-14b, TP 1, 2 running per engine")
    assert lines[2].startswith("profile  ")
    assert lines[4].startswith("prices   h100 at $2.70 a GPU-hour")
    assert lines[5].startswith("bound    makespan at least ")
    assert lines[6].startswith("ideal    fluid ")
    assert len(list(Path("runs").glob("*/*/manifest.json"))) == 4
    assert done.stderr.splitlines() == [
        "Warning: 6 trajectories for 2 engines, fewer than 8 each: the longest trajectory decides, "
        "and policies hardly differ. Use fewer --gpus, or a larger trace (heddle trace resample)."
    ]


def test_json_is_all_there_is_on_standard_output(heddle: Heddle, trace: Path):
    first = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))
    again = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))
    assert first.keys() == again.keys()
    for key in first.keys() - {"wall_s", "run"}:
        assert first[key] == again[key]


def test_compare_takes_files_options_and_settings_in_this_order(heddle: Heddle, trace: Path):
    Path("a.toml").write_text(f'trace = "{trace}"\nseed = 5\n[cluster]\ngpus = 4\n')
    Path("b.toml").write_text("[cluster]\nmax_running = 3\n")
    done = heddle(
        *ONE_RUN,
        *("-c", "a.toml", "-c", "b.toml"),
        *("--json", "--gpus", 2, "--set", "cluster.max_running=1"),
    )
    row = run_of(done)
    assert (row["policy"], row["seed"]) == ("verl", 5)
    config = load_run(row["run"]).config
    assert (config.cluster.gpus, config.cluster.max_running) == (2, 1)
    assert "seed = 5" in (Path(row["run"]) / "config.toml").read_text()


def test_a_comparison_of_one_run_shows_every_figure(heddle: Heddle, trace: Path):
    done = heddle(*ONE_RUN, trace, *CLUSTER, "--set", "cluster.tool_capacity=1")
    assert done.exit_code == 0, done.output
    for word in ("makespan_s", "utilisation", "arrived", "bound_fraction"):
        assert word in done.stdout


def test_replay_confirms_equal_commands_and_reports_a_change(heddle: Heddle, trace: Path):
    row = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))
    same = heddle("replay", row["run"])
    assert same.exit_code == 0
    assert "commands: the same" in same.stdout
    # As if the policy had another context: its commands are not those recorded.
    context = Path(row["run"]) / "context.json"
    context.chmod(0o644)
    unchanged = context.read_text()
    context.write_text(unchanged.replace('"max_running": 2', '"max_running": 3'))
    refused = heddle("replay", row["run"])
    assert refused.exit_code == 2
    assert "context.json: damaged: it has sha256 " in refused.stderr
    context.write_text(unchanged)
    unlisted(Path(row["run"]))
    context.write_text(context.read_text().replace('"max_running": 2', '"max_running": 3'))
    other = heddle("replay", row["run"], "--json")
    assert other.exit_code == 1
    found = json.loads(other.stdout)
    assert found["same"] is False
    assert found["divergence"]["recorded"] != found["divergence"]["replayed"]
    assert heddle("replay", row["run"]).stdout.startswith("diverges: entry 0")


def test_report_draws_and_tabulates(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl,slime", *CLUSTER)
    runs = sorted(path.parent for path in Path("runs").glob("*/*/manifest.json"))
    done = heddle("report", *runs)
    assert done.exit_code == 0, done.output
    assert "makespan_s" in done.stdout
    drawn = {p.name for p in (runs[0].parent / "figures").iterdir()}
    assert drawn == {
        "active.png",
        "completion.png",
        "queueing.png",
        "timeline-slime-s0.png",
        "timeline-verl-s0.png",
    }
    again = heddle("report", runs[0], "--json")
    listed = json.loads(again.stdout)
    assert listed["runs"][0]["summary"]["arrived"] == 6
    files = [Path(f) for f in listed["figures"]]
    assert all(f.parent == runs[0] / "figures" for f in files)
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_an_engine_that_dies_is_replaced_and_the_run_ends_complete(heddle: Heddle, trace: Path):
    options = (
        "--set",
        "cluster.failures=e0@2",
        "--set",
        "cluster.engine_start_s=1",
        "--json",
    )
    row = run_of(heddle(*ONE_RUN, trace, *options))
    summary = json.loads((Path(row["run"]) / "summary.json").read_text(encoding="utf-8"))
    assert summary["engine_failures"] == 1
    assert summary["completed"] + summary["truncated"] == summary["arrived"]
    heddle("replay", row["run"])


@pytest.mark.parametrize("failures", ["e0", "e0@", "@3", "e0@soon", "e0@-1", "e0@nan"])
def test_a_failure_without_engine_or_time_is_refused(
    refused: Callable[..., str], trace: Path, failures: str
):
    assert "is not ENGINE@SECONDS" in refused(
        *ONE_RUN, trace, "--set", f"cluster.failures={failures}"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--set cluster.failures=e4@1", "there is no engine 'e4'; there are e0 to e3 at most"),
        (
            "--set cluster.failures=e2@1 --tp 2",
            "there is no engine 'e2'; there are e0 to e1 at most",
        ),
        ("--set cluster.failures=p0@1", "there is no engine 'p0'; there are e0 to e3 at most"),
        (
            "--set cluster.failures=p1@1 --set cluster.roles=prefill=1,decode=3",
            "there are e0 to e2 and p0 at most",
        ),
        (
            "--set cluster.failures=engine@1 --gpus 1",
            "there is no engine 'engine'; there are e0 at most",
        ),
        (
            "--set cluster.failures=e4@1 --policies heddle",
            "there is no engine 'e4'; there are e0 to e3 at most",
        ),
    ],
)
def test_a_failure_of_no_engine_is_refused(
    refused: Callable[..., str], trace: Path, options: str, said: str
):
    assert said in refused(*ONE_RUN, trace, "--gpus", 4, *options.split())


def test_failures_may_name_what_a_planner_or_a_restart_makes(heddle: Heddle, trace: Path):
    for options in (
        "--set cluster.failures=e3@1 --policies heddle",
        "--set cluster.failures=e0@1,e0+1@30",
        "--set cluster.failures=p0@1 --set cluster.roles=prefill=1,decode=3",
    ):
        done = heddle(*ONE_RUN, trace, "--gpus", 4, *options.split())
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("verb", "options"),
    [(ONE_RUN, ("--set", "cluster.mix=[2,1,1]", "--gpus", 4)), (("run", "--tp", "2,1,1"), FAKE)],
)
def test_a_list_of_tp_degrees_has_one_for_each_engine_of_a_run(
    heddle: Heddle, trace: Path, verb: tuple[str, ...], options: tuple[object, ...]
):
    done = heddle(*verb, trace, *options)
    assert done.exit_code == 0, done.output
    assert "TP 2, 1, 1" in done.stdout
    [path] = Path("runs").rglob("manifest.json")
    run = load_run(path.parent)
    ready = [e.event for e in run.entries() if isinstance(e.event, EngineReady)]
    assert [engine.shape.tp for engine in ready] == [2, 1, 1]
    assert (run.config.cluster.gpus, run.config.cluster.mix) == (4, (2, 1, 1))


def test_one_tp_degree_as_an_option_wins_over_a_list_in_a_file(heddle: Heddle, trace: Path):
    Path("run.toml").write_text("[cluster]\ngpus = 4\nmix = [2, 1, 1]\n")
    done = heddle(*ONE_RUN, trace, "-c", "run.toml", "--tp", 2, "--json")
    cluster = load_run(run_of(done)["run"]).config.cluster
    assert (cluster.tp, cluster.mix) == (2, ())


def test_policies_lists_presets_parts_and_profiles(heddle: Heddle):
    found = json.loads(heddle("policies", "list", "--json").stdout)
    assert {"verl", "verl-star", "slime"} <= found["presets"].keys()
    assert "fcfs" in found["parts"]["scheduler"]
    assert "h100" in found["profiles"]["qwen3-14b"]
    text = heddle("policies", "list").stdout
    assert all(name in text for name in (*found["presets"], *found["profiles"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policies", "verl,slim"), "Did you mean 'slime'?"),
        (("--policies", ","), "no policy is named"),
        (("--policies", "verl", "--model", "qwen3-14"), "did you mean 'qwen3-14b'?"),
        (("--policies", "verl", "--gpu", "h10"), "did you mean 'h100'?"),
        (("--policies", "verl", "--tp", "3", "--gpus", "3"), "TP degrees that fit: 1, 2, 4, 8"),
        (("--policies", "verl", "--tp", "2", "--gpus", "3"), "3 is not divisible by tp = 2"),
        (("--policies", "verl", "--tp", "one"), "--tp one: write a TP degree"),
        (("--policies", "verl", "--tp", "0"), "--tp 0: write a TP degree"),
        (
            ("--policies", "verl", "--sweep", "cluster.tp=1,,2"),
            "cluster.tp=1,,2: write whole numbers from 1",
        ),
        (
            ("--policies", "verl", "--sweep", "cluster.tp=1,best"),
            "cluster.tp=1,best: write whole numbers from 1",
        ),
        (
            ("--policies", "verl", "--sweep", "cluster.tp=4,2,1,1"),
            "1 is listed twice, and each is tried once.",
        ),
        (("--policies", "verl", "--sweep", "cluster.tp=4,2,1,1"), "side by side are cluster.mix"),
        (
            ("--policies", "verl", "--sweep", "cluster.tp=1,3", "--gpus", "4"),
            "TP degrees that fit: 1, 2, 4, 8",
        ),
        (
            ("--policies", "verl", "--sweep", "cluster.tp=1,4", "--gpus", "6"),
            "gpus = 6 is not divisible by TP",
        ),
        (
            ("--policies", "verl", "--max-running", "many"),
            "'many' is neither a whole",
        ),
        (("--policies", "verl", "--max-running", "9000"), "max_running must be from 1 to 8,192"),
        (
            ("--policies", "verl", "--sweep", "cluster.max_running=8,9000"),
            "9000 running steps: max_running must",
        ),
        (
            ("--policies", "verl", "--sweep", "cluster.max_running=8,8"),
            "8 is listed twice, and each is tried",
        ),
        (("--policies", "verl", "--gpus", "0"), "gpus must be from 1"),
        (("--policies", "verl", "--seeds", "0"), "seeds must be from 1"),
        (
            ("--policies", "verl", "--set", "missing.cap_tool_s=-1"),
            "cap_tool_s must be more than 0",
        ),
        (("--policies", "verl", "--set", "cluster.gpuz=1"), 'Did you mean "gpu"?'),
        (("--policies", "verl", "--out", "no/runs"), "no such directory"),
        (("--policies", "os.path:join"), "cannot be built"),
    ],
)
def test_a_wrong_option_is_named(
    refused: Callable[..., str], trace: Path, options: tuple[str, ...], said: str
):
    assert said in refused("compare", trace, *options)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "small.jsonl"),
        (b'{"trajectory_id": ', "line 1"),
        (b'{"trajectory_id": "a"}\n', "line 1"),
        (b"\x1f\x8b\x08\x00truncated", "small.jsonl"),
        (None, "no such file"),
    ],
)
def test_a_bad_trace_is_named(
    refused: Callable[..., str], trace: Path, content: bytes | None, said: str
):
    if content is None:
        trace.unlink()
    else:
        trace.write_bytes(content)
    assert said in refused(*ONE_RUN, trace)
    assert not Path("runs").exists()


def test_missing_values_are_not_taken_for_zero(refused: Callable[..., str], trace: Path):
    trace.write_text(trace.read_text().replace('"tool_s": 0.5', '"tool_s": null'))
    assert "--set missing.tool_s=" in refused(*ONE_RUN, trace)


def test_two_traces_are_one_too_many(refused: Callable[..., str], trace: Path):
    assert "one trace at a time" in refused(*ONE_RUN, trace, trace)


def test_what_is_no_run_is_named(refused: Callable[..., str], trace: Path):
    assert "not a run directory" in refused("report", trace.parent)
    assert "not a run directory" in refused("replay", trace.parent)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (errno.ENOSPC, 1, "the disk is full: free some space"),
        (errno.EROFS, 2, "is on a read-only file system: choose another folder with --out"),
        (errno.EACCES, 2, "permission denied: choose another folder with --out"),
    ],
)
def test_trouble_with_the_disk_is_one_message(
    refused: Callable[..., str],
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    status: int,
    said: str,
):
    def fails(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(run_files, "written_table", fails)
    message = refused(*ONE_RUN, trace, *CLUSTER, status=status)
    assert said in message
    run = last_run()
    assert f"{run} keeps the journal up to there" in message
    assert load_run(run, unfinished=True).status == "failed"


def test_out_that_is_a_file_is_named(refused: Callable[..., str], trace: Path):
    assert "is a file" in refused(*ONE_RUN, trace, *CLUSTER, "--out", trace)


def test_ctrl_c_marks_the_run_and_exits_with_130(tmp_path: Path):
    trace = Path(__file__).resolve().parents[2] / "traces" / "coding-512.jsonl.gz"
    (tmp_path / "stop.py").write_text(
        "import os, signal\n"
        "from heddle.runs import directory as runs\n"
        "from heddle.cli import main\n"
        "runs.CHUNK_ENTRIES = 200\n"
        "flush, count = runs.RunDirectory.flush, [0]\n"
        "def stop(run):\n"
        "    flush(run)\n"
        "    count[0] += 1\n"
        "    if count[0] == 3:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "runs.RunDirectory.flush = stop\n"
        f"main(['compare', {str(trace)!r}, '--policies', 'verl', '--jobs', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "stop.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    path = last_run(tmp_path / "runs")
    assert done.stderr.splitlines() == [
        "Interrupted.",
        f"{path.relative_to(tmp_path)} keeps the journal up to there; it is no result.",
        f"0 of 1 runs are finished and stay in {path.parent.relative_to(tmp_path)}.",
    ]
    run = load_run(path, unfinished=True)
    assert run.status == "interrupted"
    assert sum(1 for _ in run.entries()) >= 600


def test_ctrl_c_ends_every_process_of_a_comparison(tmp_path: Path):
    trace = Path(__file__).resolve().parents[2] / "traces" / "coding-512.jsonl.gz"
    process = subprocess.Popen(
        [*COMMAND, "compare", trace, "--policies", "verl,slime", "--seeds", "40", "--jobs", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not list(tmp_path.glob("runs/*/*/summary.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("Interrupted.")
    (folder,) = (tmp_path / "runs").iterdir()
    states = [load_run(p, unfinished=True).status for p in folder.iterdir()]
    assert "running" not in states
    assert len(states) < 80


def test_help_names_every_verb_and_imports_little():
    check = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from heddle.cli import main\n"
        "done = CliRunner().invoke(main, ['--help'])\n"
        "assert done.exit_code == 0, done.output\n"
        "for verb in ('compare', 'plan', 'replay', 'report', 'trace', 'policies'):\n"
        "    assert verb in done.output\n"
        "heavy = {'pandas', 'pyarrow', 'matplotlib', 'scipy', 'numpy', 'simpy', 'msgspec'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_heddle_offers_its_names_and_costs_nothing():
    check = (
        "import sys, heddle\n"
        "assert 'numpy' not in sys.modules\n"
        "assert heddle.compare and heddle.simulate\n"
        "assert not {'asyncio', 'heddle.loops.comparison'} & set(sys.modules)\n"
        "import heddle.cli.replay, heddle.cli.plan, heddle.cli.run, heddle.runs.replay\n"
        "verbs = ('compare', 'simulate', 'plan', 'run', 'replay')\n"
        "assert all(callable(getattr(heddle, verb)) for verb in verbs)\n"
        "assert {*verbs, 'RuntimeConfig', 'RunConfig'} <= set(heddle.__all__)\n"
        "assert all(getattr(heddle, name) is not None for name in heddle.__all__)\n"
        "assert 'verl' in heddle.PRESETS and callable(heddle.load_run)\n"
        "assert set(heddle.__all__) <= set(dir(heddle))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import heddle

    with pytest.raises(AttributeError, match="no attribute 'comparee'"):
        _ = heddle.comparee


def test_version(heddle: Heddle):
    assert heddle("--version").stdout.startswith("heddle, version 0.")


@pytest.mark.parametrize(
    ("verb", "key"),
    [
        (("profile", "check", "run"), "profile.max_makespan_error"),
        (("profile", "check", "run"), "profile.max_p99_error"),
        (("profile", "check", "run"), "profile.max_tpot_error"),
        (("profile", "check", "run"), "profile.min_finish_order"),
        (("profile", "check", "run"), "profile.tie"),
        (("profile", "fit", "sweep.json", "-o", "profile.json"), "profile.max_fit_error"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "-2"])
def test_a_bound_that_nothing_can_be_compared_with_is_refused(
    refused: Callable[..., str], verb: tuple[str, ...], key: str, value: str
):
    assert "must be" in refused(*verb, "--set", f"{key}={value}")


def test_a_share_that_is_no_number_is_refused(refused: Callable[..., str]):
    for value in ("nan", "-2"):
        said = refused("predict", "evaluate", "model.heddle", "trace.jsonl", "--slots", value)
        assert "Invalid value for '--slots'" in said


def test_an_interrupt_after_the_command_has_ended_has_the_status_of_an_interrupt(monkeypatch):
    def interrupted(context: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Context, "close", interrupted)
    assert CliRunner().invoke(main, ["policies", "list"]).exit_code == 130
