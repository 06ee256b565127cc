"""Text over engines that answer requests: each word once, whatever happens to engines."""

import asyncio
import gc
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import ref

import pytest

from campaigns.faults.mock_bodies import continued, prompt_of, text_of
from heddle_core.events import EngineFailed, StepPreempted
from heddle_core.ids import EngineId
from tests.gateway.served import NO_AIOHTTP, run
from tests.patience import PATIENCE_S

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from aiohttp import web  # noqa: E402

from heddle_gateway.client_step import ClientStep  # noqa: E402
from heddle_gateway.errors import ApiError  # noqa: E402
from heddle_gateway.streams import token_deltas  # noqa: E402
from heddle_runtime.generation import GenerationEnd, Rendered  # noqa: E402
from heddle_runtime.vllm_http.settings import HttpSettings  # noqa: E402
from tests.gateway.test_engine_urls import Registered, registered  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETIONS)


@asynccontextmanager
async def talking(*, servers: int = 2, **options: Any) -> AsyncIterator[Registered]:
    """A gateway on engines that answer chats and completions."""
    async with registered(servers=0, more=servers, **options) as at:
        for server in at.servers:
            server.scripted = False
            status, answer = await at.add(server.url)
            assert status == 200, answer
        await at.until(ready=servers)
        yield at


def asked(path: str, name: str, tokens: int | None, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": name}]} if path == CHAT else {"prompt": name}
    limit = {} if tokens is None else {"max_tokens": tokens}
    return {**said, **limit, "session_id": name, **fields}


def told(path: str, body: dict[str, Any], tokens: int) -> str:
    """The text that an undisturbed engine gives."""
    return text_of(continued(prompt_of(path, body), tokens))


class Stream:
    """The events of one stream so far."""

    def __init__(self) -> None:
        self.status = 0
        self.events: list[Any] = []
        self.done = 0
        self.choices: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        parts = ((c.get("delta") or {}).get("content") or c.get("text") for c in self.choices)
        return "".join(part or "" for part in parts)

    async def read(
        self,
        at: Registered,
        path: str,
        body: dict[str, Any],
        *,
        each: Callable[["Stream"], None] = lambda stream: None,
        **headers: str,
    ) -> "Stream":
        sent = {**body, "stream": True}
        async with at.http.post(at.url + path, json=sent, headers=headers) as answer:
            self.status = answer.status
            if answer.content_type == "application/json":
                self.events.append(await answer.json())
                return self
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    self.done += 1
                elif line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))
                    self.choices += self.events[-1].get("choices", ())
                    each(self)
        return self

    def check(self, path: str, text: str) -> None:
        """Check that it has this text and one of each thing that a stream has."""
        assert self.status == 200
        assert self.text == text
        assert self.done == 1
        finishes = [c["finish_reason"] for c in self.choices if c.get("finish_reason")]
        assert finishes == ["length"]
        roles = [c for c in self.choices if (c.get("delta") or {}).get("role")]
        assert len(roles) == (path == CHAT)
        assert len({event["id"] for event in self.events}) == 1


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", PATHS)
def test_whole_and_streamed_answers_have_the_same_text(path: str):
    async def main() -> None:
        async with talking() as at:
            body = asked(path, "same", 40)
            (await Stream().read(at, path, body)).check(path, told(path, body, 40))
            status, answer = await at("POST", path, body)
            assert status == 200
            choice = answer["choices"][0]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == told(path, body, 40)
            assert answer["usage"]["completion_tokens"] == 40
            assert answer["id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", ["cut_after", "error_after", "end_after"])
