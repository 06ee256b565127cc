"""Rendering by calls: what is refused, what is completed, and what a broken renderer does."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from heddle_runtime.generation import GenerationEnd, Rendered, RenderError
from heddle_runtime.process.child import group_members
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Answer, Endpoint
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.render_process import RenderProcess, RenderProcessError
from heddle_runtime.vllm_http.rendering import HttpRenderer
from tests.runtime.fake_vllm import MODEL, FakeVllm
from tests.runtime.vllm_serve import CHAT_TEMPLATE, needs_serve

BODY: dict[str, Any] = {"model": MODEL, "messages": [], "stream": True, "stream_options": {}}
STOPPED = GenerationEnd(finish_reason="stop", stop_reason="STOP")


@asynccontextmanager
async def renderer() -> AsyncIterator[tuple[HttpRenderer, FakeVllm]]:
    server = await FakeVllm().start()
    try:
        async with Connections() as session:
            yield HttpRenderer(Endpoint(server.url, session), limit_s=1.0), server
    finally:
        await server.close()


def test_a_body_becomes_tokens_and_what_a_step_needs():
    async def main() -> None:
        async with renderer() as (made, _):
            body = BODY | {"temperature": 0.5, "stop": ["x"], "cache_salt": "s"}
            rendered = await made.render(CHAT, body)
            assert rendered.prompt_ids == array("I", [300, 301])
            assert rendered.sampling == {"temperature": 0.5, "stop": ["x"]}
            assert rendered.max_tokens == 16
            assert rendered.features == {
                "request_id": "r-1",
                "cache_salt": "s",
                "generate": {"reasoning_ended": True},
            }

    asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "param"),
    [
        (CHAT, BODY | {"model": "other"}, 404, None),
    ],
)
def test_what_cannot_be_one_step_is_refused(endpoint, body, status, param):
    async def main() -> None:
        async with renderer() as (made, _):
            with pytest.raises(RenderError) as caught:
                await made.render(endpoint, body)
            assert caught.value.status == status
            assert caught.value.error.get("param") == param
            assert caught.value.error["message"]

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_a_response_has_no_stop_string_and_the_ids_that_were_asked_for(endpoint):
    async def main() -> None:
        async with renderer() as (made, server):
            body = {"model": MODEL, "prompt": [1, 2], "return_token_ids": True}
            rendered = await made.render(endpoint, body)
            response = await made.derender(endpoint, body, rendered, [300, 301], STOPPED)
            (choice,) = response["choices"]
            text = choice["message"]["content"] if endpoint == CHAT else choice["text"]
            assert text == "one "
            place = response if endpoint == CHAT else choice
            if endpoint == COMPLETIONS:
                assert choice["token_ids"] == [300, 301]
            assert place["prompt_token_ids"] == [300, 301]
            sent = server.seen[-1]
            assert "stream" not in sent.get("chat_request", sent.get("completion_request"))
            kept = body | {"include_stop_str_in_output": True}
            response = await made.derender(endpoint, kept, rendered, [300], STOPPED)
            assert "STOP" in str(response)

    asyncio.run(main())


class Derenders:
    """An endpoint with a tokenizer; its answers have the text of their tokens twice."""

    def __init__(self, *pieces: bytes, leading: str = "") -> None:
        """`leading` comes before each text that it tokenizes, as SentencePiece's space does."""
        self.pieces, self.leading = pieces, leading
        self.generated: dict[str, Any] = {}

    def text(self, ids: list[int]) -> str:
        pieces = (self.pieces[n] if n < 1000 else chr(n - 1000).encode() for n in ids)
        return b"".join(pieces).decode(errors="replace")

    async def call(self, path: str, body: Any, *, limit_s: float) -> Answer:
        if path == "/detokenize":
            made: dict[str, Any] = {"prompt": self.text(body["tokens"])}
        elif path == "/tokenize":
            assert not body["add_special_tokens"]
            made = {"tokens": [1000 + ord(c) for c in self.leading + body["prompt"]]}
        else:
            (choice,) = body["generate_response"]["choices"]
            self.generated = choice
            text = self.text(choice["token_ids"])
            made = {"choices": [{"message": {"content": text, "reasoning": text}}]}
        return Answer(200, json.dumps(made).encode(), {})


CALL = (b"<call>", b"get", b"_wea", b"ther!x")


@pytest.mark.parametrize(
    ("pieces", "stop", "keeps", "text"),
    [
        (CALL, "ther", False, "<call>get_wea"),
        (CALL, "weather", False, "<call>get_"),
        (CALL, "weather", True, "<call>get_weather"),
        (CALL, "!x", True, "<call>get_weather!x"),
        ((b"a", b"b", b"aa"), "a", False, "ab"),
        ((b"a", b"\xe6\x97", b"\xa5b"), "a\u65e5", True, "a\u65e5"),
        ((b"a", b"\xe6\x97", b"\xa5b"), "\u65e5", False, "a"),
    ],
)
def test_parsers_read_the_text_until_the_stop_string(pieces, stop, keeps, text):
    message = message_of(Derenders(*pieces), stop, keeps=keeps)
    assert (message["content"], message["reasoning"]) == (text, text)


