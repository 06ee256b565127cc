"""Tokens for engines that only keep time, and text for these tokens. No model runs.

A trajectory's token at a position of its context depends on nothing else, so that a generation that
was interrupted goes on as it would have. Text has one token for each word.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final
from zlib import crc32

import msgspec

from heddle_gateway.agent import GatewayAgent
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import NOT_FOUND
from heddle_gateway.openai_api import counted_usage
from heddle_gateway.prompt_ids import read_json
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.generation import GenerationEnd, Refusal, Rendered, RenderError
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS

END: Final = 0
"""Token that ends a message."""
_ROLES: Final = {"system": 1, "user": 2, "assistant": 3, "tool": 4, "developer": 5}
_FIRST_WORD: Final = 16
VOCABULARY: Final = 50_000
CONTEXT_TOKENS: Final = 32_768
"""Of engines that say no limit of their own."""


class Replies:
    """Messages that take the place of made-up words: reply n of a trajectory is message n.

    After the last one, it is said again.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """`messages` are those of an assistant; each has `content`, `tool_calls` or both.

        Raises:
            ValueError: there is none, or one is no message; says which, counted from 1.
        """
        if not messages:
            raise ValueError("there is no reply")
        self._messages = [_checked_reply(each, n) for n, each in enumerate(messages, 1)]
        self._ids = [[*_content(each), END] for each in self._messages]
        self._of_ids = {tuple(ids): m for ids, m in zip(self._ids, self._messages, strict=True)}

    def ids(self, step: int) -> list[int]:
        """Return the tokens of a reply; steps count from 0."""
        return self._ids[min(step, len(self._ids) - 1)]

    def message(self, ids: Sequence[int]) -> Mapping[str, Any] | None:
        """Return the message that tokens are the whole of."""
        return self._of_ids.get(tuple(ids))


def _checked_reply(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"reply {number} must be an object with content or tool_calls")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise ValueError(f"reply {number}: content must be a text, and tool_calls a list")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str)
        ):
            raise ValueError(
                f"reply {number}: a tool call needs function.name and function.arguments, as texts"
            )
    if not (content or calls):
        raise ValueError(f"reply {number} has neither content nor tool_calls")
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