def test_streams_that_break_off_go_on_and_each_word_comes_once(path: str, fault: str):
    async def main() -> None:
        async with talking() as at:
            at.servers[0].cuts = 3
            setattr(at.servers[0], fault, 7)
            bodies = [
                asked(path, f"s{n}", 60, stream_options={"include_usage": True}) for n in range(6)
            ]
            made = await asyncio.gather(*(Stream().read(at, path, body) for body in bodies))
            for stream, body in zip(made, bodies, strict=True):
                stream.check(path, told(path, body, 60))
                assert [e["usage"]["completion_tokens"] for e in stream.events[-1:]] == [60]
            assert not at.bench.events(EngineFailed)

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_preempted_stream_has_the_text_of_an_undisturbed_one(path: str):
    async def main() -> None:
        # An engine that does not heed an order in time has its connection closed.
        async with talking(settings=HttpSettings(abort_limit_s=0.1)) as at:
            gateway, preempted = at.bench.gateway, [0]

            def preempt(stream: Stream) -> None:
                if len(stream.choices) in (20, 60):
                    preempted[0] += 1
                    for engine in list(gateway.engines):
                        gateway.driver.abort_running(EngineId(engine))

            body = asked(path, "preempted", 600)
            stream = await Stream().read(at, path, body, each=preempt)
            stream.check(path, told(path, body, 600))
            assert preempted[0] > 0
            assert at.bench.events(StepPreempted)

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}])
def test_a_stream_goes_on_over_the_death_of_its_engine(path: str, sampling: dict[str, Any]):
    async def main() -> None:
        async with talking() as at:

            def kill(stream: Stream) -> None:
                if len(stream.choices) > 20 and not at.bench.events(EngineFailed):
                    for server in at.servers:
                        if server.running:
                            server.die()

            body = asked(path, "outlives", 200, **sampling)
            stream = await Stream().read(at, path, body, each=kill)
            # What is made again is not sent again.
            stream.check(path, told(path, body, 200))
            assert at.bench.events(EngineFailed)

    run(main())


