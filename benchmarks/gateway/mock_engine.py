"""A vLLM server without a model, fast enough that a router in front of it is the limit.

    PYTHONPATH=benchmarks python -m gateway.mock_engine PORT

It answers at once. `POST /mock/hold` makes it hold generations until `POST /mock/now`, and after
`POST /mock/paced?interval_s=0.4&events=10` a stream has so many events, so far apart.
`GET /mock/held` says how many generations it holds. HTTP is parsed as far as load and routers of
the benchmark need it. Answers have the fields of vLLM 0.32 and SGLang.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from gateway.prompts import OUTPUT_IDS, TEXT_TOKENS, ids_json, session_and_step

CONTEXT_TOKENS, BLOCK_TOKENS, BLOCKS = 131_072, 16, 10_000_000
_IDS = ",".join(map(str, OUTPUT_IDS)).encode()
_N = len(OUTPUT_IDS)
_USAGE = b'{"prompt_tokens":512,"completion_tokens":%d,"total_tokens":%d}' % (_N, 512 + _N)
_CHAT = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":'
    b'0,"message":{"role":"assistant","content":"one two three four five six seven eight"},'
    b'"finish_reason":"stop"}],"usage":%b}' % _USAGE
)
_COMPLETION = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"mock","choices":[{"index":0,'
    b'"text":"one two three","finish_reason":"stop"}],"usage":%b}' % _USAGE
)
_SGLANG = b'{"text":"","output_ids":[%b],"meta_info":{"id":"1","completion_tokens":8}}' % _IDS
_WHOLE_IDS = (
    b'{"request_id":"1","choices":[{"index":0,"token_ids":[%b],"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":1,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}'
    % (_IDS, _N)
)
_ONE_ID = _WHOLE_IDS.replace(_IDS, b"700").replace(
    b'"completion_tokens":8', b'"completion_tokens":1'
)
_MODELS = (
    b'{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"vllm","root":'
    b'"/models/mock","parent":null,"max_model_len":%d}]}' % CONTEXT_TOKENS
)
_METRICS = (
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
    b'vllm:num_preemptions_total 0.0\nvllm:cache_config_info{block_size="%d",num_gpu_blocks="%d",'
    b'enable_prefix_caching="True"} 1.0\n' % (BLOCK_TOKENS, BLOCKS)
)
_RENDERED = (
    b'{"request_id":"1","token_ids":%b,"sampling_params":{"temperature":1.0,"max_tokens":16}}'
)
_PLAIN: dict[bytes, bytes] = {
    b"/health": b"{}",
    b"/health_generate": b"{}",
    b"/version": b'{"version":"0.32.0"}',
    b"/v1/models": _MODELS,
    b"/metrics": _METRICS,
    b"/get_model_info": b'{"model_path":"mock","tokenizer_path":"","is_generation":true}',
    b"/get_server_info": b'{"model_id":"mock","served_model_name":"mock","dp_size":1}',
    b"/v1/chat/completions/derender": _CHAT,
    b"/inference/v1/abort_requests": b"{}",
}
_PLAIN |= {b"/model_info": _PLAIN[b"/get_model_info"], b"/server_info": _PLAIN[b"/get_server_info"]}
_WHOLE: dict[bytes, bytes] = {
    b"/v1/chat/completions": _CHAT,
    b"/v1/completions": _COMPLETION,
    b"/generate": _SGLANG,
    b"/inference/v1/generate": _WHOLE_IDS,
}
_END = b"data: [DONE]\n\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _ids_event(ids: bytes, finish: bytes) -> bytes:
    return (
        b'data: {"request_id":"1","choices":[{"index":0,"token_ids":[%b],"finish_reason":%b}]}\n\n'
        % (ids, finish)
    )


def _text_event(text: bytes, finish: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"mock",'
        b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}\n\n' % (text, finish)
    )


def _usage_event(tokens: int) -> bytes:
    return (
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n' % tokens
    )


_EVENT = {True: _ids_event(_IDS, b"null"), False: _text_event(b"one two three four", b"null")}
"""Of a paced stream, by whether it is of token ids."""
_LAST = {True: _ids_event(b"", b'"stop"'), False: _text_event(b"", b'"stop"')}
_IDS_AT_ONCE = _STREAM_HEAD + _chunk(_ids_event(_IDS, b'"stop"') + _usage_event(_N) + _END)
_IDS_AT_ONCE += _chunk(b"")
_TEXT_AT_ONCE = _STREAM_HEAD + _chunk(_text_event(b"one two", b'"stop"') + _END) + _chunk(b"")


class MockEngine:
    """What the connections of an engine share."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []
        """Answers that wait for `/mock/now`."""
        self.connections: set[asyncio.Transport] = set()
        self.holds = False
        self.interval_s, self.events = 0.0, 0
        """Of paced streams; 0: they come at once."""
        self.draw = random.Random(0)

    def control(self, target: str) -> bytes:
        """Change what generations do."""
        url = urlsplit(target)
        order, options = url.path.rpartition("/")[2], dict(parse_qsl(url.query))
        if order == "held":
            return b"%d" % len(self.held)
        self.holds = order == "hold"
        self.interval_s = float(options.get("interval_s", 0.0)) if order == "paced" else 0.0
        self.events = int(options.get("events", 0))
        if not self.holds:
            held, self.held = self.held, []
            for send in held:
                send()
        return b"{}"


