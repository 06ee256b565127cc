"""Client bodies as tokens, and tokens as responses, by vLLM's own rendering endpoints."""

import time
from array import array
from collections.abc import Sequence
from typing import Any, NoReturn

from heddle_runtime.generation import GenerationEnd, Rendered, RenderError
from heddle_runtime.sampling import SamplingError, checked_sampling
from heddle_runtime.vllm_http.endpoint import Answer, Endpoint, UnreachableError
from heddle_runtime.vllm_http.step import FEATURES

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LIMIT_S = 60.0
"""Of one call; a long history is rendered in less than a second."""


class HttpRenderer:
    """Renders at an endpoint: an engine's, or a process's that only renders."""

    def __init__(self, endpoint: Endpoint, *, limit_s: float = LIMIT_S) -> None:
        self._endpoint, self._limit_s = endpoint, limit_s

    async def render(self, endpoint: str, body: dict[str, Any]) -> Rendered:
        """Return a request body as tokens.

        Raises:
            RenderError: it is refused, or asks for what a step cannot do.
        """
        if endpoint == COMPLETIONS:
            _check_one_prompt(body.get("prompt"))
        # The answer comes whole from `derender`; vLLM checks options of a stream on its own.
        own_fields = {key: value for key, value in body.items() if key not in _OF_STREAMS}
        content = await self._call(f"{endpoint}/render", own_fields)
        if endpoint == COMPLETIONS:
            content = content[0] if isinstance(content, list) and len(content) == 1 else None
        rendered = content.get("sampling_params") if isinstance(content, dict) else None
        prompt_ids = _ids(content.get("token_ids")) if isinstance(content, dict) else None
        if not isinstance(rendered, dict) or prompt_ids is None:
            _broken(f"{endpoint}/render did not return what vLLM does")
        try:
            sampling = checked_sampling(rendered)
        except SamplingError as error:
            _refuse(error.field, str(error))
        return Rendered(
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=rendered.get("max_tokens"),
            features={
                "request_id": content.get("request_id"),
                "cache_salt": content.get("cache_salt") or "",
                "generate": {
                    key: content[key] for key in sorted(FEATURES) if content.get(key) is not None
                },
            },
        )

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        """Return the whole response object for the output of a rendered body.

        Raises:
            RenderError: it could not be made.
        """
        prompt_ids = rendered.prompt_ids.tolist()
        if not output_ids:  # which vLLM refuses: aborted before the first token
            return _empty(endpoint, body, rendered, end)
        response = {
            "request_id": rendered.features.get("request_id") or "",
            "choices": [
                {
                    "index": 0,
                    "token_ids": list(output_ids),
                    "finish_reason": end.finish_reason,
                    "stop_reason": end.stop_reason,
                    "logprobs": {"content": list(end.logprobs)} if end.logprobs else None,
                }
            ],
        }
        own_fields = {key: value for key, value in body.items() if key not in _OF_STREAMS}
        call: dict[str, Any] = {"model": body["model"]} if "model" in body else {}
        if endpoint == CHAT:
            call |= {"generate_response": response, "chat_request": own_fields}
            call |= {"prompt_tokens": len(prompt_ids), "prompt_token_ids": prompt_ids}
        else:
            call |= {"generate_responses": [response], "completion_request": own_fields}
            call |= {"prompt_tokens": [len(prompt_ids)], "prompt_token_ids": [prompt_ids]}
        made = await self._call(f"{endpoint}/derender", call)
        choices = made.get("choices") if isinstance(made, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            _broken(f"{endpoint}/derender did not return what vLLM does")
        choice = choices[0]
        if endpoint == CHAT:
            _name_tool_calls(choice, body)
        if body.get("return_token_ids"):
            if endpoint == CHAT:
                made["prompt_token_ids"] = prompt_ids
            else:
                choice |= {"prompt_token_ids": prompt_ids, "token_ids": list(output_ids)}
        if isinstance(end.stop_reason, str) and not body.get("include_stop_str_in_output"):
            _cut_text(choice, end.stop_reason)
        return dict(made)

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Pass a call on, such as `/tokenize`, and return its answer.

        Raises:
            RenderError: it is refused.
        """
        return await self._call(path, body)

    async def _call(self, path: str, body: Any) -> Any:
        try:
            answer = await self._endpoint.call(path, body, limit_s=self._limit_s)
        except UnreachableError as error:
            _broken(str(error), status=503)
        if answer.status != 200:
            raise RenderError(*_error_of(answer, path))
        return answer.json()


_OF_STREAMS = ("stream", "stream_options")


def _ids(ids: Any) -> "array[int] | None":
    """Token ids as they are kept; None if they are none."""
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        return None
    try:
        return array("I", ids)
    except OverflowError:
        return None


def _check_one_prompt(prompt: Any) -> None:
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    if several and len(prompt) > 1:
        _refuse("prompt", "one prompt for each request: send the others on their own")


def _name_tool_calls(choice: dict[str, Any], body: dict[str, Any]) -> None:
    """Let the end of a choice that calls tools say so, as that of a chat completion does."""
    message = choice.get("message")
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    named = isinstance(body.get("tool_choice"), dict)
    if calls and not named and choice.get("finish_reason") in ("stop", "length"):
        choice["finish_reason"] = "tool_calls"


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
    prompt_tokens = len(rendered.prompt_ids)
    return {
        "id": rendered.features.get("request_id") or "",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [
            {
                "index": 0,
                **output,
                "logprobs": None,
                "finish_reason": end.finish_reason,
                "stop_reason": end.stop_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": prompt_tokens,
        },
    }


def _error_of(answer: Answer, path: str) -> tuple[int, dict[str, Any]]:
    """The renderer's refusal for a client; its own trouble is not the client's."""
    content = answer.json()
    error = content.get("error") if isinstance(content, dict) else None
    status = answer.status
    if status in (401, 403):
        message = f"{path} says {status}: the renderer refuses the gateway"
        return 502, {"message": message, "type": "api_error", "param": None, "code": 502}
    if not isinstance(error, dict):
        kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
        error = {"message": answer.message, "type": kind, "param": None, "code": status}
    return (status if 400 <= status < 500 else 502), error


def _refuse(param: str, message: str) -> NoReturn:
    raise RenderError(
        400, {"message": message, "type": "invalid_request_error", "param": param, "code": 400}
    )


def _broken(message: str, *, status: int = 502) -> NoReturn:
    raise RenderError(
        status, {"message": message, "type": "api_error", "param": None, "code": status}
    )
