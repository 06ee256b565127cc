"""A `vllm serve` without a model: the calls that engines behind URLs use, and every way to fail.

Tokens are those of `counting_process`: the next depends on the whole context, so that one that is
made twice or left out shows. Chat and completions are those of vLLM 0.32, with prompts and texts as
in `campaigns.faults`. KV is found by prefix, in blocks, and pulled from other such servers of this
process.
"""

import asyncio
import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from campaigns.faults.mock_answers import Answering, derendered
from campaigns.faults.mock_bodies import (
    CHAT,
    COMPLETIONS,
    DEFAULT_TOKENS,
    MockRefusalError,
    Wanted,
    prompt_of,
    rendered,
    text_of,
    wanted,
)
from heddle_runtime.vllm_http.probe import MESSAGES, RESPONSES
from tests.runtime.counting_process import BLOCK, next_token
from tests.runtime.fake_forwarded import answer_of, chat_of, delta_of, last_events, refusal_of

BLOCKS = 2001
TOKEN_S = 0.002
TURNS = 3
"""Of an event loop, from the readiness of a listening socket until its connection is made."""
MODEL = "counting"
PREFIX = "generate-tokens-"
DONE = b"data: [DONE]\n\n"
CONTROL = (
    *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/get_world_size"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/collective_rpc"),
)

_BEGAN_S = itertools.count(1_700_000_000.5 + 1_000.0 * os.getpid())
_EXPORTED: dict[str, tuple[str, list[int]]] = {}
"""Salt and tokens of exported KV, by request."""


@dataclass(slots=True, eq=False)
class _Running:
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)


