"""A gateway as users start it, `heddle serve --engine fake`, for clients that others wrote."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from heddle.runs import load_run

HEDDLE = (sys.executable, "-m", "heddle.cli")


class ServedRun:
    """A gateway at `url`, and the run directory that it leaves."""

    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = url, path

    def events(self, kind: type[Any]) -> list[Any]:
        """What its journal has, once it has ended."""
        events = (entry.event for entry in load_run(self.path).entries())
        return [event for event in events if isinstance(event, kind)]

    def tools(self) -> list[str | None]:
        """Tools of the trace that is extracted from it, in the order of the trajectories."""
        out = self.path.with_suffix(".jsonl")
        heddle("trace", "extract", str(self.path), "-o", str(out))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return [step.get("tool") for line in lines for step in line.get("steps", ())]


def heddle(*words: str) -> str:
    done = subprocess.run([*HEDDLE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def serve(tmp_path: Path) -> Any:
    """Start a gateway, whose replies are messages; its journal must replay."""

    @contextmanager
    def started(*words: str, replies: Sequence[dict[str, Any]] = ()) -> Iterator[ServedRun]:
        if replies:
            file = tmp_path / "replies.jsonl"
            file.write_text("".join(json.dumps(each) + "\n" for each in replies))
            words = (*words, "--set", f"serve.fake_replies={file}")
        command = [*HEDDLE, "serve", "--engine", "fake", "--json", "--port", "0"]
        command += ["--set", "serve.names=['fake']", "--out", str(tmp_path / "runs"), *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                said = json.loads(process.stdout.readline())
                yield ServedRun(said["url"], Path(said["run"]))
            finally:
                process.terminate()
                process.wait(60)
        assert "the same" in heddle("replay", said["run"])

    return started
