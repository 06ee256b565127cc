"""`/v1/messages`, `/v1/responses`, adapters and lists of models, on engines by URL."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from campaigns.faults.mock_bodies import continued, prompt_of, text_of
from heddle_core.events import StepFinished, ToolStarted, TrajectoryArrived
from tests.gateway.served import NO_AIOHTTP, run

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle.config_files import ConfigError  # noqa: E402
from heddle.gateway.config import other_models  # noqa: E402
from heddle_gateway.front import FrontSettings  # noqa: E402
from heddle_runtime.vllm_http.connections import Connections  # noqa: E402
from heddle_runtime.vllm_http.endpoint import Endpoint  # noqa: E402
from heddle_runtime.vllm_http.probe import CHAT, MESSAGES, RESPONSES  # noqa: E402
from tests.gateway.test_engine_urls import Registered, registered  # noqa: E402
from tests.gateway.test_http import Client, client  # noqa: E402
from tests.gateway.test_streams import talking  # noqa: E402
from tests.runtime.fake_forwarded import chat_of  # noqa: E402
from tests.runtime.fake_vllm import MODEL  # noqa: E402

PATHS = (MESSAGES, RESPONSES)


def asked(path: str, name: str, tokens: int = 6, **fields: Any) -> dict[str, Any]:
    if path == MESSAGES:
        said: dict[str, Any] = {"messages": [{"role": "user", "content": name}]}
        return {**said, "system": "be brief", "max_tokens": tokens, **fields}
    return {"input": name, "max_output_tokens": tokens, "prompt_cache_key": name, **fields}


def told(path: str, body: dict[str, Any]) -> str:
    chat = chat_of(path, body)
    return text_of(continued(prompt_of(CHAT, chat), chat["max_tokens"]))


def text_in(path: str, answer: dict[str, Any]) -> str:
    blocks = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return str(blocks[0]["text"])


async def stream(at: Registered, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and data of the events."""
    found, name = [], ""
    async with at.http.post(at.url + path, json={**body, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            kind, _, rest = line.decode().strip().partition(": ")
            if kind == "event":
                name = rest
            elif kind == "data":
                found.append((name, json.loads(rest)))
    return found


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_the_engines_own_whole_and_streamed_and_name_their_tool(path: str):
    async def main() -> None:
        async with talking() as at:
            body = asked(path, "one", tools=[{"name": "grep", "input_schema": {}}])
            status, answer = await at("POST", f"/sessions/s{path}", body)
            assert (status, text_in(path, answer)) == (200, told(path, body))
            body = asked(path, "two", tools=[{"name": "ls", "input_schema": {}}])
            events = await stream(at, path, body)
            assert all(name == data["type"] for name, data in events)
            deltas = (d["delta"] for n, d in events if n.endswith(".delta") or "block_delta" in n)
            assert "".join(d if path == RESPONSES else d["text"] for d in deltas) == told(
                path, body
            )
            assert events[-1][0] in ("message_stop", "response.completed")
            finished = at.bench.events(StepFinished)
            assert [e.output_tokens for e in finished] == [6, 6]
            assert [e.tool for e in at.bench.events(ToolStarted)] == ["grep", "ls"]

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_forwarded_request_continues_its_trajectory_and_attaches_to_its_repetition(path: str):
    async def main() -> None:
        async with talking() as at:
            first = asked(path, "one", 20)
            pair = await asyncio.gather(
                *(at("POST", f"/sessions/s{path}", first) for _ in range(2))
            )
            assert pair[0] == pair[1]
            calls = [b for server in at.servers for b in server.seen if b.get("system", 1) != ""]
            assert sum(b.get("max_tokens", b.get("max_output_tokens")) == 20 for b in calls) == 1
            reply = {"role": "assistant", "content": text_in(path, pair[0][1])}
            given = first.get("messages") or [{"role": "user", "content": first["input"]}]
            field = "messages" if path == MESSAGES else "input"
            more = [*given, reply, {"role": "user", "content": "go on"}]
            status, _ = await at("POST", f"/sessions/s{path}", {**first, field: more})
            assert status == 200
            assert [e.trajectory for e in at.bench.events(TrajectoryArrived)] == ["s"]

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_errors_have_the_form_of_their_protocol_and_the_engines_words(path: str):
    async def main() -> None:
        async with talking() as at:
            status, error = await at("POST", path, asked(path, "hot", temperature=3))
            assert (status, error["error"]["message"]) == (400, "too hot")
            assert ("type" in error) == (path == MESSAGES)
            status, error = await at("POST", path, {**asked(path, "a"), "model": "other"})
            assert (status, error["error"]["message"]) == (404, "no such model")
            status, error = await at("POST", path, asked(path, "a", background=True))
            assert (status, "background" in error["error"]["message"]) == (400, True)
            assert error.get("type") == ("error" if path == MESSAGES else None)

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_breaks_off_before_its_first_event_goes_on_and_later_ends_in_an_error(
    path: str,
):
    async def main() -> None:
        async with talking() as at:
            for server in at.servers:
                server.cut_after, server.cuts = 0, 1
            body = asked(path, "one")
            status, answer = await at("POST", path, body)
            assert (status, text_in(path, answer)) == (200, told(path, body))
            for server in at.servers:
                server.cut_after, server.cuts = 3, 1 << 30
            events = await stream(at, path, asked(path, "two"))
            assert events[-1][0] == events[-1][1]["type"] == "error"

    run(main())


def test_a_request_for_an_adapter_runs_only_at_engines_that_list_it():
    async def main() -> None:
        async with registered(servers=0, more=2) as at:
            for server, names in zip(at.servers, [(), ("poet",)], strict=True):
                server.adapters, server.scripted = names, False
                await at.add(server.url)
            await at.until(ready=2)
            for n in range(6):
                body = {"messages": [{"role": "user", "content": f"{n}"}], "max_tokens": 4}
                status, answer = await at("POST", CHAT, {**body, "model": "poet"})
                assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
            assert not [b for b in at.servers[0].seen if b.get("model") == "poet"]
            _, listed = await at("GET", "/v1/models")
            assert [(m["id"], m["parent"]) for m in listed["data"]] == [
                (MODEL, None),
                ("poet", MODEL),
            ]
            status, found = await at("GET", "/v1/models/poet")
            assert (status, found) == (200, listed["data"][1])
            status, error = await at("GET", "/v1/models/nobody")
            assert (status, error["error"]["param"]) == (404, "model")
            assert (await at("POST", CHAT, {**body, "model": "nobody"}))[0] == 404

    run(main())


@asynccontextmanager
async def two_models() -> AsyncIterator[tuple[Client, Client]]:
    """A gateway, and one behind it that has another model."""
    async with client() as other, client() as http, Connections() as session:
        other.bench.front.model.names = ("big",)
        other.bench.front.settings = FrontSettings(api_key="engine-key")
        endpoint = Endpoint(other.bench.url, session, api_key="engine-key")
        http.bench.front.others = {"big": endpoint}
        yield http, other


def test_requests_for_another_model_go_to_its_server_and_its_answer_comes_back_as_it_is():
    async def main() -> None:
        async with two_models() as (http, other):
            body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
            answer = await http.post(CHAT, {**body, "model": "big"}, X_Session_ID="s")
            assert (answer["model"], http.headers["x-heddle-trajectory"]) == ("big", "s")
            status, text = await http("POST", CHAT, {**body, "model": "big", "stream": True})
            assert (status, text.rstrip()[-6:]) == (200, "[DONE]")
            assert (await http.post(CHAT, {**body, "model": "fake"}))["model"] == "fake"
            assert [e.trajectory for e in other.bench.events(TrajectoryArrived)] == ["s", "anon~1"]
            assert len(http.bench.events(TrajectoryArrived)) == 1
            _, listed = await http("GET", "/v1/models")
            assert [each["id"] for each in listed["data"]] == ["fake", "big"]
            assert (await http("GET", "/v1/models/big"))[1]["id"] == "big"
            assert (await http.post("/finish_session?session_id=s"))["finished"] is True
            status, error = await http("POST", CHAT, {**body, "model": "big", "max_tokens": -1})
            assert (status, error["error"]["param"]) == (400, "max_tokens")

    run(main())


def test_a_packed_body_goes_on_unpacked_and_says_so():
    async def main() -> None:
        async with two_models() as (http, _):
            body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
            raw = gzip.compress(json.dumps({**body, "model": "big"}).encode())
            named = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            async with http.http.post(http.bench.url + CHAT, data=raw, headers=named) as answer:
                assert (answer.status, (await answer.json())["model"]) == (200, "big")

    run(main())


def test_the_server_of_another_model_may_be_gone_and_that_is_said_as_an_error():
    async def main() -> None:
        async with client() as http, Connections() as session:
            http.bench.front.others = {"big": Endpoint("http://127.0.0.1:9", session)}
            status, error = await http("POST", CHAT, {"model": "big", "messages": []})
            assert (status, http.headers["Retry-After"]) == (503, "5")
            assert "cannot be reached" in error["error"]["message"]

    run(main())


@pytest.mark.parametrize("entry", ["big", "=http://a:1", "big=ftp://a", "big=http://a:1?x"])
def test_a_model_elsewhere_needs_a_name_and_a_url(entry: str):
    with pytest.raises(ConfigError, match=r"serve\.models"):
        other_models([entry])
    with pytest.raises(ConfigError, match="name of its own"):
        other_models(["a=http://b:1", "a=http://c:1"])


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_other_paths_and_odd_roles_are_the_engines_to_judge(path: str):
    async def main() -> None:
        async with talking() as at:
            body = asked(path, "one", n=2)
            status, answer = await at("POST", path, body)
            assert (status, text_in(path, answer)) == (200, told(path, body))
            for odd in ({"type": ["x"]}, {"role": ["u"], "content": "a"}):
                field = "messages" if path == MESSAGES else "input"
                status, answer = await at("POST", path, {**asked(path, "two"), field: [odd]})
                assert status != 500 or answer["error"]["message"] != "the gateway failed"

    run(main())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", *PATHS])
@pytest.mark.parametrize("model", [["a"], {}])
def test_a_model_that_is_no_text_is_refused(path: str, model: Any):
    async def main() -> None:
        async with talking() as at:
            body = {**asked(MESSAGES, "one"), "input": "one", "prompt": "one", "model": model}
            for each in (path, path + "/render"):
                assert (await at("POST", each, body))[0] in (400, 404)

    run(main())
