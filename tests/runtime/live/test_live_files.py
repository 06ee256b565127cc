"""Files of live agents: tasks, tokenizers, transcripts."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_runtime.agents.tasks import Task, TaskFileError, read_tasks
from heddle_runtime.agents.tokenizer import TokenizerError, load_tokenizer
from heddle_runtime.agents.transcripts import transcript_file
from tests.runtime.live.played import BEGIN, END, Played, library


def write(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_tasks_are_read_as_they_are_written(tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        {"id": "a", "prompt": "What is 1 + 1?"},
        "",
        {"id": "ä/1", "prompt": "⇒", "group": "g", "task": "math", "answer": " 2"},
        "   ",
    )
    read = read_tasks(path)
    assert read.name == "sums"
    assert len(read.sha256) == 64
    assert read.tasks == (
        Task(id="a", prompt="What is 1 + 1?"),
        Task(id="ä/1", prompt="⇒", group="g", task="math", answer=" 2"),
    )
    assert read_tasks(str(path)) == read


GOOD = {"id": "a", "prompt": "x"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, {"prompt": "x"}], "line 2: id: is missing; give a text of 1 to 1,000 characters"),
        ([{"id": "a"}], "line 1: prompt: is missing"),
        ([{"id": 1, "prompt": "x"}], "line 1: id: found 1; give a text"),
        ([{"id": "", "prompt": "x"}], 'line 1: id: found ""; give a text'),
        ([{"id": "a" * 1001, "prompt": "x"}], "line 1: id: found \"aaa"),
        ([{"id": "a", "prompt": ""}], 'line 1: prompt: found ""; give a text'),
        ([{"id": "a", "prompt": " \n"}], "not all of them space"),
        ([{**GOOD, "answer": 42}], "line 1: answer: found 42; give a text, also for numbers"),
        ([{**GOOD, "group": ["g"]}], 'line 1: group: found ["g"]; give a text'),
        ([{**GOOD, "promt": "x"}], '"promt" is not a field of a task; there are id, prompt'),
        ([GOOD, "", GOOD], "line 3: id: 'a' is taken by line 1 already"),
        ([{**GOOD, "a\nb": 1}], r'"a\nb" is not a field of a task'),
        (["{"], "line 1: malformed JSON at column"),
        (["[1]"], "line 1: found [1]; give a JSON object"),
        (["null"], "line 1: found null; give a JSON object"),
        (["[" * 100_000], "line 1: not readable as JSON"),
        (['{"id": "a", "prompt": NaN}'], "line 1: prompt: found NaN"),
        (['{"id": "\\ud800", "prompt": "x"}'], "line 1: "),
        (["\ufeff{}"], "line 1: starts with a byte-order mark"),
        ([""], "holds no tasks; write one JSON object a line"),
    ],
)  # fmt: skip
def test_a_faulty_task_file_is_reported_by_line_and_field(tmp_path, lines, said):
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(TaskFileError) as raised:
        read_tasks(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_task_file_is_reported(tmp_path):
    with pytest.raises(TaskFileError, match="no such file"):
        read_tasks(tmp_path / "missing.jsonl")
    with pytest.raises(TaskFileError, match="is a folder"):
        read_tasks(tmp_path)
    with pytest.raises(TaskFileError, match="is a pipe or a device"):
        read_tasks("/dev/zero")
    (tmp_path / "x.jsonl").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(TaskFileError, match="is compressed; unpack it first"):
        read_tasks(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b'{"id": "a", "prompt": "x"}\n{"id": "\xff"}')
    with pytest.raises(TaskFileError, match="line 2: not UTF-8 at byte 35"):
        read_tasks(tmp_path / "x.jsonl")
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks("a\0b")


@given(st.binary(max_size=200))
def test_any_bytes_are_tasks_or_one_line_of_complaint(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    path.write_bytes(data)
    try:
        read_tasks(path)
    except TaskFileError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_tokenizer_is_read_from_a_model_folder(tmp_path):
    library().save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    ids = read.encode("hé\n", begins=True)
    assert ids[0] == BEGIN
    assert read.decode([*ids, END]) == "hé\n"
    assert (read.is_special(END), read.is_special(ids[1])) == (True, False)


def test_settings_for_training_shorten_no_prompt(tmp_path):
    made = library()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    assert read.decode(read.encode("longer than four", begins=False)) == "longer than four"
    assert len(read.encode("a", begins=False)) == 1


def test_a_folder_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(TokenizerError, match="is not a model folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(TokenizerError, match="no such file; live agents need it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    library().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'heddle-rl\[live\]'"):
        load_tokenizer(tmp_path)


def test_transcripts_are_lines_of_json(tokenizer, tmp_path):
    path = tmp_path / "transcripts.jsonl"
    with transcript_file(path) as write_one:
        for text in ("Answer: 42", "Answer: \x00é"):
            played = Played(tokenizer)
            played.say(text)
            write_one(played.ended[0])
            assert path.read_bytes().endswith(b"}\n")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["answer"] for line in lines] == ["42", "\x00é"]
    assert lines[0]["steps"] == [
        {
            "generation": "Answer: 42",
            "output_tokens": 11,
            "tool": None,
            "observation": "",
            "observation_tokens": 0,
            "status": "",
            "tool_s": 0.0,
        }
    ]
    with pytest.raises(FileExistsError), transcript_file(path):
        pass
