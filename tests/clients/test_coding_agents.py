"""The agents of `make demo-agents`, on fake engines that say what would mend each task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import HEDDLE

pytest.importorskip("minisweagent", reason="no mini-swe-agent here; `make clients` has it")

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "coding_agents.py"
SUBMIT = "python3 check.py > log && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat log"
MENDING = [step for sign in "+-*" for step in (f"sed -i 's/a . b/a {sign} b/' task.py", SUBMIT)]


def run(out: Path, commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run three tasks of two samples each; every agent gives the same commands."""
    out.mkdir()
    replies = out / "replies.jsonl"
    said = (f"THOUGHT: next\n\n```mswea_bash_command\n{command}\n```" for command in commands)
    replies.write_text("".join(json.dumps({"content": text}) + "\n" for text in said))
    gateway = (
        *HEDDLE,
        "serve",
        "--engine",
        "fake",
        "--engines",
        "2",
        "--set",
        f"serve.fake_replies={replies}",
    )
    words = (sys.executable, EXAMPLE, out, "--tasks", "3", "--", *gateway)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_every_agent_mends_its_task(tmp_path: Path):
    done = run(tmp_path / "out", MENDING)
    assert done.returncode == 0, done.stderr
    ends = [line.split() for line in done.stdout.splitlines()[:-1]]
    assert [end[0] for end in ends] == [f"task-{n}_{s}" for n in range(3) for s in range(2)]
    assert {(end[1], int(end[2]) % 2) for end in ends} == {("Submitted", 0)}
    for name, *_ in ends:
        folder = tmp_path / "out" / "tasks" / name
        sign = (folder / "log").read_text().strip()
        assert f"return a {sign} b" in (folder / "task.py").read_text()
    assert done.stdout.splitlines()[-1].startswith("makespan ")


def test_commands_have_limits_and_a_task_is_not_submitted_as_it_is(tmp_path: Path):
    limits = "ulimit -t > t; ulimit -f > f; env > names; head -c 5M /dev/zero > big"
    done = run(tmp_path / "out", [limits, SUBMIT])
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines()[:-1]} == {"LimitsExceeded"}
    folder = tmp_path / "out" / "tasks" / "task-0_0"
    assert [(folder / name).read_text() for name in "tf"] == ["5\n", "2000\n"]
    assert (folder / "big").stat().st_size == 2000 * 1024
    assert "MSWEA" not in (folder / "names").read_text()
