"""Every format on a small log of our own: trajectories, groups and steps."""

import gzip
from typing import Any

import pytest

from heddle_trace import read_trace
from heddle_trace.importers import FORMATS, ImportReport, import_trace
from heddle_trace.importers.formats import recognised
from heddle_trace.importers.heads import head_of
from heddle_trace.importers.sources import sources
from heddle_trace.schema import TrajectoryRecord
from tests.trace.imported_logs import EXPECTED, FIXTURES


def imported(tmp_path, *names, **options) -> tuple[ImportReport, tuple[TrajectoryRecord, ...]]:
    out = tmp_path / "made.jsonl.gz"
    report = import_trace([FIXTURES / name for name in names], out, **options)
    return report, read_trace(out).records


def short(record: TrajectoryRecord) -> tuple[Any, ...]:
    steps = tuple(
        (s.output_tokens, s.tool, s.tool_s, s.tool_tokens, s.tool_ok) for s in record.steps
    )
    return record.trajectory_id, record.group_id, record.prompt_tokens, steps


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_becomes_the_trajectories_that_it_records(tmp_path, name):
    expected = EXPECTED[name]
    report, records = imported(tmp_path, name)
    assert (report.format, report.read) == (expected.format, expected.read)
    assert tuple(short(record) for record in records) == expected.trajectories
    assert report.dropped == expected.dropped
    assert report.trajectories == len(records)
    assert report.steps == sum(len(record.steps) for record in records)
    assert report.damaged == 0


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_is_recognised_as_one_format_only(name):
    (source,) = sources([FIXTURES / name])
    assert recognised(head_of(source)) == [EXPECTED[name].format]


