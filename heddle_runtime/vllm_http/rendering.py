"""Client bodies as tokens, and tokens as responses, by vLLM's own rendering endpoints."""

import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_runtime.generation import (
    GenerationEnd,
    Refusal,
    Rendered,
    RenderError,
)
from heddle_runtime.sampling import INTERNAL_FIELDS, SamplingError, checked_sampling
from heddle_runtime.vllm_http.endpoint import Answer, Endpoint, UnreachableError
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.step import FEATURES

LIMIT_S = 60.0
"""Of one call; a long history is rendered in less than a second."""
REFUSAL_LIMIT_S = 5.0
"""Of a call that is to be refused."""
DEFAULT_MAX_TOKENS = 16
"""vLLM's; a rendered body leaves out what equals a default."""
_SEED_TOKENS = 8
"""Of the prompt, as many as vLLM's detokenizer looks back on, and some."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ONE = msgspec.json.Decoder(tuple[dict[str, msgspec.Raw]])


class HttpRenderer:
    """Renders at an endpoint: an engine's, or a process's that only renders."""

    def __init__(
        self, endpoint: Endpoint, *, limit_s: float = LIMIT_S, generates: bool = False
    ) -> None:
        """`generates`: whether it is an engine's, which answers whole requests too."""
        self._endpoint, self._limit_s, self._generates = endpoint, limit_s, generates

    async def render(
        self,
        endpoint: str,
        body: dict[str, Any],
        read: Callable[[bytes], Rendered | None] = lambda text: None,
    ) -> Rendered:
        """Return a request body as tokens. `read` reads a list of ids faster, where it can.

        Raises:
            RenderError: it is refused, or asks for what a step cannot do.
        """
        answer = await self._answered(f"{endpoint}/render", body)
        try:
            found = _ONE.decode(answer)[0] if endpoint == COMPLETIONS else _FIELDS.decode(answer)
            ids = bytes(found.pop("token_ids", b"null"))
            content = {name: msgspec.json.decode(value) for name, value in found.items()}
            prompt = read(ids)
            prompt_ids = _ids(msgspec.json.decode(ids)) if prompt is None else prompt.prompt_ids
        except NO_JSON:
            content, prompt, prompt_ids = {}, None, None
        rendered = content.get("sampling_params")
        if not isinstance(rendered, dict) or prompt_ids is None:
            _broken(f"{endpoint}/render did not return what vLLM does")
        limit = rendered.get("max_tokens", DEFAULT_MAX_TOKENS)
        if isinstance(limit, bool) or not isinstance(limit, int | None):
            _broken(f"{endpoint}/render did not return what vLLM does")
        return Rendered(
            prompt_ids=prompt_ids,
            prompt_hash=None if prompt is None else prompt.prompt_hash,
            sampling=self._sampling(rendered),
            max_tokens=limit,
            features={
                "request_id": content.get("request_id"),
                "cache_salt": content.get("cache_salt") or "",
                "generate": {
                    key: content[key] for key in sorted(FEATURES) if content.get(key) is not None
                },
            },
        )

    def _sampling(self, rendered: dict[str, Any]) -> dict[str, Any]:
        """What an engine is asked for: one that answers the body itself checks it itself."""
        if self._generates:
            return {name: value for name, value in rendered.items() if name not in INTERNAL_FIELDS}
        try:
            return checked_sampling({**rendered, "n": 1})
        except SamplingError as wrong:
            _refuse(wrong.field, str(wrong))

    async def refusal(self, endpoint: str, body: bytes, content_type: str) -> Refusal | None:
        """Return what vLLM says of a body that it refuses, however it is written; None: nothing."""
        renders = endpoint in (CHAT, COMPLETIONS) and not self._generates
        path = f"{endpoint}/render" if renders else endpoint
        try:
            # Where it does not refuse, the end of the call ends what it began.
            answer = await self._endpoint.send(path, body, content_type, limit_s=REFUSAL_LIMIT_S)
        except UnreachableError as error:
            _broken(str(error), status=503)
        content = answer.json() or answer.first_event()
        if answer.status == 200 and isinstance(content, dict) and "error" in content:
            return Refusal(status=400, body=content, in_stream=True)
        if not 400 <= answer.status < 500 or answer.status in (401, 403):
            return None
        return Refusal(status=answer.status, body=content) if isinstance(content, dict) else None

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        """Return the whole response object for the output of a rendered body.

        Its usage has no details, and the end of a chat is that of the generation.

        Raises:
            RenderError: it could not be made.
        """
        prompt_ids = rendered.prompt_ids.tolist()
        shown = text_ids(body, output_ids, end)
        stop = end.stop_reason if isinstance(end.stop_reason, str) else ""
        keeps_stop = bool(body.get("include_stop_str_in_output"))
        until = None
        if stop and shown and endpoint == CHAT:
            with suppress(RenderError):
                until = await self._until_stop(body, shown, stop, keeps_stop=keeps_stop)
        shown = shown if until is None else until
        if not shown:  # which vLLM refuses
            return _empty(endpoint, body, rendered, end)
        call, response = _to_derender(endpoint, body, rendered, shown, end, end.logprobs)
        if endpoint == CHAT:
            call["generate_response"] = response
        else:
            seed = [prompt_ids[-_SEED_TOKENS:]]
            call |= {"generate_responses": [response], "prompt_token_ids": seed}
            call["prompt_tokens"] = [len(prompt_ids)]
        made = await self._call(f"{endpoint}/derender", call)
        choices = made.get("choices") if isinstance(made, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            _broken(f"{endpoint}/derender did not return what vLLM does")
        choice = choices[0]
        if endpoint == CHAT:
            _name_calls(choice)
        if body.get("return_token_ids"):
            choice["token_ids"] = list(output_ids)
            (made if endpoint == CHAT else choice)["prompt_token_ids"] = prompt_ids
        if stop and until is None and not keeps_stop:
            _cut_text(choice, stop)
        return dict(made)

    async def _until_stop(
        self, body: dict[str, Any], ids: list[int], stop: str, *, keeps_stop: bool
    ) -> list[int] | None:
        """Tokens of the text that a stop string ends, as vLLM's parsers read no more.

        None: it could not be found, or the tokenizer cannot make them.
        """
        model = {"model": body["model"]} if "model" in body else {}

        async def text_of(tokens: list[int]) -> str:
            if not tokens:
                return ""
            found = await self._call("/detokenize", {**model, "tokens": tokens})
            text = found.get("prompt") if isinstance(found, dict) else None
            return text if isinstance(text, str) else _broken("/detokenize returned no text")

        text, kept = await text_of(ids), ids[:-1]
        before = await text_of(kept)
        # It ends in the last token; half a character is no text yet.
        at = text.find(stop, max(0, len(before.rstrip("\ufffd")) - len(stop) + 1))
        end = at + len(stop) * keeps_stop
        if at < 0:
            return None
        if end == len(text):
            return ids
        while not text[:end].startswith(before):
            kept = kept[:-1]
            before = await text_of(kept)
        if rest := text[len(before) : end]:
            call = {**model, "prompt": rest, "add_special_tokens": False}
            found = await self._call("/tokenize", call)
            more = _ids(found.get("tokens")) if isinstance(found, dict) else None
            kept = kept + (more or array("I")).tolist()
        return kept if await text_of(kept) == text[:end] else None

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
        """Return the choice of a stream's event for further tokens, and the state after them.

        `state` is None first. `end` comes with the last tokens.

        Raises:
            RenderError: it could not be made.
        """
        shown = text_ids(body, new_ids, end) if end is not None else list(new_ids)
        call, chunk = _to_derender(endpoint, body, rendered, shown, end, logprobs)
        call |= {"stream": True, "generate_chunk": chunk, "stream_state": state}
        made = await self._call(f"{endpoint}/derender", call)
        event = made.get("chunk") if isinstance(made, dict) else None
        choices = event.get("choices") if isinstance(event, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            _broken(f"{endpoint}/derender did not return what vLLM does")
        return choices[0], made.get("stream_state")

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Pass a call on, such as `/tokenize`, and return its answer.

        Raises:
            RenderError: it is refused.
        """
        return await self._call(path, body)

    async def _call(self, path: str, body: Any) -> Any:
        try:
            return msgspec.json.decode(await self._answered(path, body))
        except NO_JSON:
            return None

    async def _answered(self, path: str, body: Any) -> bytes:
        try:
            answer = await self._endpoint.call(path, body, limit_s=self._limit_s)
        except UnreachableError as error:
            _broken(str(error), status=503)
        if answer.status != 200:
            raise RenderError(*_error_of(answer, path))
        return answer.data


def text_ids(body: dict[str, Any], output_ids: Sequence[int], end: GenerationEnd) -> list[int]:
    """The tokens whose text is the client's: a stop token has none, unless it is asked for."""
    ids = list(output_ids)
    stopped = end.finish_reason == "stop" and not isinstance(end.stop_reason, str)
    if stopped and ids and not body.get("include_stop_str_in_output"):
        ids.pop()
    return ids


_OF_STREAMS = ("stream", "stream_options")


def _to_derender(
    endpoint: str,
    body: dict[str, Any],
    rendered: Rendered,
    ids: list[int],
    end: GenerationEnd | None,
    logprobs: Sequence[Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's fields of the request and its prompt, and the generation as engines return it."""
    prompt_ids = rendered.prompt_ids.tolist()
    call: dict[str, Any] = {"model": body["model"]} if "model" in body else {}
    own_fields = {key: value for key, value in body.items() if key not in _OF_STREAMS}
    call["chat_request" if endpoint == CHAT else "completion_request"] = own_fields
    call |= {"prompt_tokens": len(prompt_ids), "prompt_token_ids": prompt_ids}
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": end.finish_reason if end is not None else None,
        "stop_reason": end.stop_reason if end is not None else None,
        "logprobs": {"content": list(logprobs)} if logprobs else None,
    }
    return call, {"request_id": rendered.features.get("request_id") or "", "choices": [choice]}


def _ids(ids: Any) -> "array[int] | None":
    """Token ids as they are kept; None if they are none."""
    if not isinstance(ids, list) or not ids:
        return None
    try:
        return array("I", ids)
    except TypeError:
        return None
    except OverflowError:
        _refuse("prompt", "a token id of the prompt is none of the vocabulary")


def _name_calls(choice: dict[str, Any]) -> None:
    """Give tool calls ids in the form of whole answers; derendered ones have another."""
    message = choice.get("message")
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            call["id"] = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def _cut_text(choice: dict[str, Any], stop: str) -> None:
    """Leave out a stop string and what follows: tokens do not end where it begins."""
    place, key = choice, "text"
    if isinstance(choice.get("message"), dict):
        place, key = choice["message"], "content"
    text = place.get(key)
    if isinstance(text, str) and stop in text:
        place[key] = text[: text.index(stop)]


def _empty(
    endpoint: str, body: dict[str, Any], rendered: Rendered, end: GenerationEnd
) -> dict[str, Any]:
    """The response to a body of which nothing was generated."""
    chat = endpoint == CHAT
    output = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    prompt = len(rendered.prompt_ids)
    choice = {"index": 0, **output, "logprobs": None, "finish_reason": end.finish_reason}
    return {
        "id": rendered.features.get("request_id") or "",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [choice | {"stop_reason": end.stop_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }


def _error_of(answer: Answer, path: str) -> tuple[int, dict[str, Any]]:
    """The renderer's refusal for a client; its own trouble is not the client's."""
    content = answer.json()
    error = content.get("error") if isinstance(content, dict) else None
    status = answer.status
    if status in (401, 403):
        return 502, _error(502, f"{path} says {status}: the renderer refuses the gateway")
    if not isinstance(error, dict):
        error = _error(status, answer.message)
    return (status if 400 <= status < 500 else 502), error


def _refuse(param: str, message: str) -> NoReturn:
    raise RenderError(400, _error(400, message, param))


def _broken(message: str, *, status: int = 502) -> NoReturn:
    raise RenderError(status, _error(status, message))


def _error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"message": message, "type": kind, "param": param, "code": status}