class _Connection(asyncio.Protocol):
    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._engine.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._engine.connections.discard(self._transport)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            found = head.lower().find(b"\r\ncontent-length:")
            length = int(head[found + 17 :].split(b"\r\n", 1)[0]) if found >= 0 else 0
            if found < 0 and b"chunked" in head.lower():
                close = self._data.find(b"\r\n0\r\n\r\n", end)
                if close < 0:
                    return
                body, after = bytes(self._data[end + 4 : close]), close + 7
            else:
                after = end + 4 + length
                if len(self._data) < after:
                    return
                body = bytes(self._data[end + 4 : after])
            del self._data[:after]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, target: bytes, body: bytes) -> None:
        path = target.partition(b"?")[0]
        engine = self._engine
        if (whole := _WHOLE.get(path)) is not None:
            if engine.holds:
                engine.held.append(lambda: self._generate(path, whole, body))
            else:
                self._generate(path, whole, body)
        elif path == b"/v1/chat/completions/render":
            session, step = session_and_step(body)
            ids = ids_json(session, step, first_tokens=TEXT_TOKENS)
            self._send(_answer(_RENDERED % ids))
        elif path in _PLAIN:
            self._send(_answer(_PLAIN[path]))
        elif path.startswith(b"/mock/"):
            self._send(_answer(engine.control(target.decode())))
        else:
            self._send(_answer(b'{"detail":"Not Found"}', b"404 Not Found"))

    def _generate(self, path: bytes, whole: bytes, body: bytes) -> None:
        # Near its ends: prompts are long.
        ends = body[:400] + body[-400:]
        ids = path.startswith(b"/inference")
        if b'"max_tokens":1,' in ends and ids:
            self._send(_answer(_ONE_ID))
        elif b'"stream":true' not in ends and b'"stream": true' not in ends:
            self._send(_answer(whole))
        elif self._engine.interval_s:
            self._send(_STREAM_HEAD)
            first_s = self._engine.draw.random() * self._engine.interval_s
            loop = asyncio.get_running_loop()
            loop.call_later(first_s, self._next_event, ids, self._engine.events, loop.time())
        else:
            self._send(_IDS_AT_ONCE if ids else _TEXT_AT_ONCE)

    def _next_event(self, ids: bool, left: int, began_s: float) -> None:
        if self._transport is None:
            return
        if left and self._engine.interval_s:
            self._send(_chunk(_EVENT[ids]))
            loop = asyncio.get_running_loop()
            loop.call_later(self._engine.interval_s, self._next_event, ids, left - 1, began_s)
            return
        count = _usage_event(_N * (self._engine.events - left)) if ids and not left else b""
        self._send(_chunk(_LAST[ids] + count + _END) + _chunk(b""))

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def listen(engine: MockEngine, port: int) -> asyncio.Server:
    """Return a server of an engine; 0 is a free port."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Connection(engine), "127.0.0.1", port, backlog=16_384)


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    server = await listen(MockEngine(), port)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(serve(int(sys.argv[1])))