def test_every_format_has_a_log_here_and_every_log_is_tested():
    assert {expected.format for expected in EXPECTED.values()} == set(FORMATS)
    assert {path.name for path in FIXTURES.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_text_of_a_log_does_not_reach_the_trace(tmp_path, name):
    imported(tmp_path, name)
    content = gzip.decompress((tmp_path / "made.jsonl.gz").read_bytes()).decode()
    texts = ("my parcel", "on its way", "Fix the", "in the box", "Somebody", "No signal", "xxxxx")
    assert not [text for text in texts if text in content]


@pytest.mark.parametrize("name", EXPECTED)
def test_importing_twice_gives_the_same_bytes(tmp_path, name):
    first, _ = imported(tmp_path, name)
    second, _ = imported(tmp_path, name)
    assert first == second


def fields(record: TrajectoryRecord, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


def test_agents_within_agents_name_whom_they_work_for(tmp_path):
    for name, parent in (
        ("claude_code.jsonl", "S-1"),
        ("claude_code_agent.jsonl", "S-1"),
        ("dynamo.jsonl", "plan"),
        ("inspect.json", "quiz/q1/E1/1"),
    ):
        _, records = imported(tmp_path, name)
        assert [r.parent_id for r in records if r.parent_id] == [parent], name


def test_what_a_benchmark_says_of_its_runs_is_kept(tmp_path):
    _, runs = imported(tmp_path, "tau2.json")
    assert [fields(r, "outcome", "truncated", "model") for r in runs] == [
        (True, False, "prov/model-b"),
        (False, True, "prov/model-b"),
    ]
    _, runs = imported(tmp_path, "openai_chat_tasks.json")
    assert [r.reward for r in runs] == [1.0, 0.0, 0.0]
    _, (run,) = imported(tmp_path, "swe_agent.traj")
    assert fields(run, "truncated", "model", "outcome") == (True, "model-a", None)
    _, runs = imported(tmp_path, "inspect.json")
    assert [fields(r, "outcome", "truncated") for r in runs] == [
        (True, False),
        (None, False),
        (False, True),
    ]
    _, runs = imported(tmp_path, "openai_chat.jsonl")
    assert [r.outcome for r in runs] == [True, None]


def test_arrivals_are_kept_where_a_service_was_logged(tmp_path):
    for name, arrivals in (
        ("mooncake.jsonl", [0.0, 1.0, 45.5]),
        ("dynamo.jsonl", [0.0, 1.1]),
        ("claude_code.jsonl", [None, None]),
    ):
        assert [r.arrival_s for r in imported(tmp_path, name)[1]] == arrivals, name


def test_issue_times_count_from_the_start_and_generations_have_theirs(tmp_path):
    _, (main, _) = imported(tmp_path, "claude_code.jsonl")
    assert [(s.t_s, s.llm_s) for s in main.steps] == [(0.0, 2.5), (4.0, 2.0), (36.0, 3.0)]
    _, (first, second) = imported(tmp_path, "openai_chat_calls.jsonl")
    assert [(s.t_s, s.llm_s) for s in first.steps] == [(0.0, 2.0), (5.0, 1.0)]
    assert [(s.t_s, s.llm_s) for s in second.steps] == [(0.0, 0.5), (59.0, 0.25)]


def test_recorded_counts_come_before_counted_ones(tmp_path):
    _, (main, _) = imported(tmp_path, "claude_code.jsonl")
    # The first generation was logged before it ended, with a guess of 2 tokens.
    assert [s.output_tokens for s in main.steps] == [26, 40, 25]
    assert [s.cached_tokens for s in main.steps] == [1000, 1500, 1660]
    _, (run, *_) = imported(tmp_path, "tau2.json")
    assert [(s.input_tokens, s.cached_tokens) for s in run.steps] == [
        (1000, 512),
        (1100, None),
        (1125, None),
    ]
    # This provider counts what it wrote to its cache in the total alone.
    _, (main, *_) = imported(tmp_path, "inspect.json")
    assert [(s.input_tokens, s.cached_tokens) for s in main.steps] == [(100, 0), (220, 64)]


def test_what_was_assumed_is_counted(tmp_path):
    report, _ = imported(tmp_path, "swe_agent.traj")
    assert report.assumed == {
        "outputs from a recorded total, shared out by length": 3,
        "texts counted at 3.6 characters a token, for counts not recorded": 7,
    }
    assert imported(tmp_path, "mooncake.jsonl")[0].assumed == {}
    report, _ = imported(tmp_path, "agentic_mooncake.jsonl")
    assert report.assumed == {"steps that waited for another session: how long, not recorded": 1}
    for name, importer in FORMATS.items():
        assert importer.assumes, name
        assert all(sentence == sentence.strip() for sentence in importer.assumes)


def test_a_session_goes_on_from_file_to_file(tmp_path):
    lines = (FIXTURES / "dynamo.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:4]))
    (tmp_path / "b.jsonl").write_text("".join(lines[4:]))
    import_trace([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "parts.jsonl")
    whole = imported(tmp_path, "dynamo.jsonl")[1]
    assert read_trace(tmp_path / "parts.jsonl").records == whole


def test_sessions_may_be_interleaved_line_by_line(tmp_path):
    one = (FIXTURES / "claude_code.jsonl").read_text().splitlines()
    other = [line.replace('"S-1"', '"S-2"').replace("parser", "lexer") for line in one]
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    (tmp_path / "mixed.jsonl").write_text("\n".join(mixed))
    report = import_trace([tmp_path / "mixed.jsonl"], tmp_path / "t.jsonl")
    records = {r.trajectory_id: r for r in read_trace(tmp_path / "t.jsonl").records}
    alone = imported(tmp_path, "claude_code.jsonl")[1]
    assert report.trajectories == 4
    assert records["S-1"] == alone[0].__class__(
        **{f: getattr(alone[0], f) for f in alone[0].__struct_fields__ if f != "source"},
        source="mixed.jsonl",
    )
    assert [s.tool for s in records["S-2"].steps] == [s.tool for s in alone[0].steps]


def test_files_of_one_name_in_two_folders_are_distinguished(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").write_bytes(
            (FIXTURES / "openai_chat_messages.json").read_bytes()
        )
    paths = [tmp_path / "a" / "run.json", tmp_path / "b" / "run.json"]
    import_trace(paths, tmp_path / "t.jsonl")
    records = read_trace(tmp_path / "t.jsonl").records
    assert [r.trajectory_id for r in records] == ["a/run/1", "b/run/1"]
    assert len({r.group_id for r in records}) == 1  # the same prompt, run twice


def test_a_log_may_be_compressed(tmp_path):
    packed = tmp_path / "mooncake.jsonl.gz"
    packed.write_bytes(gzip.compress((FIXTURES / "mooncake.jsonl").read_bytes()))
    import_trace([packed], tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").records == imported(tmp_path, "mooncake.jsonl")[1]


def test_the_workload_can_be_named(tmp_path):
    _, records = imported(tmp_path, "openai_chat.jsonl", workload="math")
    assert {r.workload for r in records} == {"math"}


def test_a_ratio_of_characters_can_be_given(tmp_path):
    _, records = imported(tmp_path, "openai_chat_array.json", chars_per_token=7.2)
    assert [s.output_tokens for r in records for s in r.steps] == [5, 10]


def test_hashes_of_two_files_are_two_files_own(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes((FIXTURES / "mooncake.jsonl").read_bytes())
    import_trace([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "t.jsonl")
    records = read_trace(tmp_path / "t.jsonl").records
    alone = [len(r.steps) for r in imported(tmp_path, "mooncake.jsonl")[1]]
    assert sorted(len(r.steps) for r in records) == sorted(alone * 2)
    assert len({r.group_id for r in records}) == 4
