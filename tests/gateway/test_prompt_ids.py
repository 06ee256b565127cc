"""Prompts that are read from where the last one of their session ended."""

import asyncio
import json
import tracemalloc
from array import array
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from heddle_gateway import prompt_ids
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.openai_api import rendered_ids
from heddle_gateway.prompt_ids import PromptReader, read_fields, split_body
from heddle_runtime.generation import RenderError
from heddle_runtime.vllm_http.endpoint import Answer
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.rendering import HttpRenderer
from tests.gateway.served import NO_AIOHTTP, run, served

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)


def read(raw: bytes, *, has_ids: bool = False) -> dict[str, Any]:
    return read_fields(split_body(raw, has_ids=has_ids), lambda size: None)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), None])
def test_a_prompt_that_grows_is_read_as_one_that_is_read_whole(separators):
    reader = PromptReader()
    ids = [5, 70, 900, 2**32 - 1]
    for longer in ([], [1], [12, 3], [123]):
        ids = ids + longer
        text = json.dumps(ids, separators=separators).encode()
        found = reader.read("s", text)
        assert found is not None
        assert found.prompt_ids == array("I", ids)
        assert found.prompt_json == text
        assert found.prompt_hash.digest() == sha256(array("I", ids)).digest()


@pytest.mark.parametrize("text", [b"[5,70,9001]", b"[5,70]", b"[6,70,900,1]", b"[5,70,90,0]"])
def test_a_prompt_that_is_another_is_read_anew(text: bytes):
    reader = PromptReader()
    reader.read("s", b"[5,70,900]")
    for session in ("s", "t", ""):
        found = reader.read(session, text)
        assert found is not None
        assert found.prompt_ids.tolist() == json.loads(text)
        assert found.prompt_hash.digest() == sha256(found.prompt_ids).digest()


@pytest.mark.parametrize("text", [b"[-1]", b"[1.5]", b"[true]", b"{}", b"[[1]]", b"[4294967296]"])
@pytest.mark.parametrize("before", [b"[1]", b"[7,8]"])
def test_what_is_no_list_of_ids_is_not_sent_on(text: bytes, before: bytes):
    reader = PromptReader()
    reader.read("s", before)
    assert reader.read("s", text) is None
    assert reader.read("s", before[:-1] + b"," + text + b"]") is None


def test_prompts_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(prompt_ids, "KNOWN_BYTES", 100)
    reader = PromptReader()
    for n in range(50):
        assert reader.read(f"s{n}", b"[1,2,3,4,5]") is not None
    assert len(reader._known) == 5
    assert reader._bytes == 100
    for n in range(50):
        assert reader.read("s", b"[" + b"1," * n + b"1]") is not None
    assert reader._bytes == sum(2 * len(text) for text, *_ in reader._known.values()) <= 100


def test_only_content_stays_json_where_there_is_any():
    raw = b'{"token_ids": [1, 2], "model": "m", "tools": [], "sampling_params": {"stop": ["x"]}}'
    body = read(raw)
    assert bytes(body.pop("token_ids")) == b"[1, 2]"
    assert body == {"model": "m", "tools": [], "sampling_params": {"stop": ["x"]}}
    for wrong in (b"", b"[]", b'{"token_ids": [1,]}', b'{"a": "\xff"}'):
        with pytest.raises(ApiError):
            read(wrong, has_ids=True)


@pytest.mark.parametrize(
    "made",
    [
        *([257] * 50_000, [0.5] * 50_000, ["ab"] * 50_000, [[]] * 50_000, [[[1]]] * 20_000),
        *([{}] * 50_000, [{"a": 1}] * 20_000, {f"k{n}": {} for n in range(20_000)}),
        *("\u4e00" * 50_000, "a" * 50_000 + "\U0001f600"),
        [("a" * 30 + "\U0001f600")] * 5_000,
    ],
    ids=range(11),
)
def test_no_field_takes_more_than_is_counted(made: object):
    sent = made if isinstance(made, dict) else {"x": made}
    for text in (json.dumps(sent), json.dumps(sent, ensure_ascii=False)):
        raw, counted = text.encode(), list[int]()
        tracemalloc.start()
        body = read_fields(split_body(raw), counted.append)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert body == sent
        assert taken < len(raw) + counted[0] + 1_000
    raw = json.dumps({"messages": made, **{f"x{n}": n for n in range(9)}}).encode()
    read_fields(split_body(raw), counted.append)
    assert counted[1] == 2_000


MANY = json.dumps([*range(2_000)]).encode()