class FakeVllm:
    """One server; every public attribute is a lie or fault to switch on."""

    max_context: Any = BLOCKS * BLOCK
    max_running: Any = 16
    """Said in dev mode, as `tp`."""
    root = ""
    """Where it found its model; empty: a folder of the model's name."""
    scripted = True
    """Rendering returns two ids and 16 tokens whatever the body says, and derendering one text.
    Otherwise they do what vLLM does."""
    template = True
    """Whether its model has a chat template."""
    iterations = iteration_tokens = 0
    """As `/metrics` counts them: an iteration here has one token, or one prompt."""
    kv_tokens = 0
    """Used beside those of its streams."""
    ranks = 1
    """Data-parallel ranks."""
    adapters: tuple[str, ...] = ("adapter",)
    stall_over = 1 << 30
    """Longer prompts get no token."""

    token_s = TOKEN_S
    """Seconds of a token."""

    def __init__(self, *, model: str = MODEL, key: str = "", kv: bool = True) -> None:
        self.model, self.key, self.kv = model, key, kv
        self.cached_details = self.scale_out = self.dev_mode = self.metrics = True
        self.prefix_caching = True
        self.blocks: Any = BLOCKS
        self.version: Any = "0.32.0"
        self.owner = "vllm"
        self.health = 200
        self.slow_health = False
        self.headers: dict[str, str] = {}
        self.tp: int | None = None
        """Said in dev mode."""
        self.silent = self.broken = False
        """Silent: no call is answered, and no stream goes on. Broken: each gets an error."""
        self.generate_status = 200
        self.cut_after: int | None = None
        """Tokens after which the stream breaks off."""
        self.cuts = 1 << 30
        """How many streams break off."""
        self.cuts_at_end = False
        """Streams break off after the last token, before its count."""
        self.end_after: int | None = None
        """Tokens after which the stream ends, and says nothing of an end."""
        self.error_after: int | None = None
        """Tokens after which an error comes."""
        self.stall_after: int | None = None
        self.aborts_at: int | None = None
        """Tokens after which each generation is aborted, as another client's order would."""
        self.lie = ""
        """What is said wrongly: more, usage, fewer, ids, html, events, reason, late, junk."""
        self.abort_status = 200
        self.lost_aborts = 0
        """Aborts that are answered and not done."""
        self.seen: list[dict[str, Any]] = []
        """Bodies of generations."""
        self.keys, self.traces, self.named = list[str](), list[str](), list[str]()
        """Authorization headers of all calls; trace contexts and ids of those that have one."""
        self.generated, self.streamed = 0, list[tuple[int, list[int]]]()
        """Tokens made; of each stream of ids that has ended, its prompt's length and all tokens."""
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        """Control calls: path, query and body."""
        self.control_status = 200
        self.world_size = 1
        self.frozen = False
        """No stream goes on, until `/resume`."""
        self._cache: dict[tuple[str, tuple[int, ...]], None] = {}
        self._running: dict[str, _Running] = {}
        self._ids, self.began_s = itertools.count(1), next(_BEGAN_S)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self.host, self.port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> int:
        return len(self._running)

    async def start(self) -> "FakeVllm":
        app = web.Application(client_max_size=64 << 20, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post(CHAT, self._text)
        app.router.add_post(COMPLETIONS, self._text)
        for path in (RESPONSES, MESSAGES):
            app.router.add_post(path, self._forwarded)
        app.router.add_post("/v1/{kind:.*}/render", self._render)
        app.router.add_post("/v1/{kind:.*}/derender", self._derender)
        for path in CONTROL:
            app.router.add_route("*", path, self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._runner.server, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def die(self) -> None:
        """Close every connection, as the system does for a process that is killed."""
        assert self._server is not None
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        self._drop(TURNS)

    def _drop(self, turns: int) -> None:
        """Drop connections, also those that are being accepted: a closed server would leak them."""
        assert self._server is not None
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if turns:
            asyncio.get_running_loop().call_soon(self._drop, turns - 1)
        else:
            self._server.close()

    async def close(self) -> None:
        if self._server is not None:
            self.die()
            while self._server.is_serving():
                await asyncio.sleep(0)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- calls ------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        while self.silent:
            await asyncio.sleep(0.02)
        if self.broken:
            error = {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}
            return web.json_response({"error": error}, status=500)
        self.keys.append(request.headers.get("Authorization", ""))
        self.traces += request.headers.getall("traceparent", [])
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and self.key and self.keys[-1] != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == CHAT and not self.template:
            error = {"message": "no chat template", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        response: web.StreamResponse = await handler(request)
        if not response.prepared:
            response.headers.update(self.headers)
        return response

    async def _health(self, request: web.Request) -> web.Response:
        if self.slow_health:
            await asyncio.sleep(60)
        return web.Response(status=self.health)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [
            {"id": name, "owned_by": self.owner, "parent": self.model} for name in self.adapters
        ]
        base = {
            "id": self.model,
            "owned_by": self.owner,
            "root": self.root or f"/models/{self.model}",
            "parent": None,
            "max_model_len": self.max_context,
        }
        return web.json_response({"object": "list", "data": [*adapters, base]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(text="# nothing\n")
        held = self.kv_tokens + sum(len(each.tokens) for each in self._running.values())
        usage = held / self.ranks / ((BLOCKS - 1) * BLOCK)
        caching = str(self.prefix_caching)
        cache = (
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.blocks}",'
            f'enable_prefix_caching="{caching}",odd="a \\" b"}} 1.0\n'
        )
        return web.Response(
            text=(
                "# TYPE vllm:num_requests_running gauge\n"
                f'vllm:num_requests_running{{engine="0"}} {self.running}.0\n'
                'vllm:num_requests_waiting{engine="0"} 0.0\n'
                'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0\n'
                f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
                'vllm:num_preemptions_total{engine="0"} 0.0\n'
                f'vllm:num_preemptions_created{{engine="0"}} {self.began_s}\n'
                "process_start_time_seconds 1.7e+09\n"
                "# TYPE vllm:iteration_tokens_total histogram\n"
                f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {self.iterations}.0\n'
                f'vllm:iteration_tokens_total_count{{engine="0"}} {self.iterations}.0\n'
                f'vllm:iteration_tokens_total_sum{{engine="0"}} {self.iteration_tokens}.0\n'
                'vllm:iteration_tokens_total_created{engine="0"} 1.7e+09\n'
                f"{cache * self.ranks}"
            )
        )

    async def _is_paused(self, request: web.Request) -> web.Response:
        if not self.dev_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"is_paused": False})

    async def _info(self, request: web.Request) -> web.Response:
        config: dict[str, Any] = {
            "scheduler_config": {"policy": "priority", "max_num_seqs": self.max_running}
        }
        if self.tp is not None:
            config["parallel_config"] = {"tensor_parallel_size": self.tp}
        return web.json_response({"vllm_config": config})

    async def _control(self, request: web.Request) -> web.Response:
        if not self.dev_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, dict(request.query), body))
        if self.control_status != 200:
            error = {"message": "the workers are busy", "code": self.control_status}
            return web.json_response({"error": error}, status=self.control_status)
        if request.path in ("/pause", "/resume"):
            self.frozen = request.path == "/pause"
        return web.json_response({"world_size": self.world_size} if body is None else {})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.lost_aborts:
            self.lost_aborts -= 1
        elif self.abort_status == 200:
            for name in body["request_ids"]:
                if name in self._running:
                    self._running[name].aborted = True
        return web.Response(status=self.abort_status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            error = {"message": "Scale-out endpoints are disabled.", "code": 403}
            return web.json_response({"error": error}, status=403)
        body = await request.json()
        self.seen.append(body)
        sampling = body["sampling_params"]
        if self.generate_status != 200:
            error = {"message": f"temperature of {self.generate_status}"}
            return web.json_response({"error": error}, status=self.generate_status)
        if not body.get("stream"):
            return await self._one_token(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        name = PREFIX + body.get("request_id", f"r{next(self._ids)}")
        running = self._running[name] = _Running(tokens=list(body["token_ids"]))
        try:
            await self._stream(request, response, body, running, sampling["max_tokens"])
        finally:
            del self._running[name]
            self.streamed.append((len(body["token_ids"]), running.tokens))
            self._remember(body.get("cache_salt", ""), running.tokens[:-1])
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        running: _Running,
        count: int,
    ) -> None:
        cached = self._found(body.get("cache_salt", ""), running.tokens)
        prompt = len(running.tokens)
        interval = body["sampling_params"].get("stream_interval", 1)
        stops = body["sampling_params"].get("stop_token_ids") or ()
        made: list[int] = []
        finish = None
        await response.write(b": keep-alive\n\n")
        while finish is None:
            at = len(running.tokens) - prompt
            if self.cuts > 0 and at == self.cut_after:
                self.cuts -= 1
                self._cut(request)
            if at == self.end_after:
                return
            if at == self.error_after:
                await _send(response, {"error": {"message": "the core died", "code": 500}})
                finish = "error"
                return
            while self._stands_still(running, at):
                await asyncio.sleep(0.02)
            await asyncio.sleep(self.token_s)
            if running.aborted or at == self.aborts_at:
                finish = "abort"
            else:
                running.tokens.append(next_token(running.tokens, MODEL))
                made.append(running.tokens[-1])
                self.generated += 1
                self._computed(1 + (prompt if at == 0 else 0))
                if running.tokens[-1] in stops:
                    finish = "stop"
                elif at + 1 == count:
                    finish = "length"
            if finish or at == 0 or len(made) >= interval:
                await _send(response, self._chunk(made, finish, body))
                made = []
        if self.cuts_at_end:
            self._cut(request)
        if self.lie == "late":
            await _send(response, self._chunk([300], None, body))
        total = len(running.tokens) - prompt
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": total}
        if self.lie == "usage":
            usage["completion_tokens"] += 3
        if self.cached_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(DONE)

    def _stands_still(self, running: _Running, at: int) -> bool:
        stalls = at == self.stall_after or len(running.tokens) > self.stall_over + at
        return self.silent or self.frozen or (stalls and not running.aborted)

    def _computed(self, tokens: int) -> None:
        self.iterations += 1
        self.iteration_tokens += tokens

    # -- chat and completions ----------------------------------------------------------------------

    async def _text(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        if self.generate_status != 200:
            error = {"message": f"temperature of {self.generate_status}"}
            return web.json_response({"error": error}, status=self.generate_status)
        try:
            if self._names_no_model(body):
                raise MockRefusalError(404, "no such model")
            want = self._wanted(request.path, request, body)
        except MockRefusalError as refused:
            return web.json_response(refused.body, status=refused.status)
        salt = body.get("cache_salt") or ""
        cached = self._found(salt, want.ids) if self.cached_details else None
        answering = Answering(want, model=self.model, cached=cached)
        running = self._running[want.request_id] = _Running(tokens=list(want.ids))
        try:
            if want.stream:
                return await self._stream_text(request, answering, running, want)
            while answering.finish is None:
                await self._next(answering, running)
            return web.json_response(answering.whole())
        finally:
            del self._running[want.request_id]
            self._remember(salt, running.tokens[:-1])

    def _wanted(self, path: str, request: web.Request, body: dict[str, Any]) -> Wanted:
        name = request.headers.get("X-Request-Id") or body.get("request_id")
        context = self.max_context if isinstance(self.max_context, int) else BLOCKS * BLOCK
        name = name or f"r{next(self._ids)}"
        return wanted(path, body, context_tokens=context, request_id=name)

    def _names_no_model(self, body: dict[str, Any]) -> bool:
        return body.get("model", self.model) not in (self.model, *self.adapters)

    async def _forwarded(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.named += request.headers.getall("X-Request-Id", [])
        if self._names_no_model(body):
            return web.json_response(refusal_of(request.path, "no such model", 404), status=404)
        if body.get("temperature", 0) > 2:
            return web.json_response(refusal_of(request.path, "too hot", 400), status=400)
        chat, made = chat_of(request.path, body), list[int]()
        prompt = prompt_of(CHAT, chat)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        streams = bool(body.get("stream"))
        while len(made) < chat["max_tokens"]:
            if self.cuts > 0 and len(made) == self.cut_after:
                self.cuts -= 1
                self._cut(request)
            await asyncio.sleep(TOKEN_S)
            made.append(next_token([*prompt, *made], MODEL))
            self._computed(1)
            if streams:
                if not response.prepared:
                    await response.prepare(request)
                await _send(response, delta_of(request.path, text_of(made[-1:])))
        whole = answer_of(request.path, body, text_of(made), len(prompt), len(made))
        if not streams:
            return web.json_response(whole)
        for event in last_events(request.path, whole):
            await _send(response, event)
        return response

    async def _next(self, answering: Answering, running: _Running) -> None:
        """Make one token, or end by an abort."""
        at = len(answering.made)
        while self._stands_still(running, at):
            await asyncio.sleep(0.02)
        await asyncio.sleep(TOKEN_S)
        if running.aborted or at == self.aborts_at:
            answering.abort()
            return
        running.tokens.append(next_token(running.tokens, MODEL))
        answering.take(running.tokens[-1])
        self.generated += 1
        self._computed(1 + (len(running.tokens) - 1 if at == 0 else 0))

    async def _stream_text(
        self, request: web.Request, answering: Answering, running: _Running, want: Wanted
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while answering.finish is None:
            at = len(answering.made)
            if self.cuts > 0 and at == self.cut_after:
                self.cuts -= 1
                self._cut(request)
            if at == self.end_after:
                return response
            if at == self.error_after:
                await _send(response, {"error": {"message": "the core died", "code": 500}})
                await response.write(DONE)
                return response
            await self._next(answering, running)
            if not answering.finish and sent and len(answering.made) - sent < want.interval:
                continue
            if not sent and (head := answering.first()) is not None:
                await _send(response, head)
            await _send(response, answering.chunk(sent))
            sent = len(answering.made)
        if self.cuts_at_end:
            self._cut(request)
        if (counts := answering.last()) is not None:
            await _send(response, counts)
        await response.write(DONE)
        return response

    def _cut(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    def _chunk(self, made: list[int], finish: str | None, body: dict[str, Any]) -> Any:
        tokens: Any = list(made)
        match self.lie:
            case "more" if finish:
                tokens += [300, 301]
            case "fewer" if finish:
                tokens = tokens[:-1]
            case "ids":
                tokens = [-5 for _ in tokens]
            case "html":
                return "<html>"
            case "events":
                return "x" * (17 << 20)
            case "reason" if finish:
                finish = "because"
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": finish,
            "stop_reason": made[-1] if made and finish == "stop" else None,
        }
        if body["sampling_params"].get("logprobs") is not None:
            choice["logprobs"] = {
                "content": [
                    {"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []}
                    for token in (tokens if self.lie != "logprobs" else tokens[:-1])
                ]
            }
        if self.lie == "junk":
            choice["logprobs"] = {"content": [{}]}
        if finish:
            choice["weight_versions"] = [{"version": "v7", "start": 0, "end": 1}]
        return {"request_id": "x", "choices": [choice]}

    async def _one_token(self, body: dict[str, Any]) -> web.Response:
        context, salt = body["token_ids"], body.get("cache_salt", "")
        extra = body["sampling_params"].get("extra_args") or {}
        transfer = extra.get("kv_transfer_params", {})
        await asyncio.sleep(TOKEN_S)
        self._computed(1 + len(context))
        finish, params = "length", None
        if "file" in transfer:
            exported = _EXPORTED.get(transfer["file"])
            if exported is None:
                return web.json_response({"error": {"message": "no such KV"}}, status=500)
            self._remember(salt, exported[1])
        elif transfer.get("do_remote_decode") and self.kv:
            name = f"{self.port}-{next(self._ids)}"
            _EXPORTED[name] = salt, list(context)
            params = {"file": name}
        self._remember(salt, context)
        choice = {"index": 0, "token_ids": [300], "finish_reason": finish}
        usage: dict[str, Any] = {"prompt_tokens": len(context), "completion_tokens": 1}
        if self.cached_details:
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        return web.json_response(
            {"choices": [choice], "usage": usage, "kv_transfer_params": params}
        )

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._names_no_model(body):
            error = {"message": "no such model", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        chat = "chat" in request.path
        if self.scripted:
            made = _scripted(body)
        else:
            try:
                if forwarded := request.path.startswith((RESPONSES, MESSAGES)):
                    body = chat_of(request.path.removesuffix("/render"), body)
                of_chat = chat or forwarded
                want = self._wanted(CHAT if of_chat else COMPLETIONS, request, body)
            except MockRefusalError as refused:
                return web.json_response(refused.body, status=refused.status)
            made = rendered(body, want)
        return web.json_response([made] if "/completions" in request.path and not chat else made)

    async def _derender(self, request: web.Request) -> web.Response:
        self.seen.append(body := await request.json())
        if not self.scripted:
            path = CHAT if "chat" in request.path else COMPLETIONS
            try:
                return web.json_response(derendered(path, body, model=self.model))
            except MockRefusalError as refused:
                return web.json_response(refused.body, status=refused.status)
        text = "one STOP two"
        if "chat" in request.path:
            (choice,) = body["generate_response"]["choices"]
            made: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            (choice,) = body["generate_responses"][0]["choices"]
            made = {"text": text}
        made |= {"index": 0, "finish_reason": choice.get("finish_reason")}
        return web.json_response({"id": "x", "choices": [made], "usage": {"prompt_tokens": 2}})

    # -- KV ---------------------------------------------------------------------------------------

    def _remember(self, salt: str, tokens: list[int]) -> None:
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self._cache[salt, tuple(tokens[:end])] = None

    def _found(self, salt: str, context: list[int]) -> int:
        found = 0
        for end in range(BLOCK, len(context), BLOCK):
            if (salt, tuple(context[:end])) not in self._cache:
                break
            found = end
        return found


async def _send(response: web.StreamResponse, event: Any) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _scripted(body: dict[str, Any]) -> dict[str, Any]:
    """What rendering returns for any prompt."""
    return {
        "request_id": "r-1",
        "token_ids": [300, 301],
        "sampling_params": {
            "temperature": body.get("temperature", 1.0),
            "max_tokens": body.get("max_tokens", DEFAULT_TOKENS),
            "output_kind": 2,
            "skip_clone": True,
            **({"n": body["n"]} if "n" in body else {}),
            **({"stop": body["stop"]} if "stop" in body else {}),
        },
        "reasoning_ended": True,
        "cache_salt": body.get("cache_salt"),
    }