class FakeAgent(GatewayAgent):
    """Makes up the tokens that an engine reports the number of."""

    __slots__ = ("_mean_tokens", "_replies", "_step")

    def __init__(self, *args: Any, mean_tokens: int, replies: Replies | None = None) -> None:
        """A generation has `mean_tokens` on average, if its limit permits and no reply is given."""
        super().__init__(*args)
        self._mean_tokens, self._replies, self._step = mean_tokens, replies, 0

    def begin(self, step: ClientStep) -> None:
        """The client has sent its next request."""
        self._step += 1
        super().begin(step)

    def request(self) -> StepRequest:
        """Request tokens up to the first that ends the message."""
        request = super().request()
        tokens = len(self._tokens(request.max_tokens))
        # An engine in a process of its own makes tokens too; only their number counts.
        return msgspec.structs.replace(request, max_tokens=tokens, payload=None)

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens, made up here."""
        ids = self._tokens(result.tokens)
        stopped = bool(ids) and ids[-1] == END
        content: list[dict[str, Any]] = []
        if self.step.wants_logprobs:
            content = [{"token_id": i, "logprob": -1.0, "rank": 1, "top_logprobs": []} for i in ids]
        end = GenerationEnd(finish_reason="stop" if stopped else "length", logprobs=tuple(content))
        super().on_step_end(msgspec.structs.replace(result, output_ids=tuple(ids), extras=end))

    def _tokens(self, limit: int) -> list[int]:
        """The next tokens, as many as `limit` or up to the end; the first of a reply is no end."""
        if self._replies is not None:
            made = len(self.context_ids) - self.last_prompt_tokens
            return self._replies.ids(self._step)[made : made + limit]
        ids: list[int] = []
        context, seed = self.context_ids, crc32(self.id.encode())
        before = context[-1]
        for position in range(len(context), len(context) + limit):
            drawn = crc32(b"%d" % position, seed)
            ends = drawn % self._mean_tokens == 0 and before >= _FIRST_WORD
            before = END if ends else _FIRST_WORD + drawn % (VOCABULARY - _FIRST_WORD)
            ids.append(before)
            if ends:
                break
        return ids


def fake_agents(mean_tokens: int, replies: Replies | None = None) -> Any:
    """Return what makes agents for engines without a model.

    Raises:
        ValueError: a mean below 1.
    """
    if mean_tokens < 1:
        raise ValueError(f"a generation of {mean_tokens} tokens is none; give 1 or more")
    return partial(FakeAgent, mean_tokens=mean_tokens, replies=replies)


class FakeControl:
    """Control calls of engines without a model: there is nothing to do; see `EngineControl`."""

    def __init__(self, engines: int, tp: int) -> None:
        """Each has `tp` ranks."""
        self.names: Sequence[str] = [f"e{n}" for n in range(engines)]
        self._tp = tp

    async def call_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]] | None = None,
        *,
        optional: bool = False,
    ) -> Mapping[str, Any]:
        said = {"world_size": self._tp} if path == "/get_world_size" else {}
        return dict.fromkeys(self.names, said)


def encode(text: str) -> list[int]:
    """Return a token for each word; ``t17`` is token 17."""
    return [_word(word) for word in text.split()]


def _word(word: str) -> int:
    if word[:1] == "t" and word[1:].isdecimal() and len(word) < 9:
        return int(word[1:]) % VOCABULARY
    return _FIRST_WORD + crc32(word.encode()) % (VOCABULARY - _FIRST_WORD)


class WordRenderer:
    """Renders text as words; implements `Renderer`."""

    def __init__(
        self, model: str, replies: Replies | None = None, context_tokens: int = CONTEXT_TOKENS
    ) -> None:
        self._model, self._replies, self._context_tokens = model, replies, context_tokens
        self._made = 0

    async def render(self, endpoint: str, body: dict[str, Any], read: object = None) -> Rendered:
        ids = _chat(body) if endpoint.endswith("chat/completions") else _prompt(body)
        if not ids:
            raise _refused("the prompt is empty", "prompt")
        _check_sampling(body)
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise _refused(f"max_tokens must be 1 or more, not {limit!r}", "max_tokens")
        named = ("temperature", "top_p", "top_k", "stop", "seed", "min_tokens")
        sampling = {name: body[name] for name in named if body.get(name) is not None}
        if body.get("logprobs"):
            sampling["logprobs"] = body.get("top_logprobs") or 0
        return Rendered(prompt_ids=array("I", ids), sampling=sampling, max_tokens=limit)

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        chat = endpoint.endswith("chat/completions")
        message = self._message(output_ids)
        self._made += 1
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if chat:
            choice["message"] = message
            if message.get("tool_calls"):
                choice["finish_reason"] = "tool_calls"
        else:
            choice["text"] = message["content"] or ""
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_word_logprob(entry) for entry in end.logprobs]}
        response: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._made}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self._model,
            "choices": [choice],
            "usage": counted_usage(len(rendered.prompt_ids), len(output_ids), None),
        }
        if body.get("return_token_ids"):
            response["prompt_token_ids"] = list(rendered.prompt_ids)
            choice["token_ids"] = list(output_ids)
        return response

    async def derender_more(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        new_ids: Sequence[int],
        state: Any,
        end: GenerationEnd | None,
        logprobs: Sequence[Any] = (),
    ) -> tuple[dict[str, Any], Any]:
        """Make the choice of a stream's event: words, and a reply's tool calls with its end."""
        before: list[int] = state or []
        if self._replies is None:
            # All that the next event needs of these: whether a word was among them.
            text = self.decode(list(new_ids))
            begun = bool(before) or bool(text)
            text, ids = f" {text}" if before and text else text, [_FIRST_WORD] * begun
            message: dict[str, Any] = {}
        else:
            ids = [*before, *new_ids]
            message = self._message(ids)
            sent = self._message(before)["content"] or ""
            text = (message["content"] or "").removeprefix(sent)
        finish = end.finish_reason if end is not None else None
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": end.stop_reason if end is not None else None,
            "logprobs": {"content": [_word_logprob(e) for e in logprobs]} if logprobs else None,
        }
        if not endpoint.endswith("chat/completions"):
            return choice | {"text": text}, ids
        delta: dict[str, Any] = {"content": text}
        if end is not None and message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": n} | call for n, call in calls]
            choice["finish_reason"] = "tool_calls"
        return choice | {"delta": delta}, ids

    async def refusal(self, endpoint: str, body: bytes, content_type: str) -> Refusal | None:
        """There is no vLLM to ask."""
        return None

    def _message(self, output_ids: Sequence[int]) -> dict[str, Any]:
        reply = self._replies.message(output_ids) if self._replies is not None else None
        if reply is None:
            return {"role": "assistant", "content": self.decode(list(output_ids))}
        calls = [
            {"id": f"call-{self._made}-{n}", "type": "function", **call}
            for n, call in enumerate(reply.get("tool_calls", ()))
        ]
        return {**reply, "tool_calls": calls} if calls else dict(reply)

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Tokenize, detokenize or render."""
        if path == "/detokenize":
            tokens = body.get("tokens") or []
            if not isinstance(tokens, list) or not all(map(_is_id, tokens)):
                raise _refused("tokens must be a list of token ids", "tokens")
            return {"prompt": self.decode(tokens)}
        if path == "/tokenize":
            ids = _chat(body) if "messages" in body else _prompt(body)
            return {"count": len(ids), "max_model_len": self._context_tokens, "tokens": ids}
        if path not in (f"{CHAT}/render", f"{COMPLETIONS}/render"):
            raise RenderError(404, {"message": NOT_FOUND})
        rendered = await self.render(path.removesuffix("/render"), body)
        limits = {} if rendered.max_tokens is None else {"max_tokens": rendered.max_tokens}
        return {
            "token_ids": list(rendered.prompt_ids),
            "sampling_params": rendered.sampling | limits,
            "model": body.get("model") or self._model,
        }

    def decode(self, ids: list[int]) -> str:
        """Return the words of tokens."""
        return " ".join(f"t{id_}" for id_ in ids if id_ >= _FIRST_WORD)


