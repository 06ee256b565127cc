"""Spans of tracers, ATIF, OpenHands and folders: what is special to them."""

import json
from pathlib import Path

import pytest

from heddle_trace import TraceError, read_trace
from heddle_trace.importers import import_trace
from tests.trace.imported_logs import FIXTURES


def imported(tmp_path: Path, *paths: Path, **options):
    report = import_trace(paths, tmp_path / "made.jsonl", **options)
    return report, list(read_trace(tmp_path / "made.jsonl").records)


def edited(tmp_path: Path, name: str, *keys: str) -> Path:
    """A log without some keys, wherever they are."""

    def without(value):
        if isinstance(value, list):
            return [without(item) for item in value]
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key not in keys}
        return value

    text = (FIXTURES / name).read_text()
    path = tmp_path / name
    try:
        path.write_text(json.dumps(without(json.loads(text))))
    except ValueError:
        rows = (json.dumps(without(json.loads(line))) for line in text.splitlines())
        path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize(
    ("name", "keys", "place"),
    [
        ("otel_otlp.jsonl", ("startTimeUnixNano", "endTimeUnixNano"), "line 1"),
        ("otel_flat.json", ("start_time", "end_time"), "record 2"),
        ("langfuse.jsonl", ("start_time", "end_time"), "line 1"),
        ("langsmith.jsonl", ("start_time", "end_time"), "line 1"),
    ],
)
def test_spans_without_times_are_one_message_with_the_remedy(tmp_path, name, keys, place):
    path = edited(tmp_path, name, *keys)
    with pytest.raises(TraceError) as refused:
        import_trace([path], tmp_path / "made.jsonl")
    said = str(refused.value)
    assert said.startswith(f"{path}: {place}: span ")
    assert "export the spans with their start and end times" in said
    assert not (tmp_path / "made.jsonl").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"arrayValue": [1]},
        {"arrayValue": {"values": 1}},
        {"kvlistValue": {"values": [1, {"key": "k"}]}},
        {"intValue": "9" * 5_000},
        ["text"],
    ],
)
def test_a_value_of_an_attribute_that_is_malformed_is_no_damage(tmp_path, value):
    spans = json.loads((FIXTURES / "otel_otlp.jsonl").read_text().splitlines()[0])
    first = spans["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    first["attributes"].append({"key": "other", "value": value})
    path = tmp_path / "otel.jsonl"
    path.write_text(json.dumps(spans))
    report, records = imported(tmp_path, path)
    assert report.format == "otel"
    assert len(records) > 0


def test_agents_within_tools_and_agents_name_whom_they_work_for(tmp_path):
    for name, parents in (
        ("otel_otlp.jsonl", [None, "c-1"]),
        ("langsmith.jsonl", [None, "th-1"]),
        ("atif.json", [None, "atif"]),
    ):
        _, records = imported(tmp_path, FIXTURES / name)
        assert [record.parent_id for record in records] == parents, name


def test_what_a_run_says_of_its_end_is_kept(tmp_path):
    _, (run, *_) = imported(tmp_path, FIXTURES / "openhands.jsonl")
    assert (run.outcome, run.model) == (True, "model-q")
    assert (run.steps[0].t_s, run.steps[0].llm_s) == (0.0, 3.5)
    _, (run, *_) = imported(tmp_path, FIXTURES / "atif.json")
    assert (run.reward, run.agent, run.steps[0].cached_tokens) == (1.0, "terminus", 64)


def test_trials_of_harbor_are_a_group_by_the_task_of_their_folder(tmp_path):
    paths = []
    for trial in ("fix-it__abc", "fix-it__def", "other__abc"):
        path = tmp_path / trial / "agent" / "trajectory.json"
        path.parent.mkdir(parents=True)
        path.write_bytes((FIXTURES / "atif.json").read_bytes())
        paths.append(path)
    _, records = imported(tmp_path, *paths)
    mains = [record for record in records if record.parent_id is None]
    assert [record.group_id for record in mains] == ["fix-it", "fix-it", "other"]
    assert len({record.trajectory_id for record in records}) == len(records)


def test_a_tool_that_began_while_its_call_was_streamed_belongs_to_that_generation(tmp_path):
    def run(id, kind, start, end, **more):
        times = {"start_time": f"2026-01-01T00:00:{start}", "end_time": f"2026-01-01T00:00:{end}"}
        return {"id": id, "trace_id": "t", "run_type": kind, "name": id, **times, **more}

    log = tmp_path / "log.json"
    log.write_text(
        json.dumps(
            [
                run("a", "llm", "00", "04", prompt_tokens=5, completion_tokens=6),
                run("look", "tool", "03", "09"),
                run("b", "llm", "10", "11", prompt_tokens=20, completion_tokens=7),
            ]
        )
    )
    _, (record,) = imported(tmp_path, log)
    assert [(s.tool, s.tool_s, s.tool_tokens) for s in record.steps] == [
        ("look", 5.0, 9),
        (None, None, None),
    ]


def folder(tmp_path: Path, *names: str) -> Path:
    made = tmp_path / "logs"
    made.mkdir()
    for number, name in enumerate(names):
        (made / f"{number}-{name}").write_bytes((FIXTURES / name).read_bytes())
    return made


def test_a_folder_is_imported_without_its_files_of_other_formats(tmp_path):
    logs = folder(tmp_path, "verl.jsonl", "openai_chat.jsonl", "openai_chat_calls.jsonl")
    (logs / "notes.txt").write_text("notes")
    (logs / ".hidden.jsonl").write_bytes((FIXTURES / "verl.jsonl").read_bytes())
    report, records = imported(tmp_path, logs)
    assert report.format == "openai-chat"
    assert len(report.files) == 2
    assert report.foreign == (f"{logs}/0-verl.jsonl: verl", f"{logs}/notes.txt: no known format")
    assert len(records) == 4
    report, _ = imported(tmp_path, logs, format="verl")
    assert len(report.foreign) == 3


def test_a_named_file_of_another_format_still_stops_the_import(tmp_path):
    logs = folder(tmp_path, "verl.jsonl")
    with pytest.raises(TraceError, match="holds as many files of") as refused:
        import_trace([folder_of_two(tmp_path)], tmp_path / "t.jsonl")
    assert "choose one with --set logs.format=FORMAT" in str(refused.value)
    with pytest.raises(TraceError, match="the folder holds no openai-chat log"):
        import_trace([logs], tmp_path / "t.jsonl", format="openai-chat")


def folder_of_two(tmp_path: Path) -> Path:
    both = tmp_path / "both"
    both.mkdir()
    for name in ("verl.jsonl", "openai_chat.jsonl"):
        (both / name).write_bytes((FIXTURES / name).read_bytes())
    return both
