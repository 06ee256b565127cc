"""Every format on a small log of our own: trajectories, groups and steps."""

import gzip
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from heddle_trace import read_trace
from heddle_trace.importers import FORMATS, ImportReport, import_trace
from heddle_trace.importers.formats import recognised
from heddle_trace.importers.heads import head_of
from heddle_trace.importers.sources import sources
from heddle_trace.schema import TrajectoryRecord

FIXTURES = Path(__file__).parent / "fixtures"


class Expected(NamedTuple):
    """Per trajectory: id, group, prompt; per step: output, tool, seconds, tokens added, success."""

    format: str
    read: int
    trajectories: tuple[Any, ...]
    dropped: Mapping[str, int] = MappingProxyType({})


EXPECTED = {
    "agentic_mooncake.jsonl": Expected(
        format="dynamo",
        read=4,
        trajectories=(
            (
                "x",
                "x",
                100,
                (
                    (10, "grep", 0.5, 30, True),
                    (20, "unspecified", None, 40, None),
                    (30, None, None, None, None),
                ),
            ),
            ("y", "y", 50, ((5, None, None, None, None),)),
        ),
    ),
    "azure_llm.csv": Expected(
        format="azure-llm",
        read=2,
        trajectories=(
            ("azure_llm/2", "azure_llm/2", 4808, ((10, None, None, None, None),)),
            ("azure_llm/3", "azure_llm/3", 110, ((27, None, None, None, None),)),
        ),
    ),
    "cc_proxy.json": Expected(
        format="cc-proxy",
        read=5,
        trajectories=(
            (
                "trace_7/agent_001",
                "trace_7/agent_001",
                100,
                (
                    (10, "unspecified", 2.0, 30, None),
                    (12, None, None, None, None),
                ),
            ),
            (
                "trace_7",
                "trace_7",
                200,
                (
                    (20, "unspecified", 7.0, 30, None),
                    (30, "user", 89.5, 20, None),
                    (40, "unspecified", 2.0, None, None),
                    (5, None, None, None, None),
                ),
            ),
        ),
    ),
    "claude_code.jsonl": Expected(
        format="claude-code",
        read=15,
        trajectories=(
            (
                "S-1",
                "prompt-636f53ce5b1746f0",
                1503,
                (
                    (26, "Read+Grep", 1.5, 126, False),
                    (40, "user", 30.0, 20, None),
                    (25, None, None, None, None),
                ),
            ),
            ("S-1/side-66accdcc", "prompt-d2e44f4fc214cf89", 302, ((11, None, None, None, None),)),
        ),
        dropped={"lines that are no message": 2, "messages that no model made, such as errors": 1},
    ),
    "claude_code_agent.jsonl": Expected(
        format="claude-code",
        read=2,
        trajectories=(
            ("S-1/abc123", "prompt-d84b405c6b5322ee", 201, ((9, None, None, None, None),)),
        ),
    ),
    "dynamo.jsonl": Expected(
        format="dynamo",
        read=8,
        trajectories=(
            (
                "plan",
                "plan",
                128,
                (
                    (16, "web_search", 1.0, 56, True),
                    (30, "read", 0.5, 30, False),
                    (12, "user", 6.0, 28, None),
                    (7, None, None, None, None),
                ),
            ),
            ("plan/sub", "plan/sub", 64, ((8, None, None, None, None),)),
        ),
        dropped={"request_payload rows": 1},
    ),
    "dynamo_hashes.jsonl": Expected(
        format="dynamo",
        read=3,
        trajectories=(
            (
                "a",
                "a",
                130,
                (
                    (10, "unspecified", 4.9, 60, None),
                    (10, None, None, None, None),
                ),
            ),
            ("c", "c", 70, ((10, None, None, None, None),)),
        ),
    ),
    "fireact.json": Expected(
        format="fireact",
        read=2,
        trajectories=(
            (
                "fireact/17",
                "17",
                10,
                (
                    (12, "search", None, 6, None),
                    (11, None, None, None, None),
                ),
            ),
            ("fireact/18", "18", 2, ((10, None, None, None, None),)),
        ),
    ),
    "inspect.eval": Expected(
        format="inspect",
        read=2,
        trajectories=(
            (
                "quiz/q1/E2/1",
                "quiz/q1",
                100,
                (
                    (20, "search", 2.5, 100, False),
                    (30, None, None, None, None),
                ),
            ),
            (
                "quiz/q1/E2/1/helper-1",
                "quiz/q1/helper",
                50,
                (
                    (7, "bash", 0.5, 33, True),
                    (9, None, None, None, None),
                ),
            ),
            (
                "quiz/q2/E2/1",
                "quiz/q2",
                20,
                (
                    (14, "bash", None, 20, False),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={"generations by scorers": 1},
    ),
    "inspect.json": Expected(
        format="inspect",
        read=3,
        trajectories=(
            (
                "quiz/q1/E1/1",
                "quiz/q1",
                100,
                (
                    (20, "search", 2.5, 100, False),
                    (30, None, None, None, None),
                ),
            ),
            (
                "quiz/q1/E1/1/helper-1",
                "quiz/q1/helper",
                50,
                (
                    (7, "bash", 0.5, 33, True),
                    (9, None, None, None, None),
                ),
            ),
            (
                "quiz/q2/E1/1",
                "quiz/q2",
                20,
                (
                    (14, "bash", None, 20, False),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={"generations by scorers": 1, "samples without a generation": 1},
    ),
    "libra_history.jsonl": Expected(
        format="libra-history",
        read=3,
        trajectories=(
            (
                "libra_history/1/0",
                "p-1",
                100,
                (
                    (30, "web_search", None, 40, True),
                    (40, "web_search", None, 20, False),
                    (20, None, None, None, None),
                ),
            ),
            (
                "libra_history/1/1",
                "p-1",
                100,
                (
                    (25, "code", None, 500, False),
                    (35, None, None, None, None),
                ),
            ),
            ("libra_history/1/2", "libra_history/1/2", 80, ((33, None, None, None, None),)),
            ("libra_history/3/0", "p-2", 12, ((34, None, None, None, None),)),
        ),
        dropped={"training steps without sequences": 1},
    ),
    "lmcache_agent.jsonl": Expected(
        format="lmcache-agent",
        read=4,
        trajectories=(
            (
                "aa",
                "aa",
                100,
                (
                    (10, "unspecified", None, 10, None),
                    (10, "unspecified", None, 20, None),
                    (20, None, None, None, None),
                ),
            ),
            ("bb", "bb", 50, ((5, None, None, None, None),)),
        ),
    ),
    "mint.jsonl": Expected(
        format="mint",
        read=1,
        trajectories=(
            (
                "mint/5",
                "5-034430c2",
                100,
                (
                    (17, "wikipedia_search", None, 6, True),
                    (7, "python", None, 13, False),
                    (7, "submit", None, 9, False),
                    (4, None, None, 12, None),
                    (7, None, None, None, None),
                ),
            ),
        ),
    ),
    "mooncake.jsonl": Expected(
        format="mooncake",
        read=5,
        trajectories=(
            (
                "mooncake/1",
                "mooncake/1",
                1100,
                (
                    (50, "user", None, 30, None),
                    (70, "user", None, 1350, None),
                    (5, None, None, None, None),
                ),
            ),
            ("mooncake/2", "mooncake/2", 600, ((20, None, None, None, None),)),
            ("mooncake/4", "mooncake/1", 1200, ((10, None, None, None, None),)),
        ),
    ),
    "mooncake_sessions.jsonl": Expected(
        format="mooncake",
        read=2,
        trajectories=(
            (
                "s1",
                "s1",
                2048,
                (
                    (128, "user", 0.05, 384, None),
                    (100, None, None, None, None),
                ),
            ),
        ),
    ),
    "openai_chat.jsonl": Expected(
        format="openai-chat",
        read=3,
        trajectories=(
            (
                "conv-1",
                "t-9",
                50,
                (
                    (30, "search+fetch", 2.5, 40, None),
                    (10, "user", 60.0, 10, None),
                    (6, None, None, None, None),
                ),
            ),
            (
                "conv-2",
                "prompt-358d829e28091ffb",
                10,
                (
                    (12, "legacy", None, 10, None),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={
            "parts of messages that are no text (image_url): 0 tokens": 1,
            "conversations without a generation": 1,
        },
    ),
    "openai_chat_array.json": Expected(
        format="openai-chat",
        read=2,
        trajectories=(
            ("one", "prompt-29d3522789eb6784", 10, ((10, None, None, None, None),)),
            ("two", "prompt-29d3522789eb6784", 10, ((20, None, None, None, None),)),
        ),
    ),
    "openai_chat_calls.jsonl": Expected(
        format="openai-chat",
        read=4,
        trajectories=(
            (
                "openai_chat_calls/1",
                "prompt-a99a21e345603195",
                20,
                (
                    (9, "open", 3.0, 11, None),
                    (4, None, None, None, None),
                ),
            ),
            (
                "sess",
                "prompt-f9e448e04a79d6b8",
                10,
                (
                    (10, "user", 58.5, 20, None),
                    (5, None, None, None, None),
                ),
            ),
        ),
    ),
    "openai_chat_messages.json": Expected(
        format="openai-chat",
        read=3,
        trajectories=(
            (
                "openai_chat_messages/1",
                "prompt-157ba860e21f0a13",
                20,
                ((10, None, None, None, None),),
            ),
        ),
    ),
    "swe_agent.traj": Expected(
        format="swe-agent",
        read=3,
        trajectories=(
            (
                "swe_agent",
                "acme__widget-7",
                100,
                (
                    (24, "ls", 0.25, 20, None),
                    (32, "edit", 1.5, 10, None),
                    (5, "submit", 0.125, 0, None),
                ),
            ),
        ),
    ),
    "tau2.json": Expected(
        format="tau2",
        read=2,
        trajectories=(
            (
                "telecom-no_signal/sim-1",
                "telecom-no_signal",
                1000,
                (
                    (30, "get_line+get_bill", 0.5, 70, False),
                    (12, "user", 3.0, 13, None),
                    (4, "user", 0.5, 3, None),
                ),
            ),
            ("telecom-no_signal/sim-2", "telecom-no_signal", 990, ((5, None, None, None, None),)),
        ),
        dropped={"answers of the simulated user's own tools": 1},
    ),
    "tau_bench.json": Expected(
        format="tau-bench",
        read=3,
        trajectories=(
            (
                "tau_bench/3/0",
                "3-8990360e",
                108,
                (
                    (6, "find_parcel", None, 5, True),
                    (5, "user", None, 5, None),
                ),
            ),
            (
                "tau_bench/3/1",
                "3-8990360e",
                108,
                (
                    (6, "find_parcel", None, 5, False),
                    (5, "user", None, 5, None),
                ),
            ),
            (
                "tau_bench/8/0",
                "8-9a43483e",
                108,
                (
                    (6, "find_parcel", None, 5, True),
                    (5, "user", None, 5, None),
                ),
            ),
        ),
    ),
}


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
        ("cc_proxy.json", "trace_7"),
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
    _, runs = imported(tmp_path, "tau_bench.json")
    assert [r.outcome for r in runs] == [True, False, False]
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
        ("azure_llm.csv", [0.0, 0.5]),
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
        (tmp_path / folder / "run.json").write_bytes((FIXTURES / "tau_bench.json").read_bytes())
    paths = [tmp_path / "a" / "run.json", tmp_path / "b" / "run.json"]
    import_trace(paths, tmp_path / "t.jsonl")
    records = read_trace(tmp_path / "t.jsonl").records
    assert [r.trajectory_id for r in records][::3] == ["a/run/3/0", "b/run/3/0"]
    assert len({r.group_id for r in records}) == 2  # the same tasks, run twice


def test_a_log_may_be_compressed(tmp_path):
    packed = tmp_path / "mooncake.jsonl.gz"
    packed.write_bytes(gzip.compress((FIXTURES / "mooncake.jsonl").read_bytes()))
    import_trace([packed], tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").records == imported(tmp_path, "mooncake.jsonl")[1]


def test_the_workload_can_be_named(tmp_path):
    _, records = imported(tmp_path, "mint.jsonl", workload="math")
    assert {r.workload for r in records} == {"math"}


def test_a_ratio_of_characters_can_be_given(tmp_path):
    _, (half, *_) = imported(tmp_path, "lmcache_agent.jsonl", chars_per_token=7.2)
    assert [s.output_tokens for s in half.steps] == [5, 5, 10]


def test_hashes_of_two_files_are_two_files_own(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes((FIXTURES / "mooncake.jsonl").read_bytes())
    import_trace([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "t.jsonl")
    records = read_trace(tmp_path / "t.jsonl").records
    alone = [len(r.steps) for r in imported(tmp_path, "mooncake.jsonl")[1]]
    assert sorted(len(r.steps) for r in records) == sorted(alone * 2)
    assert len({r.group_id for r in records}) == 4