@pytest.mark.parametrize(
    "text",
    [
        b'{"token_ids": %b, "model": "m"}',
        b'{"model": "m", "token_ids" : %b}',
        b'{"a": {"token_ids": %b}}',
        b'{"a": {"token_ids": %b}, "token_ids": [3]}',
        b'{"token_ids": %b, "token_ids": [3]}',
        b'{"token_ids": %b, "token_\\u0069ds": [3]}',
        b'{"token_ids": [%b, 1]}',
        b'{"a": "token_ids\\":[", "token_ids": %b}',
        b'{"token_ids": "[%b]"}',
        b'{"token_ids": -31415926, "a": %b}',
        b'{"token_ids": {"a": %b}}',
        b'{"b": "\\"token_ids\\":", "a": %b}',
        b'{"token_ids": %b]}',
        b'{"token_ids": %b',
        b'["token_ids", %b]',
        b'{"token_ids": %b, "a": "\xff"}',
    ],
)
def test_a_body_with_a_long_list_is_read_as_one_with_a_short_list(text: bytes):
    raw = text % MANY
    try:
        expected = json.loads(raw)
    except ValueError:
        expected = None
    if not isinstance(expected, dict):
        with pytest.raises(ApiError):
            read(raw, has_ids=True)
        return
    body = read(raw, has_ids=True)
    if isinstance(body.get("token_ids"), msgspec.Raw):
        body["token_ids"] = json.loads(bytes(body["token_ids"]))
    assert body == expected


DEEP = b"[" * 9_999 + b"%b]"


@pytest.mark.parametrize(
    "wrong", [b"[%b,]", b"[%b 1]", b"[%b, 01]", b"[%b, x]", b'[%b, "a]', DEEP], ids=range(6)
)
def test_a_long_list_that_is_no_json_is_refused_as_a_body_that_is_none(wrong: bytes):
    ids = wrong % MANY[1:-1]
    reader = PromptReader()
    assert reader.read("s", MANY) is not None
    for text in (
        b'{"token_ids": %b, "sampling_params": {}}' % ids,
        b'{"sampling_params": {}, "token_ids": %b, "b": 2}' % ids,
    ):
        for session in ("s", ""):
            try:
                body = read(text, has_ids=True)
            except ApiError:
                continue  # the whole body is refused
            with pytest.raises(ApiError, match="not JSON"):
                rendered_ids(body, reader, session)


@pytest.mark.parametrize(
    "ids", [b"[1e999]", b"[1,-1e999]", b'"\xff\xff\xff"', b'["\xff"]', b"[1.0]", b"[[1]]"]
)
def test_ids_that_nobody_can_read_are_refused_as_such(ids: bytes):
    body = read(b'{"sampling_params": {}, "token_ids": %b}' % ids)
    with pytest.raises(ApiError, match="token_ids must be a list"):
        rendered_ids(body, PromptReader(), "s")


def test_prompts_of_ended_sessions_are_dropped_and_those_of_open_ones_are_not():
    async def main() -> None:
        async with served() as bench, aiohttp.ClientSession() as http:
            for session in ("ended", "open"):
                body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
                asked = {"json": body, "headers": {"X-Session-ID": session}}
                async with http.post(f"{bench.url}/inference/v1/generate", **asked) as answer:
                    assert answer.status == 200
            end = f"{bench.url}/finish_session?session_id=ended"
            async with http.post(end) as answer:
                assert answer.status == 200
            reader = bench.front.prompts
            while "ended" in reader._known:
                await asyncio.sleep(0.01)
            assert reader._known.keys() == {"open"}
            assert reader._bytes == 2 * len(reader._known["open"][0]) > 0
            reader.forget("open")
            assert reader.forget("never") == (b"", array("I"), None)
            assert not reader._bytes

    run(main())


class Renders:
    """An endpoint whose renderer has made these ids."""

    ids = b""

    async def call(self, path: str, body: object, *, limit_s: float) -> Answer:
        made = b'{"request_id":"r","sampling_params":{"top_p":0.5},"token_ids":%b}' % self.ids
        return Answer(200, b"[%b]" % made if COMPLETIONS in path else made, {})


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_a_rendered_prompt_that_grows_is_one_that_is_read_whole(endpoint: str):
    async def main() -> None:
        at, reader = Renders(), PromptReader()
        renderer = HttpRenderer(at, generates=True)  # type: ignore[arg-type]
        for ids in ([5, 70], [5, 70, 900], [5, 70, 900, 1, 2], [6, 70]):
            at.ids = json.dumps(ids).encode()
            whole = await renderer.render(endpoint, {})
            found = await renderer.render(endpoint, {}, partial(reader.read, "s"))
            assert found.prompt_ids == whole.prompt_ids == array("I", ids)
            assert found.sampling == whole.sampling == {"top_p": 0.5}
            steps = [ClientStep(endpoint, each, max_tokens=1) for each in (found, whole)]
            assert steps[0].key == steps[1].key
            assert reader._known.keys() == {"s"}
        for wrong, status in ((b"[-1]", 400), (b"{}", 502), (b"[1,", 502), (b"null", 502)):
            at.ids = wrong
            with pytest.raises(RenderError) as caught:
                await renderer.render(endpoint, {}, partial(reader.read, "s"))
            assert caught.value.status == status

    run(main())
