"""Logs in place of a trace: imported, a rollout drawn from them, and replayed."""

import json
from pathlib import Path

import pytest

from heddle_trace import read_trace, write_trace
from tests.app.journals import BRIEF, Heddle
from tests.trace.builders import call, record, step
from tests.trace.imported_logs import FIXTURES

TASKS = FIXTURES / "openai_chat_tasks.json"
DRAWN = ("--set", "logs.groups=2", "--set", "logs.samples=2")
FEW = (*DRAWN, "--gpus", "2", "--jobs", "1", "--policies", "verl,heddle")


def test_logs_become_a_trace_a_rollout_and_a_comparison(heddle: Heddle, tmp_path: Path):
    logs, out = tmp_path / "logs", tmp_path / "out"
    (logs / "more").mkdir(parents=True)
    for name in ("openai_chat_tasks.json", "verl.jsonl"):
        (logs / name).write_bytes((FIXTURES / name).read_bytes())
    runs = json.loads(TASKS.read_text())
    (logs / "more" / "second.json").write_text(json.dumps([{**runs[0], "id": "9/0"}]))
    (logs / "README.md").write_text("Notes.\n")
    done = heddle("compare", logs, *FEW, "--out", out)
    assert done.exit_code == 0, done.output
    (trace,) = out.glob("logs-trace-*.jsonl.gz")
    (rollout,) = out.glob("logs-rollout-*.jsonl.gz")
    assert len(read_trace(trace).records) == len(read_trace(rollout).records) == 4
    assert len(list(out.glob("*-compare/*/manifest.json"))) == 2
    (page,) = out.glob("*-compare/report.html")
    assert b"<html" in page.read_bytes()[:2000].lower()
    for line in (
        "format    openai-chat",
        "left out  2 files of another format",
        f"          {logs}/README.md: no known format",
        f"          {logs}/verl.jsonl: verl",
        f"written   {rollout}: 4 trajectories in 2 groups of 2",
    ):
        assert line in done.stderr, line
    assert "missing tool_s drawn from typical ones of other" in " ".join(done.stdout.split())