def test_where_the_rest_of_a_token_cannot_be_tokenized_the_content_is_cut():
    assert message_of(Derenders(*CALL, leading=" "), "weather")["content"] == "<call>get_"


def test_parsers_are_told_why_a_generation_ended():
    endpoint = Derenders(b"a", b"b")
    made = HttpRenderer(endpoint)  # type: ignore[arg-type]
    end = GenerationEnd(finish_reason="stop", stop_reason=1)
    rendered = Rendered(prompt_ids=array("I", [1]))
    asyncio.run(made.derender(CHAT, {"include_stop_str_in_output": True}, rendered, [0, 1], end))
    assert endpoint.generated == {
        "index": 0,
        "token_ids": [0, 1],
        "finish_reason": "stop",
        "stop_reason": 1,
        "logprobs": None,
    }


def message_of(endpoint: Derenders, stop: str, *, keeps: bool = False) -> dict[str, Any]:
    """The message that is made of all pieces where a stop string ends them."""
    made = HttpRenderer(endpoint)  # type: ignore[arg-type]
    body = {"include_stop_str_in_output": keeps}
    end = GenerationEnd(finish_reason="stop", stop_reason=stop)
    ids = list(range(len(endpoint.pieces)))
    rendered = Rendered(prompt_ids=array("I", [1]))
    response = asyncio.run(made.derender(CHAT, body, rendered, ids, end))
    message: dict[str, Any] = response["choices"][0]["message"]
    return message


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_a_step_without_tokens_has_a_response_too(endpoint):
    async def main() -> None:
        async with renderer() as (made, _):
            rendered = await made.render(endpoint, {"model": MODEL, "prompt": [1, 2]})
            end = GenerationEnd(finish_reason="abort")
            response = await made.derender(endpoint, {"model": MODEL}, rendered, [], end)
            assert response["choices"][0]["finish_reason"] == "abort"
            assert response["usage"] == {
                "prompt_tokens": 2,
                "completion_tokens": 0,
                "total_tokens": 2,
            }

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("die", 503, "api_error"),
        ("silent", 503, "api_error"),
        ("key", 502, "api_error"),
        ("broken", 502, "InternalServerError"),
    ],
)
def test_a_renderer_that_does_not_work_is_not_the_fault_of_the_client(fault, status, kind):
    async def main() -> None:
        async with renderer() as (made, server):
            if fault == "die":
                server.die()
            elif fault == "key":
                server.key = "secret"
            else:
                setattr(server, fault, True)
            with pytest.raises(RenderError) as caught:
                await made.render(CHAT, BODY)
            server.silent = False
            assert caught.value.status == status
            assert caught.value.error["type"] == kind

    asyncio.run(main())


@needs_serve[0]
@needs_serve[1]
@needs_serve[2]
def test_a_process_of_ours_renders_and_ends_with_nothing_left(tmp_path: Path):
    async def main() -> None:
        model = make_tiny_model(tmp_path / "model", seed=1)
        template = tmp_path / "chat.jinja"
        template.write_text(CHAT_TEMPLATE)
        process = RenderProcess(
            str(model),
            log=tmp_path / "render.log",
            max_context=512,
            model_name="tiny",
            options=("--chat-template", str(template)),
        )
        made = await process.start()
        try:
            message = {"role": "user", "content": "hi"}
            body = {"model": "tiny", "messages": [message], "max_tokens": 7}
            rendered = await made.render(CHAT, body)
            ids = rendered.prompt_ids.tolist()
            tokens = await made.call(
                "/tokenize", {"model": "tiny", "prompt": "<user>hi<assistant>"}
            )
            assert ids == tokens["tokens"]
            assert rendered.max_tokens == 7
            end = GenerationEnd(finish_reason="length")
            response = await made.derender(CHAT, body, rendered, ids[:7], end)
            assert response["choices"][0]["message"]["content"] == "<user>h"
            assert response["usage"]["prompt_tokens"] == len(ids)
            with pytest.raises(RenderError, match="maximum context length is 512"):
                await made.render(CHAT, body | {"messages": [message | {"content": "x" * 600}]})
        finally:
            await process.close()
        assert process.pid is not None
        assert group_members(process.pid) == []

    asyncio.run(main())


@needs_serve[0]
@needs_serve[1]
@needs_serve[2]
def test_a_process_that_cannot_render_says_why_and_leaves_nothing(tmp_path: Path):
    async def main() -> None:
        process = RenderProcess(str(tmp_path / "no model"), log=tmp_path / "render.log")
        with pytest.raises(RenderProcessError, match=r"render\.log"):
            await process.start()
        assert process.pid is not None
        assert group_members(process.pid) == []

    asyncio.run(main())
