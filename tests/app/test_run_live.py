"""`heddle run --live`: the sandbox is probed before any engine starts, and its notes are shown."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import heddle.live.work
import heddle.running
import heddle.stages
from heddle.runs import load_run
from heddle_core.ids import EngineId
from heddle_rollout.engines import StepRequest
from heddle_runtime.agents.tokenizer import FileTokenizer
from heddle_runtime.sandbox.runner import Sandbox, SandboxUnavailableError
from tests.app.journals import Heddle
from tests.runtime.live.played import library
from tests.runtime.scripted import ScriptedLauncher

WORLD = {"engine": "vllm", "vllm": "0.0", "notes": ["this release was not tested"]}


class Launcher(ScriptedLauncher):
    """Engines that answer at once."""

    started = 0

    def start(self, *args: Any) -> Any:
        type(self).started += 1
        return super().start(*args)

    def facts(self, engine: EngineId) -> None:
        return None


def answer(request: StepRequest) -> Sequence[int]:
    return FileTokenizer(library()).encode("Answer: 42", begins=False)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Arguments of a run whose engines are scripted."""
    Launcher.started = 0
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 258}')
    library().save(str(model / "tokenizer.json"))
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "How much?", "answer": "42"}\n')
    monkeypatch.setattr(heddle.stages, "open_vllm", lambda *_: Launcher(answer))
    monkeypatch.setattr(heddle.running, "engine_facts", lambda *_: dict(WORLD))
    return ("run", path, "--live", "--engine", "vllm", "--model-dir", model, "--engines", "1")


def test_what_the_sandbox_does_not_limit_is_shown_and_kept(
    heddle: Heddle, tasks: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("heddle.live.work.Sandbox", only("filter"))
    done = heddle(*tasks, "--json")
    if "cannot isolate programs" in done.stderr:
        pytest.skip(done.stderr)
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()
    assert said[0] == "Note: this release was not tested"
    assert said[1].startswith("Note: tool calls run without namespaces of their own (as chosen")
    world = load_run(json.loads(done.stdout)["run"]).manifest["world"]
    assert world["sandbox"] == "filter"
    # How late the event loop of such a short run is depends on the machine.
    assert [f"Note: {note}" for note in world["notes"]] == [s for s in said if "loop" not in s]
    assert list(world["engines"]) == ["e0"]


def only(mode: str) -> Callable[..., Sandbox]:
    """The sandbox, as on a machine that permits this mode only."""

    def make(*args: Any, **options: Any) -> Sandbox:
        return Sandbox(*args, **{**options, "mode": mode})

    return make


def test_a_machine_without_isolation_is_refused_before_anything_starts(
    refused: Callable[..., str], tasks: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
):
    async def nothing(self: Sandbox) -> None:
        raise SandboxUnavailableError("this machine cannot isolate programs")

    monkeypatch.setattr(Sandbox, "_find_mode", nothing)
    said = refused(*tasks)
    assert said == "Error: this machine cannot isolate programs\n"
    assert Launcher.started == 0
    assert not list(Path().glob("runs/*"))
