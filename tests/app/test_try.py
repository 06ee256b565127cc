"""`heddle try`: from logs to an answer in one folder, in process."""

import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle_trace import read_trace, write_trace
from tests.trace.builders import call, record, step
from tests.trace.imported_logs import FIXTURES

TASKS = FIXTURES / "openai_chat_tasks.json"
FEW = ("--groups", "2", "--samples", "2", "--gpus", "2", "--jobs", "1", "--tp", "1")


def tried(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["try", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_logs_become_a_trace_a_rollout_runs_a_plan_and_a_page(tmp_path: Path):
    logs, out = tmp_path / "logs", tmp_path / "out"
    (logs / "more").mkdir(parents=True)
    for name in ("openai_chat_tasks.json", "verl.jsonl"):
        (logs / name).write_bytes((FIXTURES / name).read_bytes())
    runs = json.loads(TASKS.read_text())
    (logs / "more" / "second.json").write_text(json.dumps([{**runs[0], "id": "9/0"}]))
    (logs / "README.md").write_text("Notes.\n")
    code, said, err = tried(logs, *FEW, "--policies", "verl,heddle", "--out", out)
    assert code == 0, err
    assert len(read_trace(out / "trace.jsonl.gz").records) == 4
    assert len(read_trace(out / "rollout.jsonl.gz").records) == 4
    assert len(list((out / "runs").glob("*/manifest.json"))) == 2
    assert b"<html" in (out / "report.html").read_bytes()[:2000].lower()
    for line in (
        "format    openai-chat",
        "left out  2 files of another format",
        f"          {logs}/README.md: no known format",
        f"          {logs}/verl.jsonl: verl",
        "missing tool_s drawn from typical ones of other (seed 0)",
        "ranking by makespan:",
        "planner portfolio",
        f"next: open {out}/report.html in a browser",
    ):
        assert line in said, line
    again = next(line for line in said.splitlines() if line.startswith("next: heddle compare"))
    assert "--missing-tool-s typical" in again
    assert "--gpus 2" in again


def test_json_is_one_object_with_what_each_command_prints(tmp_path: Path):
    out = tmp_path / "out"
    logs = TASKS
    code, said, err = tried(logs, *FEW, "--policies", "verl,heddle", "--out", out, "--json")
    assert code == 0, err
    found = json.loads(said)
    assert list(found) == ["schema", "import", "trace", "rollout", "comparison", "plan", "page"]
    assert found["schema"] == "heddle.try/1"
    assert Path(found["page"]).is_file()
    trace, rollout = out / "trace.jsonl.gz", out / "rollout.jsonl.gz"
    assert found["comparison"] == json.loads((out / "runs" / "index.json").read_text())
    assert found["plan"]["schema"] == "heddle.plan/1"
    alike = {
        "import": ("trace", "import", logs, "-o", tmp_path / "t.jsonl.gz"),
        "trace": ("trace", "describe", trace),
        "rollout": ("trace", "resample", trace, "-o", tmp_path / "r.jsonl.gz", *FEW[:4]),
    }
    for key, command in alike.items():
        done = CliRunner().invoke(main, [*map(str, command), "--json"])
        alone = json.loads(done.stdout) | {"trace": found[key]["trace"]}
        del alone["schema"]
        assert found[key] == alone
    assert [found[key]["trace"] for key in alike] == [str(trace), str(trace), str(rollout)]


def test_json_of_a_trace_has_no_import(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    write_trace(trace, [record(step(9), trajectory_id=f"{n}", group_id="g") for n in range(4)])
    out = tmp_path / "out"
    code, said, err = tried(trace, *FEW, "--policies", "verl", "--out", out, "--json")
    assert code == 0, err
    found = json.loads(said)
    assert found["import"] is None
    assert found["trace"]["trace"] == str(trace)


def test_the_command_for_more_seeds_is_one_that_works(tmp_path: Path):
    out = tmp_path / "out"
    code, said, err = tried(TASKS, *FEW, "--policies", "verl", "--out", out)
    assert code == 0, err
    again = next(line for line in said.splitlines() if line.startswith("next: heddle compare"))
    words = again.removeprefix("next: heddle ").split()
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "runs"), "--jobs", "1"])
    assert done.exit_code == 0, done.stderr


def test_that_command_has_the_same_cluster_and_the_rules_of_a_file_come_before_ours(tmp_path: Path):
    rules = tmp_path / "my rules.toml"
    rules.write_text('[missing]\ntool_s = "zero"\ncap_tool_s = 7.0\n')
    pool = ("--set", 'cluster.pool=["h100:1","l40s:1"]')
    few = ("--groups", "2", "--samples", "2", "--jobs", "1", "--tp", "1", "--policies", "verl")
    code, said, err = tried(
        TASKS,
        "-c",
        rules,
        *few,
        *pool,
        "--out",
        tmp_path / "o",
    )
    assert code == 0, err
    again = next(line for line in said.splitlines() if line.startswith("next: heddle compare"))
    words = shlex.split(again.removeprefix("next: heddle compare "))
    assert words[0] == str(tmp_path / "o" / "rollout.jsonl.gz")
    for name, value in (
        ("--missing-tool-s", "zero"),
        ("--set", "missing.cap_tool_s=7.0"),
        ("-c", str(rules)),
        pool,
    ):
        assert (name, value) in pairwise(words)
    assert "--gpus" not in words


def test_without_plotly_there_is_a_plan_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    out = tmp_path / "out"
    code, said, err = tried(TASKS, *FEW, "--policies", "verl", "--out", out)
    assert code == 0, err
    assert "no report.html: it needs plotly" in err
    assert "planner portfolio" in said
    assert "next: open" not in said
    assert not (out / "report.html").exists()


def test_a_trace_is_taken_as_it_is(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    steps = (call(30, tool_s=None), step(9))
    write_trace(trace, [record(*steps, trajectory_id=f"{n}", group_id="g") for n in range(4)])
    out = tmp_path / "out"
    rule = ("--missing-tool-s", "2")
    code, said, err = tried(trace, *FEW, "--policies", "verl", *rule, "--out", out)
    assert code == 0, err
    assert not (out / "trace.jsonl.gz").exists()
    assert "missing tool_s as the rule says" in said


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: no such file; check the path"),
        ((FIXTURES / "verl.jsonl", "--missing-tool-s", "often"), "'often' is no rule"),
        ((FIXTURES / "verl.jsonl", "--tp", "x"), "--tp x: write"),
        ((FIXTURES / "verl.jsonl", "--format", "tau2"), "this is verl, not tau2"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(tmp_path: Path, arguments, fault: str):
    out = tmp_path / "out"
    code, _, err = tried(*arguments, "--out", out)
    assert code == 2
    assert fault in err
    assert "Traceback" not in err
    assert not out.exists()


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = tried(FIXTURES / "verl.jsonl", "--out", tmp_path)
    assert code == 2
    assert f"{tmp_path}: exists and is not empty; name another folder with --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("source", "what"),
    [(FIXTURES / "verl.jsonl", "a log of the format verl"), (FIXTURES, "a folder")],
)
def test_logs_given_to_compare_name_the_command_that_takes_them(source: Path, what: str):
    done = CliRunner().invoke(main, ["compare", str(source), "--policies", "verl"])
    assert done.exit_code == 2
    assert f"{source}: is {what}, not a trace; `heddle try {source}` imports" in done.stderr