def test_a_completion_without_a_limit_has_16_tokens_as_vllms_has():
    async def main() -> None:
        async with talking() as at:
            body = asked(COMPLETIONS, "short", None)
            status, answer = await at("POST", COMPLETIONS, body)
            assert status == 200
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["choices"][0]["finish_reason"] == "length"
            stream = await Stream().read(at, COMPLETIONS, body)
            stream.check(COMPLETIONS, told(COMPLETIONS, body, 16))

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_engines_refuse_is_refused_in_their_words(path: str, stream: bool):
    async def main() -> None:
        async with talking() as at:
            for _ in range(4):
                body = asked(path, "hot", 8, temperature=-1.0, stream=stream)
                status, refused = await at("POST", path, body)
                error = refused["error"]
                assert (status, error["param"], error["code"]) == (400, "temperature", 400)
                assert error["message"] == "temperature is -1.0, outside of its range"
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_in_a_stream_reaches_each_client_as_it_asked_and_no_engine_leaves(path: str):
    error = {"message": "too odd", "type": "BadRequestError", "param": "prompt", "code": 422}

    async def refuses(request: web.Request, *_: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        data = json.dumps({"error": error}).encode()
        await response.write(b"data: " + data + b"\n\ndata: [DONE]\n\n")
        return response

    async def main() -> None:
        async with talking() as at:
            undisturbed = [server._stream_text for server in at.servers]
            for server in at.servers:
                server._stream_text = refuses  # type: ignore[method-assign]
            for n in range(4):
                body = asked(path, f"odd {n}", 8)
                stream = await Stream().read(at, path, body)
                assert (stream.status, stream.events, stream.done) == (200, [{"error": error}], 1)
                status, refused = await at("POST", path, asked(path, f"odd whole {n}", 8))
                assert (status, refused) == (422, {"error": error})
            for server, before in zip(at.servers, undisturbed, strict=True):
                server._stream_text = before  # type: ignore[method-assign]
            body = asked(path, "after", 20)
            (await Stream().read(at, path, body)).check(path, told(path, body, 20))
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_at_two_engines_is_told_and_a_third_never_sees_it(stream: bool):
    async def main() -> None:
        async with talking(servers=3) as at:
            broken = {"message": "out of order", "type": "InternalServerError", "code": 500}
            tried: list[str] = []

            async def fails(request: web.Request, *_: Any) -> web.Response:
                tried.append(str(request.url.port))
                return web.json_response({"error": broken}, status=500)

            for server in at.servers:
                server._stream_text = fails  # type: ignore[method-assign]
            status, answer = await at("POST", CHAT, asked(CHAT, "kills", 8, stream=stream))
            assert (status, answer["error"]["message"]) == (500, "out of order")
            assert len(tried) == len(set(tried)) == 2
            assert not at.bench.events(EngineFailed)

    run(main())


def test_requests_at_a_busy_engine_are_answered_by_the_other():
    async def main() -> None:
        async with talking() as at:
            at.servers[0].generate_status = 429
            bodies = [asked(CHAT, f"s{n}", 20) for n in range(8)]
            made = await asyncio.gather(*(Stream().read(at, CHAT, body) for body in bodies))
            for stream, body in zip(made, bodies, strict=True):
                stream.check(CHAT, told(CHAT, body, 20))
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_says_how_long_it_waits_gets_an_error_then(stream: bool):
    async def main() -> None:
        async with talking() as at:
            for server in at.servers:
                server.stall_after = 0
            body = {**asked(CHAT, "late", 8), "stream": stream}
            given = {"X-Heddle-Deadline-S": "0.3"}
            async with at.http.post(at.url + CHAT, json=body, headers=given) as answer:
                # A stream that has begun by then has it as an event.
                if answer.content_type == "application/json":
                    assert answer.status == 504
                    error = (await answer.json())["error"]
                else:
                    assert (stream, answer.status) == (True, 200)
                    lines = [line async for line in answer.content if line.startswith(b"data: {")]
                    error = json.loads(lines[-1][6:])["error"]
            assert error["type"] == "timeout_error"
            await until(lambda: not any(server.running for server in at.servers))
            for server in at.servers:
                server.stall_after = None
            given = {"X-Heddle-Deadline-S": str(PATIENCE_S)}
            async with at.http.post(at.url + CHAT, json=asked(CHAT, "b", 8), headers=given) as kept:
                assert kept.status == 200

    run(main())


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_deadline_that_is_none_is_refused(given: str):
    async def main() -> None:
        async with talking(servers=1) as at:
            named = {"X-Heddle-Deadline-S": given}
            async with at.http.post(at.url + CHAT, json=asked(CHAT, "a", 8), headers=named) as said:
                assert said.status == 400
                assert "X-Heddle-Deadline-S" in (await said.json())["error"]["message"]

    run(main())


# -- tokens ---------------------------------------------------------------------------------------


def new_step(tokens: int = 8) -> ClientStep:
    rendered = Rendered(prompt_ids=array("I", [1, 2]))
    return ClientStep("/inference/v1/generate", rendered, max_tokens=tokens, streams=True)


async def read(step: ClientStep, into: list[int]) -> None:
    async for ids in token_deltas(step, keep_alive_s=60.0, coalesce_s=0.0):
        into += ids or ()


def test_tokens_that_are_made_again_alike_come_once():
    async def main() -> None:
        step, got = new_step(), list[int]()
        reading = asyncio.create_task(read(step, got))
        step.take([5, 6, 7])
        await until(lambda: got == [5, 6, 7])
        step.revoke(0)
        for token in (5, 6, 7, 8):
            step.take([token])
            await asyncio.sleep(0.01)
        step.finish(GenerationEnd(finish_reason="stop"))
        await reading
        assert got == [5, 6, 7, 8]

    asyncio.run(main())


@pytest.mark.parametrize("again", [[5, 9], [5]])
def test_tokens_that_are_not_made_again_alike_are_void(again: list[int]):
    async def main() -> None:
        step, got = new_step(), list[int]()
        reading = asyncio.create_task(read(step, got))
        step.take([5, 6])
        await until(lambda: got == [5, 6])
        step.revoke(0)
        step.take(again)
        step.finish(GenerationEnd(finish_reason="stop"))
        with pytest.raises(ApiError, match="cannot be resumed exactly"):
            await reading

    asyncio.run(main())


def test_an_ended_step_is_freed_without_the_collector():
    gc.disable()
    try:
        step = ClientStep(CHAT, Rendered(prompt_ids=array("I", [1])), max_tokens=4, body={})
        step.relayed.take({"choices": [{"token_ids": [2]}]})
        assert step.news == 1
        left = ref(step)
        del step
        assert left() is None
    finally:
        gc.enable()


def test_an_ended_step_keeps_no_image_and_no_request():
    image = {"generate": {"features": {"kwargs_data": "x" * 100}}}
    rendered = Rendered(prompt_ids=array("I", [1]), features=image)
    step = ClientStep(CHAT, rendered, max_tokens=4, body={"messages": []})
    assert step.features == image["generate"]
    step.take([2, 3])
    step.finish(GenerationEnd(finish_reason="stop"))
    assert (step.features, step.relay, len(step.prompt_ids)) == ({}, None, 0)
    assert list(step.output_ids) == [2, 3]
