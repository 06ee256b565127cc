"""Clients that others wrote, through the gateway, in front of real vLLM engines on CPU.

Greedy and in float32: SkyRL's tokens are those of one server that is asked directly, and verifiers'
rollouts those that it makes there. Structured output holds agents to commands that do no harm;
mini-swe-agent's are drawn.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from heddle.runs import load_run
from heddle.runs.replay import replay
from heddle_core.events import StepFinished, TrajectoryArrived, TrajectoryFinished
from tests.app.gateways import gateway
from tests.clients.conftest import HEDDLE
from tests.clients.test_coding_agents import EXAMPLE
from tests.clients.test_skyrl import client_class  # noqa: F401
from tests.clients.test_verifiers import (  # noqa: F401
    COMMANDS,
    ROLLOUTS,
    TURNS,
    agent,
    converse,
    reads_vllm,
    task,
    training,
    verifiers,
)
from tests.runtime.vllm_serve import direct, two_servers

pytestmark = pytest.mark.filterwarnings("ignore")

TRAJECTORIES, STEPS, TOKENS = 8, 3, 40


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with two_servers(tmp_path_factory.mktemp("vllm")) as found:
        yield found


def workers(urls: list[str]) -> tuple[str, ...]:
    return tuple(word for url in urls for word in ("--worker", url))


def name_of(url: str) -> str:
    with urlopen(f"{url}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def events(run: Path, kind: type[Any]) -> list[Any]:
    found = load_run(run)
    assert replay(found).divergence is None
    return [entry.event for entry in found.entries() if isinstance(entry.event, kind)]


def test_skyrls_client_gets_the_tokens_of_one_server(
    client_class: Any,  # noqa: F811
    urls: list[str],
    tmp_path: Path,
):
    async def trajectory(client: Any, n: int) -> None:
        context = [5 + n, *range(40, 80)]
        for step in range(STEPS):
            sampling = {
                "max_tokens": TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
                "logprobs": 1,
            }
            asked = {
                "prompt_token_ids": [context],
                "sampling_params": sampling,
                "session_ids": [f"task-{n // 4}_{n % 4}"],
                "cache_salt": "version-0",
            }
            out = await client.generate(asked)
            (ids,), (logprobs,) = out["response_ids"], out["response_logprobs"]
            assert [*context, *ids] == await direct(urls[0], context, TOKENS)
            assert len(logprobs) == TOKENS
            assert all(each <= 0.0 for each in logprobs)
            assert out["stop_reasons"] == ["length"]
            context = [*context, *ids, 200 + step, 300 + n]
        await client.finish_session(f"task-{n // 4}_{n % 4}")

    async def main(url: str) -> None:
        async with client_class(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=name_of(url)
        ) as client:
            await asyncio.gather(*(trajectory(client, n) for n in range(TRAJECTORIES)))

    out = ("--out", str(tmp_path / "runs"))
    with gateway(tmp_path, *workers(urls), *out) as served:
        asyncio.run(main(served.url))
        served.end()
    run = Path(served.started["run"])
    assert len({e.group for e in events(run, TrajectoryArrived)}) == 2
    assert {e.engine.name for e in events(run, StepFinished)} == {"e0", "e1"}
    assert len(events(run, StepFinished)) == TRAJECTORIES * STEPS
    assert [e.outcome for e in events(run, TrajectoryFinished)] == ["completed"] * TRAJECTORIES


def test_agents_of_mini_swe_agent_end_as_agents_may(urls: list[str], tmp_path: Path):
    pytest.importorskip("minisweagent", reason="no mini-swe-agent here; `make clients` has it")
    limits = ("--tasks", "2", "--samples", "2", "--steps", "6")
    words = (sys.executable, EXAMPLE, tmp_path / "out", *limits, "--", *HEDDLE, "serve")
    done = subprocess.run((*words, *workers(urls)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    steps = {line.split()[0]: int(line.split()[2]) for line in lines}
    assert set(steps) == {f"task-{n}_{s}" for n in range(2) for s in range(2)}
    run = Path(last.partition("run in ")[2])
    made = [e.trajectory for e in events(run, StepFinished)]
    assert {name: made.count(name) for name in steps} == steps
    assert {e.outcome for e in events(run, TrajectoryFinished)} == {"completed"}


def called(command: str) -> str:
    """A call of verifiers' tool as vLLM's parser `hermes` reads it."""
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def said(trace: Any) -> list[tuple[Any, ...]]:
    """What a rollout has of each message, but its ids."""
    assert not trace.errors
    return [
        (
            node.message.content,
            [call.arguments for call in getattr(node.message, "tool_calls", None) or ()],
            node.token_ids,
        )
        for node in trace.nodes
    ]


@pytest.mark.parametrize("kind", ["eval", "train"])
@pytest.mark.usefixtures("reads_vllm")
def test_verifiers_rollouts_are_those_of_one_server_and_each_step_is_once_in_the_journal(
    kind: str,
    verifiers: Any,  # noqa: F811
    urls: list[str],
    tmp_path: Path,
):
    model = name_of(urls[0])

    async def with_tools(url: str) -> Sequence[Any]:
        client = {"type": "eval", "base_url": f"{url}/v1"}
        calls = {"choice": [*map(called, COMMANDS)]}
        sampling = {"max_tokens": 200, "temperature": 0, "structured_outputs": calls}
        async with agent(verifiers, "bash", client, model, **sampling) as one:
            tasks = [task(verifiers, n, f"Name folder {n} .") for n in range(ROLLOUTS)]
            return await asyncio.gather(*map(one.run, tasks))

    async def with_token_ids(url: str) -> Sequence[Any]:
        async with agent(verifiers, "null", training(url, model), model, temperature=0) as one:
            return await asyncio.gather(*(converse(verifiers, one, n) for n in range(ROLLOUTS)))

    rollouts = with_tools if kind == "eval" else with_token_ids
    with gateway(tmp_path, *workers(urls), "--out", str(tmp_path / "runs")) as served:
        traces = asyncio.run(rollouts(served.url))
        served.end()
    for trace, alone in zip(traces, asyncio.run(rollouts(urls[0])), strict=True):
        assert said(trace) == said(alone)
        assert trace.num_turns == TURNS
        for node, same in zip(trace.nodes, alone.nodes, strict=True):
            assert node.logprobs == pytest.approx(same.logprobs, abs=1e-4)
            assert bool(node.logprobs) == (node.sampled and kind == "train")
    run = Path(served.started["run"])
    steps = events(run, StepFinished)
    assert Counter(e.trajectory for e in steps) == {trace.id: TURNS for trace in traces}
    assert {e.engine.name for e in steps} == {"e0", "e1"}
