"""A vLLM server without a model, as a process: each token is a function of its context.

    python -m experiments.real_cpu.token_engine PORT FILE

Tokens come at `TOKEN_S` each, so that there are always some under way. FILE gets a line for each
event that is sent: first id of the context, position of the first token, number of tokens. So what
was sent is still there after a kill -9.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any
from zlib import crc32

from aiohttp import web

TOKEN_S = 0.004
CONTEXT_TOKENS, BLOCK_TOKENS, BLOCKS = 32_768, 16, 100_000
PREFIX = "generate-tokens-"


def next_token(first: int, position: int) -> int:
    """Return the token at a position of a context, by the context's first id."""
    return 16 + crc32(b"%d" % position, first) % 40_000


class TokenEngine:
    def __init__(self, record: int) -> None:
        """`record` is the file descriptor of FILE."""
        self._record = record
        self._aborted: set[str] = set()

    def application(self) -> web.Application:
        """Return its paths."""
        app = web.Application(client_max_size=64 << 20)
        model = {
            "id": "tokens",
            "owned_by": "vllm",
            "root": "/models/tokens",
            "max_model_len": CONTEXT_TOKENS,
        }
        metrics = (
            "vllm:num_requests_running 0.0\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{BLOCKS}",'
            'enable_prefix_caching="True"} 1.0\n'
        )

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": "0.32.0"})

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [model]})

        async def counters(request: web.Request) -> web.Response:
            return web.Response(text=metrics)

        app.router.add_get("/health", health)
        app.router.add_get("/version", version)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/metrics", counters)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.update((await request.json())["request_ids"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        context, wanted = body["token_ids"], body["sampling_params"]["max_tokens"]
        if not body.get("stream"):
            choice = {
                "token_ids": [next_token(context[0], len(context))],
                "finish_reason": "length",
            }
            return web.json_response({"choices": [choice], "usage": _usage(len(context), 1)})
        name = PREFIX + body["request_id"]
        interval = body["sampling_params"]["stream_interval"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        position, made = len(context), 0
        with suppress(ConnectionError):
            while made < wanted and name not in self._aborted:
                count = min(interval, wanted - made)
                await asyncio.sleep(count * TOKEN_S)
                ids = [next_token(context[0], position + made + n) for n in range(count)]
                os.write(self._record, f"{context[0]} {position + made} {count}\n".encode())
                made += count
                end = "length" if made == wanted else None
                await _send(response, {"choices": [_choice(ids, end)]})
            if made < wanted:
                await _send(response, {"choices": [_choice([], "abort")]})
            await _send(response, {"choices": [], "usage": _usage(len(context), made)})
            await response.write(b"data: [DONE]\n\n")
        self._aborted.discard(name)
        return response


def _choice(ids: list[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "token_ids": ids, "finish_reason": finish}


def _usage(prompt: int, made: int) -> dict[str, Any]:
    cached = {"cached_tokens": 0}
    return {"prompt_tokens": prompt, "completion_tokens": made, "prompt_tokens_details": cached}


async def _send(response: web.StreamResponse, event: Any) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


if __name__ == "__main__":
    descriptor = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    web.run_app(
        TokenEngine(descriptor).application(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        print=None,
        handle_signals=False,
    )