def test_all_trajectories_of_logs_are_replayed_where_no_rollout_is_named(
    heddle: Heddle, tmp_path: Path
):
    done = heddle("compare", TASKS, *FEW[4:], "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["logs"].keys() == {"import"}
    trace = Path(found["logs"]["import"]["trace"])
    assert found["trace"]["trajectories"] == len(read_trace(trace).records) == 3
    command = found["recommended"]["command"]
    again = heddle(*command[1:], "--json")
    assert again.exit_code == 0, again.output


def test_json_has_what_import_and_resample_print(heddle: Heddle, tmp_path: Path):
    done = heddle("compare", TASKS, *FEW, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    trace, rollout = (Path(found["logs"][key]["trace"]) for key in ("import", "rollout"))
    for key, words in (
        ("import", ("trace", "import", TASKS, "-o", tmp_path / "t.jsonl.gz")),
        ("rollout", ("trace", "resample", trace, 2, 2, "-o", tmp_path / "r.jsonl.gz")),
    ):
        alone = json.loads(heddle(*words, "--json").stdout)
        alone["trace"] = found["logs"][key]["trace"]
        del alone["schema"]
        assert found["logs"][key] == alone
    # The same logs again give the same files; a run finds the trace that it replayed.
    again = json.loads(heddle("compare", TASKS, *FEW, "--json").stdout)
    assert again["logs"] == found["logs"]
    assert sorted(Path("runs").glob("*.gz")) == sorted([trace, rollout])


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        (("plan", "--gpus", 2, "--set", "logs.groups=4", *BRIEF), "heddle.plan/2"),
        (("loop", "--regimes", "sync", "--gpus", 8), "heddle.loop/1"),
    ],
)
def test_plans_and_loops_take_logs_too(heddle: Heddle, words: tuple[object, ...], schema: str):
    Path("heddle.toml").write_text(
        "[loop]\ntrain_gpus = 4\ngroups = 1\nsamples = 2\nbatches = 4\nrepeat = true\n"
    )
    done = heddle(words[0], TASKS, *DRAWN, *words[1:], "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["schema"] == schema


def test_rules_of_a_file_come_before_those_of_logs(heddle: Heddle):
    Path("heddle.toml").write_text('[missing]\ntool_s = "zero"\ncap_tool_s = 7.0\n')
    done = heddle("compare", TASKS, *FEW, "--json")
    assert done.exit_code == 0, done.output
    run = Path(json.loads(done.stdout)["runs"][0]["run"])
    missing = json.loads((run / "config.resolved.json").read_text())["missing"]
    assert (missing["tool_s"], missing["cap_tool_s"]) == ("zero", 7.0)


def test_a_trace_is_taken_as_it_is(heddle: Heddle, tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    steps = (call(30, tool_s=None), step(9))
    write_trace(trace, [record(*steps, trajectory_id=f"{n}", group_id="g") for n in range(4)])
    assert "--set missing.tool_s=" in heddle("compare", trace, *FEW).stderr
    done = heddle("compare", trace, *FEW, "--missing-tool-s", 2, "--json")
    assert done.exit_code == 0, done.output
    assert "logs" not in json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: no such file; check the path"),
        ((FIXTURES / "verl.jsonl", "--missing-tool-s", "often"), "'often' is no rule"),
        ((FIXTURES / "verl.jsonl", "--tp", "x"), "--tp x: write"),
        ((FIXTURES / "verl.jsonl", "--set", "logs.format=tau2"), "this is verl, not tau2"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    heddle: Heddle, arguments: tuple[object, ...], fault: str
):
    done = heddle("compare", *arguments)
    assert done.exit_code == 2
    assert fault in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


def test_what_drawn_values_change_is_said_once(heddle: Heddle):
    words = ("compare", FIXTURES / "verl.jsonl", *FEW, "--policies", "verl")
    done = heddle(*words, "--seeds", 3, "--set", "missing.tool_s=typical", "--json")
    assert done.exit_code == 0, done.output
    times = [run["makespan_s"] for run in json.loads(done.stdout)["runs"]]
    said = f"verl takes {min(times):.3g} to {max(times):.3g} s with those of these seeds"
    shown = heddle(*words, "--seeds", 3, "--set", "missing.tool_s=typical")
    assert shown.stdout.count(said) == 1
    one = heddle(*words, "--seeds", 1, "--set", "missing.tool_s=typical")
    assert "--seeds 3 shows what other drawn values change" in one.stdout
    assert "missing  " not in heddle(*words, "--seeds", 1, "--missing-tool-s", 0).stdout


@pytest.mark.parametrize("words", [("compare",), ("trace", "import", "-o", "t.jsonl")])
def test_a_folder_without_one_format_names_a_setting_that_the_command_takes(
    heddle: Heddle, tmp_path: Path, words: tuple[str, ...]
):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "notes.txt").write_text("notes")
    refused = heddle(*words, logs)
    assert refused.exit_code == 2
    assert "no file in it is of a known format; name one with --set logs.format=" in refused.stderr
    for name in ("verl.jsonl", "openai_chat.jsonl"):
        (logs / name).write_bytes((FIXTURES / name).read_bytes())
    refused = heddle(*words, logs)
    assert "choose one with --set logs.format=FORMAT" in refused.stderr
    more = FEW if words == ("compare",) else ()
    done = heddle(*words, logs, *more, "--set", "logs.format=verl")
    assert done.exit_code == 0, done.output


def test_logs_given_to_run_name_the_command_that_makes_a_trace(heddle: Heddle):
    source = FIXTURES / "verl.jsonl"
    done = heddle("run", source)
    assert done.exit_code == 2
    assert f"{source}: is a log of the format verl, not a trace; make one of it" in done.stderr
