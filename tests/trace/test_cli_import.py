import json

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.cli.trace_import import FORMATS as OFFERED
from heddle.command_config import LogSettings
from heddle_trace import read_trace
from heddle_trace.importers import FORMATS
from heddle_trace.importers.tokens import CHARS_PER_TOKEN
from tests.trace.imported_logs import EXPECTED, FIXTURES


def run(*arguments):
    return CliRunner().invoke(main, ["trace", "import", *(str(a) for a in arguments)])


def test_the_offered_formats_and_ratio_are_the_known_ones():
    assert tuple(FORMATS) == OFFERED
    assert LogSettings().chars_per_token == CHARS_PER_TOKEN


def test_an_import_says_what_it_read_wrote_left_out_and_assumed(tmp_path):
    out = tmp_path / "t.jsonl.gz"
    done = run(FIXTURES / "claude_code.jsonl", FIXTURES / "claude_code_agent.jsonl", "-o", out)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:2] == ["format    claude-code", "read      17 records from 2 files"]
    assert lines[2].startswith(f"written   {out}: 3 trajectories, 5 steps, 111 output tokens")
    assert "left out  2 lines that are no message" in lines
    assert "left out  1 messages that no model made, such as errors" in lines
    assert [line for line in lines if line.startswith("assumed   14 texts counted at 3.6 char")]
    assert all(f"assumed   {sentence}" in lines for sentence in FORMATS["claude-code"].assumes)


def test_damaged_records_are_listed_up_to_a_point(tmp_path):
    rows = (FIXTURES / "openai_chat.jsonl").read_text() + "{\n" * 9
    (tmp_path / "log.jsonl").write_text(rows)
    done = run(tmp_path / "log.jsonl", "--set", "logs.skip_bad=true", "-o", tmp_path / "t.jsonl")
    assert done.exit_code == 0
    assert "damaged   9 left out" in done.stdout
    assert done.stdout.count("malformed JSON") == 5
    assert "and 4 more" in done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_json_is_one_object_with_everything(tmp_path, name):
    out = tmp_path / "t.jsonl"
    done = run(FIXTURES / name, "-o", out, "--json")
    answer = json.loads(done.stdout)
    assert answer["schema"] == "heddle.trace.import/1"
    assert answer["format"] == EXPECTED[name].format
    assert answer["trajectories"] == len(read_trace(out).records)
    assert answer["sha256"] == read_trace(out).sha256
    assert answer["damaged"] == 0
    assert answer["assumptions"] == list(FORMATS[answer["format"]].assumes)
    assert answer["files"] == [str(FIXTURES / name)]


def test_what_is_imported_can_be_validated_described_and_drawn_from(tmp_path):
    out, drawn = tmp_path / "t.jsonl.gz", tmp_path / "d.jsonl"
    assert run(FIXTURES / "openai_chat_tasks.json", "-o", out).exit_code == 0
    for arguments in (
        ("check", out),
        ("describe", out),
        ("resample", out, 4, 2, "-o", drawn),
        ("check", drawn),
    ):
        done = CliRunner().invoke(main, ["trace", *(str(a) for a in arguments)])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("-o", "t.jsonl"),
        (FIXTURES / "openai_chat.jsonl",),
        (FIXTURES / "openai_chat.jsonl", "--format", "chess", "-o", "t.jsonl"),
        (FIXTURES / "openai_chat.jsonl", "--set", "logs.chars_per_token=some", "-o", "t.jsonl"),
    ],
)
def test_wrong_usage_is_status_two(arguments):
    assert run(*arguments).exit_code == 2