def _word_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": f"t{entry['token_id']}", "bytes": None, "top_logprobs": []} | dict(entry)


def _chat(body: dict[str, Any]) -> list[int]:
    messages = read_json(body.get("messages"))
    if not isinstance(messages, list) or not messages:
        raise _refused("messages must be a list of at least one message", "messages")
    ids: list[int] = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise _refused(f"a message has the role {role!r}; it may be {list(_ROLES)}", "messages")
        ids += [_ROLES[role], *_content(message), END]
    return [*ids, _ROLES["assistant"]]


def _content(message: Mapping[str, Any]) -> list[int]:
    """Tokens of a message: its text, and names and arguments of its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = " ".join(text for text in parts if isinstance(text, str))
    if not isinstance(content, str):
        raise _refused("the content of a message must be a text", "messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _refused("the tool_calls of a message must be a list", "messages")
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    called = [
        f"{function.get('name')} {function.get('arguments', '')}"
        for function in functions
        if isinstance(function, dict)
    ]
    return encode(" ".join([content, *called]))


def _prompt(body: dict[str, Any]) -> list[int]:
    prompt = read_json(body.get("prompt"))
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and all(map(_is_id, prompt)):
        return prompt
    raise _refused("prompt must be one text or one list of token ids", "prompt")


def _is_id(token: object) -> bool:
    return isinstance(token, int) and 0 <= token < 1 << 32


def _check_sampling(body: Mapping[str, Any]) -> None:
    """Refuse what vLLM refuses in `n` and `stop`, with a RenderError that names the field."""
    wanted, stops = body.get("n"), body.get("stop")
    if wanted is not None:
        given = wanted
        try:
            wanted = int(given)
        except (TypeError, ValueError, OverflowError):
            raise _refused("n must be a whole number", "n") from None
        if isinstance(given, float) and given != wanted:
            raise _refused("n must be a whole number", "n")
        if wanted < 1:
            raise _refused(f"n must be at least 1, got {wanted}", "n")
    texts = stops if isinstance(stops, list) else [stops or ""]
    if not all(isinstance(stop, str) for stop in texts):
        raise _refused("stop must be a text or a list of texts", "stop")


def _refused(message: str, param: str) -> RenderError:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return RenderError(400, error)
