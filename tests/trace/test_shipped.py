import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from heddle_trace import MissingRules, complete, open_gaps, read_trace, synth, write_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
# Workload, trajectories, samples a group, seed: as the commands in traces/README.md have them.
RECORDED = "cpu-agents"
MADE = {
    "tiny.jsonl": ("coding", 12, 4, 4),
    "coding-512.jsonl.gz": ("coding", 512, 16, 11),
    "search-512.jsonl.gz": ("search", 512, 16, 12),
    "math-512.jsonl.gz": ("math", 512, 16, 13),
}


@pytest.mark.parametrize("name", MADE)
def test_a_shipped_trace_is_what_its_command_makes(tmp_path, name):
    workload, trajectories, samples, seed = MADE[name]
    shipped = read_trace(TRACES / name)
    again = write_trace(tmp_path / name, synth(workload, trajectories, seed, samples))
    # Of the uncompressed bytes: another zlib may pack equal bytes differently.
    assert again.sha256 == shipped.sha256
    assert shipped.sha256[:16] in (TRACES / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_every_trace_with_its_command():
    text = (TRACES / "README.md").read_text(encoding="utf-8")
    commands = {}
    for line in re.findall(r"^heddle trace synth (.*)$", text, re.MULTILINE):
        words = line.split()
        options = dict(zip(words[1::2], words[2::2], strict=True))
        commands[Path(options["-o"]).name] = (
            words[0],
            int(options["--trajectories"]),
            int(options.get("--samples", 16)),
            int(options["--seed"]),
        )
    assert commands == MADE
    assert {path.name for path in TRACES.iterdir()} == {*MADE, "README.md", RECORDED}


def test_the_shipped_recording_is_small_and_names_no_machine():
    files = sorted((TRACES / RECORDED).iterdir())
    assert [path.name for path in files] == [
        "engine-0.prom.gz",
        "engine-1.prom.gz",
        "spans.jsonl.gz",
    ]
    assert sum(path.stat().st_size for path in files) < 300_000
    text = b"".join(gzip.decompress(path.read_bytes()) for path in files)
    assert not re.search(rb"/(home|root|tmp|work|usr)/|\b\d+\.\d+\.\d+\.\d+\b|@", text)
    readme = (TRACES / "README.md").read_text(encoding="utf-8")
    assert RECORDED in readme
    assert "experiments.real_cpu.recorded" in readme


@pytest.mark.parametrize("name", MADE)
def test_a_shipped_trace_replays_without_any_rule(name):
    trace = read_trace(TRACES / name)
    assert set(open_gaps(trace).values()) == {0}
    scripts, report = complete(trace, rules=MissingRules(), seed=0)
    assert len(scripts) == len(trace.records)
    assert report.assumptions == ()


def test_the_examples_of_the_format_page_run(tmp_path, monkeypatch):
    page = (TRACES.parent / "docs" / "traces.md").read_text(encoding="utf-8")
    (tmp_path / "traces").symlink_to(TRACES)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["stats"].trajectories == 12
    assert len(read_trace("mine.jsonl.gz").records) == 64
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.jsonl").write_text(example.replace("\n", " "))
    assert read_trace("example.jsonl").records[0].steps[0].tool == "calculator"
