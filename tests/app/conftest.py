"""What the tests of the app share: a tiny trace, and the command line in-process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heddle.cli import main
from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from tests.app.browser import browser
from tests.app.journals import Heddle
from tests.app.reported import large, small

__all__ = ["browser", "large", "small"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three groups of two samples with two to four steps each, all values known."""
    path = tmp_path / "small.jsonl"
    records = []
    for group in range(3):
        for sample in range(2):
            steps = [
                {
                    "output_tokens": 40 + 17 * group + 5 * i + sample,
                    "tool": "bash" if i < group + 1 else None,
                    "tool_s": 0.5 + 0.1 * i if i < group + 1 else 0.0,
                    "tool_tokens": 30 if i < group + 1 else 0,
                    "tool_ok": True,
                }
                for i in range(group + 2)
            ]
            records.append(
                {
                    "trajectory_id": f"g{group}/{sample}",
                    "group_id": f"g{group}",
                    "workload": "coding",
                    "prompt_tokens": 200 + 10 * group,
                    "steps": steps,
                }
            )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def config(trace: Path) -> RunConfig:
    return RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=2, max_running=2))


@pytest.fixture
def heddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heddle:
    """Run a command in an empty folder of its own; a comparison with one seed, if none is said."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*args: object) -> Result:
        words = [str(a) for a in args]
        if words[:1] == ["compare"] and "--seeds" not in words:
            words += ["--seeds", "1"]
        return CliRunner().invoke(main, words)

    return run


@pytest.fixture
def refused(heddle: Heddle) -> Callable[..., str]:
    """Run a command that must end with a status and one message, and return the message."""

    def run(*args: object, status: int = 2) -> str:
        result = heddle(*args)
        assert result.exit_code == status, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert isinstance(result.exception, SystemExit)
        return result.stderr

    return run


@pytest.fixture(scope="module")
def few_policies() -> Iterator[None]:
    """A search without names tries three shipped policies; `test_api` searches among all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heddle.search.result.shipped", lambda _: ["verl", "slime", "heddle"])
        yield
