"""The gateway in front of real vLLM engines: the tokens are those of `vllm serve` asked directly.

Everything is greedy and in float32, as in `tests/runtime/test_vllm_tokens.py`.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.runs import load_run
from heddle.runs.replay import replay
from heddle_core.events import EngineFailed, StepFinished
from heddle_runtime.tiny_model import make_tiny_model
from tests.app.gateways import Gateway, gateway
from tests.gateway.served import NO_AIOHTTP

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)
openai = pytest.importorskip("openai", reason="openai is not installed")

# Imports aiohttp.
from tests.runtime.vllm_serve import CHAT_TEMPLATE, VllmServe, needs_serve  # noqa: E402

pytestmark = needs_serve

CHAT: Any = {
    "messages": [{"role": "user", "content": "count to ten and back again"}],
    "max_tokens": 40,
    "temperature": 0,
    "extra_body": {"return_token_ids": True, "ignore_eos": True},
}
AGENTS, STEPS = 6, 3


class Servers:
    """Two `vllm serve` and what the first of them says."""

    def __init__(self, folder: Path) -> None:
        self.model = make_tiny_model(folder / "model", seed=1)
        self.folder = folder
        self.each = [VllmServe(self.model, folder) for _ in range(2)]
        for server in self.each:
            server.start()
        for server in self.each:
            asyncio.run(server.ready())

    def client(self, url: str) -> Any:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(tmp_path_factory.mktemp("vllm"))
    yield found
    for server in found.each:
        server.murder()


def name_of(client: Any) -> str:
    [model] = client.models.list().data
    return str(model.id)


def agent(client: Any, model: str, n: int, **headers: str) -> list[list[int]]:
    """A short dialogue by token ids; returns the tokens of each step."""
    context, made = [5 + n, *range(40, 120)], []
    for step in range(STEPS):
        answer = client.completions.create(
            model=model,
            prompt=context,
            max_tokens=80,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers=headers,
        )
        made.append(answer.choices[0].token_ids)
        context = [*context, *made[-1], 200 + step, 300 + n]
    return made


def test_answers_are_those_of_the_server_itself(servers: Servers, tmp_path: Path):
    urls = [word for server in servers.each for word in ("--worker", server.url)]
    with (
        gateway(tmp_path, *urls) as served,
        servers.client(served.url) as ours,
        servers.client(servers.each[0].url) as direct,
    ):
        model = name_of(direct)
        assert name_of(ours) == model
        expected = direct.chat.completions.create(model=model, **CHAT)
        answer = ours.chat.completions.create(model=model, **CHAT)
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        assert answer.prompt_token_ids == expected.prompt_token_ids
        text = expected.choices[0].message.content
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens == expected.usage.completion_tokens == 40
        with ours.chat.completions.create(model=model, **CHAT, stream=True) as stream:
            streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        assert streamed == text

        logprobs = {**CHAT, "logprobs": True, "top_logprobs": 2}
        expected = direct.chat.completions.create(model=model, **logprobs)
        answer = ours.chat.completions.create(model=model, **logprobs)
        pairs = zip(
            answer.choices[0].logprobs.content, expected.choices[0].logprobs.content, strict=True
        )
        for one, other in pairs:
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)

        stop = text[len(text) // 2 :][:4]
        expected = direct.chat.completions.create(model=model, **CHAT, stop=[stop])
        answer = ours.chat.completions.create(model=model, **CHAT, stop=[stop])
        assert answer.choices[0].message.content == expected.choices[0].message.content
        assert answer.choices[0].finish_reason == expected.choices[0].finish_reason == "stop"

        with pytest.raises(openai.BadRequestError) as refused:
            ours.chat.completions.create(model=model, messages=CHAT["messages"], max_tokens=10**6)
        with pytest.raises(openai.BadRequestError) as directly:
            direct.chat.completions.create(model=model, messages=CHAT["messages"], max_tokens=10**6)
        assert refused.value.status_code == directly.value.status_code
        served.end()


def test_responses_messages_and_samples_are_those_of_the_server_itself(
    servers: Servers, tmp_path: Path
):
    urls = [word for server in servers.each for word in ("--worker", server.url)]
    with (
        gateway(tmp_path, *urls) as served,
        servers.client(served.url) as ours,
        servers.client(servers.each[0].url) as direct,
    ):
        model = name_of(direct)
        asked: Any = {"model": model, "input": "count to ten", "max_output_tokens": 20}
        texts = [c.responses.create(**asked, temperature=0).output_text for c in (direct, ours)]
        assert texts[0] == texts[1] != ""
        with ours.responses.stream(**asked, temperature=0) as stream:
            assert stream.get_final_response().output_text == texts[0]

        message = {"model": model, "messages": CHAT["messages"], "max_tokens": 20, "temperature": 0}
        answers = [c.post("/messages", body=message, cast_to=object) for c in (direct, ours)]
        said = [(a["content"], a["stop_reason"], a["usage"]["output_tokens"]) for a in answers]
        assert said[0] == said[1]

        drawn = {**CHAT, "temperature": 0.9, "seed": 7, "n": 3, "max_tokens": 12}
        samples = [c.chat.completions.create(model=model, **drawn) for c in (direct, ours)]
        found = [[choice.token_ids for choice in each.choices] for each in samples]
        assert found[0] == found[1]
        assert samples[0].usage.completion_tokens == samples[1].usage.completion_tokens == 36
        served.end()


def test_the_death_of_an_engine_under_its_steps_changes_no_token(servers: Servers, tmp_path: Path):
    with servers.client(servers.each[0].url) as direct:
        model = name_of(direct)
        expected = [agent(direct, model, n) for n in range(AGENTS)]
    urls = [word for server in servers.each for word in ("--worker", server.url)]
    with gateway(tmp_path, *urls) as served, servers.client(served.url) as ours:
        found: dict[int, list[list[int]]] = {}

        def play(n: int) -> None:
            found[n] = agent(ours, model, n, **{"X-Session-ID": f"t{n}"})

        threads = [threading.Thread(target=play, args=(n,)) for n in range(AGENTS)]
        for thread in threads:
            thread.start()
        wait_for_steps_on_both(served)
        servers.each[1].murder()
        for thread in threads:
            thread.join()
        assert [found[n] for n in range(AGENTS)] == expected
        summary = served.end()
    run = load_run(tmp_path / summary["run"])
    events = [entry.event for entry in run.entries()]
    assert [e for e in events if isinstance(e, EngineFailed)]
    made = sum(e.output_tokens for e in events if isinstance(e, StepFinished))
    assert made <= AGENTS * STEPS * 80
    assert replay(run).divergence is None


def wait_for_steps_on_both(served: Gateway) -> None:
    while True:
        steps = served.get("/heddle/state")["steps"]
        if len({s["engine"] for s in steps if s["output_tokens"]}) == 2:
            return


def test_engines_of_its_own_make_the_same_tokens_and_text_comes_as_it_is_made(
    servers: Servers, tmp_path: Path
):
    with servers.client(servers.each[0].url) as direct:
        model = name_of(direct)
        expected = direct.chat.completions.create(model=model, **CHAT)
        dialogue = agent(direct, model, 0)
    for server in servers.each:
        server.murder()
    template = servers.folder / "own.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = ("--engine", "vllm", "--model-dir", str(servers.model), "--engines", "1")
    args += (
        "--max-running",
        "4",
        "--set",
        "runtime.max_context=8192",
        "--set",
        "runtime.dtype=float32",
    )
    args += ("--set", f'serve.render_options=["--chat-template={template}"]')
    args += ("--set", "cluster.tp_choices=[1]")
    args += ("--set", "runtime.kv_mib=64")
    with gateway(tmp_path, *args) as served, servers.client(served.url) as ours:
        answer = ours.chat.completions.create(model=name_of(ours), **CHAT)
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        assert answer.choices[0].message.content == expected.choices[0].message.content
        with ours.chat.completions.create(model=name_of(ours), **CHAT, stream=True) as stream:
            parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
        assert "".join(parts) == expected.choices[0].message.content
        assert agent(ours, name_of(ours), 0) == dialogue
        served.end()
