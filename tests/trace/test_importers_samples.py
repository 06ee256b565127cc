"""Every format on real files of its origin; skipped where they are not at hand."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from heddle_trace import open_gaps, read_trace
from heddle_trace.importers import FORMATS, ImportReport, import_trace
from heddle_trace.importers.formats import recognised
from heddle_trace.importers.heads import head_of
from heddle_trace.importers.sources import sources
from heddle_trace.schema import Trace

SHARED = Path(__file__).resolve().parents[3] / "shared"
SAMPLES = SHARED / "raw_samples"
pytestmark = pytest.mark.skipif(
    not SAMPLES.is_dir(), reason="real logs are not at ../shared/raw_samples"
)

# Folder: pattern, records read, trajectories, steps, left out.
FOUND: dict[str, tuple[str, int, int, int, dict[str, int]]] = {
    "mooncake": ("conversation*", 1500, 1138, 1500, {}),
    "swe-agent": ("*.traj", 41, 4, 41, {}),
    "tau2": ("*.json", 7, 7, 61, {"answers of the simulated user's own tools": 5}),
    "inspect": (
        "*.*",
        18,
        17,
        21,
        {"generations by scorers": 3, "samples without a generation": 1},
    ),
    "claude-code": ("*.trace.jsonl", 659, 4, 224, {"lines that are no message": 4}),
}


def files(folder: str, pattern: str = "*") -> list[Path]:
    return sorted((SAMPLES / folder).glob(pattern))


def imported(
    tmp_path: Path, folder: str, pattern: str = "*", **options: Any
) -> tuple[ImportReport, Trace]:
    report = import_trace(files(folder, pattern), tmp_path / "made.jsonl.gz", **options)
    return report, read_trace(tmp_path / "made.jsonl.gz")


def recorded(name: str) -> dict[str, Any]:
    """A recorded trace that others made of the same source, by trajectory."""
    path = SHARED / "traces" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("recorded traces are not at ../shared/traces")
    with gzip.open(path, "rt") as lines:
        return {row["trajectory_id"]: row for row in map(json.loads, lines)}


@pytest.mark.parametrize("folder", FOUND)
def test_real_logs_are_recognised_and_read(tmp_path, folder):
    pattern, read, trajectories, steps, dropped = FOUND[folder]
    report, trace = imported(tmp_path, folder, pattern)
    assert report.format == folder
    assert (report.read, report.trajectories, report.steps) == (read, trajectories, steps)
    assert (report.damaged, report.dropped) == (0, dropped)
    assert open_gaps(trace)["output_tokens"] == 0
    assert all(s.output_tokens is not None for r in trace.records for s in r.steps)


@pytest.mark.parametrize("folder", FOUND)
def test_a_real_log_is_recognised_as_one_format_only(folder):
    for source in sources(files(folder, FOUND[folder][0])):
        assert recognised(head_of(source)) == [folder], source.path.name


def test_every_folder_of_samples_of_a_format_is_read():
    folders = {path.name for path in SAMPLES.iterdir() if path.is_dir()}
    assert folders & set(FORMATS) == set(FOUND)


def test_requests_of_mooncake_are_joined_as_others_joined_them(tmp_path):
    stated = recorded("mooncake_conversation")
    _, trace = imported(tmp_path, "mooncake", "conversation*")

    def key(arrival_s: float, steps: Any, get: Any) -> list[tuple[int, int, int]]:
        return [
            (
                round(1000 * (arrival_s + get(s, "t_s"))),
                get(s, "input_tokens"),
                get(s, "output_tokens"),
            )
            for s in steps
        ]

    ours = {tuple(key(r.arrival_s or 0.0, r.steps, getattr)) for r in trace.records}
    here = Counter(request for conversation in ours for request in conversation)
    theirs = set()
    for row in stated.values():  # of the whole trace, of which the sample is a part
        requests = key(row["arrival_s"], row["steps"], dict.__getitem__)
        theirs.add(tuple(request for request in requests if request in here))
    theirs.discard(())
    # Where one request continues two others equally well, either choice is right.
    assert len(ours & theirs) >= 0.99 * len(theirs)


def test_attempts_at_one_issue_are_a_group(tmp_path):
    _, trace = imported(tmp_path, "claude-code", "*.trace.jsonl")
    assert sorted(Counter(r.group_id for r in trace.records).values()) == [1, 3]
    tools = {s.tool for r in trace.records for s in r.steps}
    assert {"Bash", "Read", "Edit", "TodoWrite"} <= tools
    waits = [s.tool_s for r in trace.records for s in r.steps if s.tool == "Bash"]
    assert all(wait is not None and 0 <= wait < 600 for wait in waits)


def test_prompts_of_the_providers_add_up(tmp_path):
    """Where nothing was compacted, a prompt is the one before, its output, and what was added."""
    for folder, pattern in (
        ("tau2", "*"),
        ("inspect", "browser*"),
        ("claude-code", "*.trace.jsonl"),
    ):
        _, trace = imported(tmp_path, folder, pattern)
        checked = 0
        for record in trace.records:
            for step, after in zip(record.steps, record.steps[1:], strict=False):
                assert step.input_tokens is not None
                if step.tool_tokens is not None and step.tool is not None:
                    grown = step.input_tokens + (step.output_tokens or 0) + step.tool_tokens
                    checked += grown == after.input_tokens
        assert checked > 0.9 * (sum(len(r.steps) for r in trace.records) - len(trace.records))


def test_a_file_of_samples_that_is_no_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tool_calls\.json: no known format is recognised"):
        imported(tmp_path, "claude-code", "*.json")
