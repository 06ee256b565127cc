"""Tokens for engines that only keep time, and text for these tokens. No model runs.

A trajectory's token at a position of its context depends on nothing else, so that a generation that
was interrupted goes on as it would have. Text has one token for each word.
"""

import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from zlib import crc32

import msgspec

from heddle_gateway.agent import GatewayAgent
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.generation import GenerationEnd, Rendered, RenderError

END: Final = 0
"""Token that ends a message."""
_ROLES: Final = {"system": 1, "user": 2, "assistant": 3, "tool": 4, "developer": 5}
_FIRST_WORD: Final = 16
VOCABULARY: Final = 50_000


class FakeAgent(GatewayAgent):
    """Makes up the tokens that an engine reports the number of."""

    __slots__ = ("_mean_tokens",)

    def __init__(self, *args: Any, mean_tokens: int) -> None:
        """A generation has `mean_tokens` on average, if its limit permits."""
        super().__init__(*args)
        self._mean_tokens = mean_tokens

    def request(self) -> StepRequest:
        """Request tokens up to the first that ends the message."""
        request = super().request()
        tokens = len(self._tokens(request.max_tokens))
        return msgspec.structs.replace(request, max_tokens=tokens)

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


def fake_agents(mean_tokens: int) -> Any:
    """Return what makes agents for engines without a model.

    Raises:
        ValueError: a mean below 1.
    """
    if mean_tokens < 1:
        raise ValueError(f"a generation of {mean_tokens} tokens is none; give 1 or more")
    return partial(FakeAgent, mean_tokens=mean_tokens)


def encode(text: str) -> list[int]:
    """Return a token for each word; ``t17`` is token 17."""
    return [_word(word) for word in text.split()]


def _word(word: str) -> int:
    if word[:1] == "t" and word[1:].isdecimal() and len(word) < 9:
        return int(word[1:]) % VOCABULARY
    return _FIRST_WORD + crc32(word.encode()) % (VOCABULARY - _FIRST_WORD)


class WordRenderer:
    """Renders text as words; implements `Renderer`, `EngineCalls` and `Detokenizer`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._made = 0

    async def render(self, endpoint: str, body: dict[str, Any]) -> Rendered:
        """Make the prompt of a request."""
        ids = _chat(body) if endpoint.endswith("chat/completions") else _prompt(body)
        if not ids:
            raise _refused("the prompt is empty", "prompt")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
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
        """Make the response object."""
        chat = endpoint.endswith("chat/completions")
        text, made = self.decode(list(output_ids)), len(output_ids)
        self._made += 1
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if body.get("logprobs"):
            content = [
                {"token": f"t{e['token_id']}", "bytes": None, "top_logprobs": []} | e
                for e in end.logprobs
            ]
            choice["logprobs"] = {"content": content}
        response: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._made}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self._model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(rendered.prompt_ids),
                "completion_tokens": made,
                "total_tokens": len(rendered.prompt_ids) + made,
            },
        }
        if body.get("return_token_ids"):
            response["prompt_token_ids"] = list(rendered.prompt_ids)
            choice["token_ids"] = list(output_ids)
        return response

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Tokenize, detokenize or render."""
        if path == "/detokenize":
            return {"prompt": self.decode(body.get("tokens") or [])}
        if path == "/tokenize":
            ids = _chat(body) if "messages" in body else _prompt(body)
            return {"count": len(ids), "max_model_len": VOCABULARY, "tokens": ids}
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


def _chat(body: dict[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages must be a list of at least one message", "messages")
    ids: list[int] = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise _refused(f"a message has the role {role!r}; it may be {list(_ROLES)}", "messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            content = " ".join(text for text in parts if isinstance(text, str))
        if not isinstance(content, str):
            raise _refused("the content of a message must be a text", "messages")
        ids += [_ROLES[role], *encode(content), END]
    return [*ids, _ROLES["assistant"]]


def _prompt(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and all(isinstance(i, int) and i >= 0 for i in prompt):
        return prompt
    raise _refused("prompt must be one text or one list of token ids", "prompt")


def _refused(message: str, param: str) -> RenderError:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return RenderError(400, error)
