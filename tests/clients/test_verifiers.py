"""verifiers: rollouts of its agents, and of its training client, which sends token ids."""

import asyncio
import stat
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heddle_core.events import StepFinished, ToolReturned, TrajectoryArrived
from heddle_runtime.tiny_model import make_tiny_model
from tests.clients.test_mini_swe_agent import tool_call

pytest.importorskip("verifiers", reason="no verifiers here; `make clients` has it")
pytestmark = pytest.mark.filterwarnings("ignore")

ROLLOUTS, TURNS, TOKENS = 4, 3, 12
COMMANDS = ("basename $PWD > name.txt", "wc -c name.txt")


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verifiers.v1
        from verifiers.v1.runtimes import subprocess

    monkeypatch.setattr(subprocess, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(subprocess.SubprocessRuntime, "scripts_dir", str(tmp_path / "scripts"))
    # It has uv fetch what its chat program imports; all of that is installed beside the tests.
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    says = f'case "$*" in *--help) echo --script;; *find*) echo {sys.executable};; esac'
    uv.write_text(f"#!/bin/sh\n{says}\n")
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    return verifiers.v1


def agent(
    verifiers: Any, harness: str, client: dict[str, Any], model: str = "fake", **sampling: Any
) -> Any:
    config = verifiers.AgentConfig(
        harness={"id": harness},
        runtime={"type": "subprocess"},
        model=model,
        client={"api_key_var": "HEDDLE_TEST_KEY", **client},
        max_turns=TURNS,
        sampling={"max_tokens": TOKENS, "temperature": 1.0, **sampling},
    )
    return verifiers.Agent(config)


def training(url: str, folder: Path | str) -> dict[str, Any]:
    renderer = {"renderer": {"name": "default"}, "renderer_model_name": str(folder)}
    return {"type": "train", "base_url": f"{url}/v1", **renderer}


async def converse(verifiers: Any, one: Any, n: int) -> Any:
    async with one.interaction(task(verifiers, n, None)) as held:
        for turn in range(TURNS):
            await held.turn(f"Count on from {n} in turn {turn} .")
    return held.trace


def task(verifiers: Any, n: int, prompt: str | None) -> Any:
    return verifiers.Task(verifiers.TaskData(idx=n, prompt=prompt))


def test_its_agents_call_tools_in_sessions_by_its_trace_ids(verifiers: Any, serve: Any):
    async def main(url: str) -> Sequence[Any]:
        async with agent(verifiers, "bash", {"type": "eval", "base_url": f"{url}/v1"}) as one:
            tasks = [task(verifiers, n, f"Name folder {n} .") for n in range(ROLLOUTS)]
            return await asyncio.gather(*map(one.run, tasks))

    replies = [*map(tool_call, COMMANDS), {"content": "Done ."}]
    with serve("--engines", "2", replies=replies) as run:
        traces = asyncio.run(main(run.url))
    for trace in traces:
        assert not trace.errors
        said = [node.message for node in trace.nodes if node.message.role == "tool"]
        assert [each.content for each in said] == ["", f"{len(trace.id) + 1} name.txt\n"]
        assert trace.num_turns == len(replies)
    arrived = run.events(TrajectoryArrived)
    steps = [e.trajectory for e in run.events(StepFinished)]
    assert sorted(steps.count(e.trajectory) for e in arrived) == [len(replies)] * ROLLOUTS
    assert [e.tool for e in run.events(ToolReturned)] == ["bash"] * 2 * ROLLOUTS


@pytest.fixture
def reads_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs as its `renderers` 0.1.12 wants them: vLLM 0.32 has no `token`, but a number."""
    from renderers import client

    parse = client.parse_generate_response

    def parsed(raw: bytes) -> dict[str, Any]:
        found: dict[str, Any] = parse(raw)
        for entry in found["choices"][0]["logprobs"]["content"]:
            entry["token"] = f"token_id:{entry.pop('token_id')}"
        return found

    monkeypatch.setattr(client, "parse_generate_response", parsed)


@pytest.mark.usefixtures("reads_vllm")
def test_its_training_client_sends_each_turn_as_ids_and_goes_on_from_them(
    verifiers: Any, serve: Any, tmp_path: Path
):
    folder = make_tiny_model(tmp_path / "model")

    async def main(url: str) -> Sequence[Any]:
        async with agent(verifiers, "null", training(url, folder)) as one:
            return await asyncio.gather(*(converse(verifiers, one, n) for n in range(ROLLOUTS)))

    with serve("--engines", "2", "--set", "serve.fake_tokens=10") as run:
        traces = asyncio.run(main(run.url))
    made = defaultdict(list)
    for step in run.events(StepFinished):
        made[step.trajectory].append(step.output_tokens)
    kept = []
    for trace in traces:
        assert not trace.errors
        sampled = [node for node in trace.nodes if node.sampled]
        assert all(sum(node.mask) == len(node.logprobs) > 0 for node in sampled)
        kept.append([len(node.logprobs) for node in sampled])
    assert [len(each) for each in kept] == [TURNS] * ROLLOUTS
    assert sorted(kept) == sorted(made.values())
    assert len(run.events(TrajectoryArrived)) == ROLLOUTS
