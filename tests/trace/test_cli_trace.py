import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.cli.trace import WORKLOADS as OFFERED
from heddle_trace import read_trace, synth, write_trace
from heddle_trace.workloads import WORKLOADS
from tests.trace.builders import call, record, step


def run(*arguments):
    return CliRunner().invoke(main, ["trace", *(str(argument) for argument in arguments)])


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.jsonl"
    write_trace(path, [record(call(1_500), call(5, tool="user", tool_s=None), step(3))])
    return path


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"trajectory_id":"a"}\n{\n')
    return path


def test_describe_prints_tables_and_names_the_key_for_each_gap(good):
    done = run("describe", good)
    assert done.exit_code == 0
    assert "1 trajectories in 1 groups" in done.stdout
    assert "1,508" in done.stdout
    assert "--set missing.tool_s=RULE" in done.stdout
    assert "missing.output_tokens" not in done.stdout
    assert done.stderr == ""


def test_describe_json_is_one_object(good):
    answer = json.loads(run("describe", good, "--json").stdout)
    assert answer["schema"] == "heddle.trace.describe/1"
    assert answer["output_tokens"]["max"] == 1_508
    assert answer["gaps"]["tool_s"] == 1
    assert [tool["tool"] for tool in answer["tools"]] == ["bash", "user"]


def test_describe_shortens_long_tool_names_and_long_lists(tmp_path):
    path = tmp_path / "many.jsonl"
    names = [f"a-rather-long-name-that-says-little-{i:02d}" for i in range(14)]
    write_trace(path, [record(*(call(tool=name) for name in names))])
    done = run("describe", path)
    assert "…" in done.stdout
    assert "2 rarer tools" in done.stdout


def test_describe_of_a_bad_trace_ends_in_one_message(bad):
    done = run("describe", bad)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "group_id: is missing" in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_validate_says_valid_with_status_zero(good):
    done = run("check", good)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"{good}: valid\n"
    assert json.loads(run("check", good, "--json").stdout) == {
        "schema": "heddle.trace.validate/1",
        "trace": str(good),
        "valid": True,
        "problems": [],
        "more": False,
    }


def test_validate_lists_problems_with_status_one(bad):
    done = run("check", bad)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(f"{bad}: line 1: group_id: is missing; give")
    assert lines[-1].startswith(f"{bad}: line 2: malformed JSON")
    assert "5 problems" in done.stderr


def test_validate_stops_at_the_limit_and_says_so(bad):
    done = run("check", bad, 2, "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (len(answer["problems"]), answer["more"], answer["valid"]) == (2, True, False)
    assert answer["problems"][0]["field"] == "group_id"
    assert "more than 2 problems" in done.stderr


def test_validate_of_a_missing_file_is_a_problem_not_a_traceback(tmp_path):
    done = run("check", tmp_path / "none.jsonl")
    assert done.exit_code == 1
    assert "no such file" in done.stdout


def test_synth_writes_what_the_library_makes(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    options = ("--trajectories", 20, "--seed", 3, "--samples", 4)
    done = run("synth", "search", *options, "-o", path)
    assert done.exit_code == 0
    assert done.stdout == ""
    assert "20 trajectories" in done.stderr
    assert read_trace(path).records == synth("search", 20, 3, 4)


def test_synth_replaces_only_on_request(good):
    before = good.read_bytes()
    refused = run("synth", "math", "--trajectories", 4, "-o", good)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert good.read_bytes() == before
    assert run("synth", "math", "--trajectories", 4, "-o", good, "--force").exit_code == 0
    assert len(read_trace(good).records) == 4


def test_synth_reports_a_missing_folder(tmp_path):
    done = run("synth", "math", "--trajectories", 4, "-o", tmp_path / "none" / "t.jsonl")
    assert done.exit_code == 2
    assert "no such folder; make it first" in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_synth_reports_a_full_disk(tmp_path, monkeypatch):
    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    done = run("synth", "math", "--trajectories", 4, "-o", tmp_path / "t.jsonl")
    assert done.exit_code == 1
    assert "disk is full" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("synth", "chess", "-o", "t.jsonl"),
        ("synth", "math"),
        ("synth", "math", "--trajectories", "0", "-o", "t.jsonl"),
        ("check",),
        ("describe", "--nonsense"),
    ],
)
def test_wrong_usage_is_status_two(arguments):
    assert run(*arguments).exit_code == 2


def test_the_offered_workloads_are_the_known_ones():
    assert tuple(WORKLOADS) == OFFERED


def test_importing_the_commands_loads_nothing_heavy():
    code = (
        "import sys, heddle.cli.trace; "
        "sys.exit(any(m in sys.modules for m in ('numpy', 'pandas', 'heddle_trace')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
