"""Bodies of OpenAI's and vLLM's protocols: what is refused, and responses of token ids."""

import re
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, too_long
from heddle_gateway.prompt_ids import PromptReader, read_json
from heddle_runtime.generation import GenerationEnd, Rendered
from heddle_runtime.sampling import SamplingError, checked_sampling
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS, FORWARDED, RESPONSES

GENERATE: Final = "/inference/v1/generate"
MOST_CHOICES: Final = 1_024
"""Answers of one request: each is a step."""
_NOT_SUPPORTED: Final = ("use_beam_search", "prompt_embeds")
_BY_ENGINES_ONLY: Final = ("logits_processors", "echo", "suffix", "content_parts", "features")
"""What only an engine that answers the request itself can do."""


_SEVERAL: Final = re.compile(rb'\[\s*["\[]')
"""The begin of several prompts as JSON, or of one in a list."""


class _Message(msgspec.Struct):
    role: Any = None
    type: Any = None


_MESSAGES: Final = msgspec.json.Decoder(list[_Message])


def check_supported(body: Mapping[str, Any], *, relayed: bool = False) -> None:
    """Refuse what a step cannot be.

    `relayed`: whether engines answer the request themselves.

    Raises:
        ApiError: names the field.
    """
    for name in _NOT_SUPPORTED if relayed else (*_NOT_SUPPORTED, *_BY_ENGINES_ONLY):
        if body.get(name):
            raise ApiError(400, f"{name} is not supported", param=name, ours=True)
    if not relayed and not isinstance(body.get("stream") or False, bool):
        raise ApiError(400, "stream must be true or false", param="stream")


def samples_of(sampling: Mapping[str, Any]) -> int:
    """How many answers of each prompt are wanted; vLLM refuses what is no such number.

    Raises:
        ApiError: they are too many.
    """
    given = sampling.get("n") or 1
    try:
        wanted = max(1, int(given))
    except (TypeError, ValueError, OverflowError):
        return 1
    if isinstance(given, float) and not given.is_integer():
        return 1
    if wanted > MOST_CHOICES:
        raise _too_many("n", wanted)
    return wanted


def sample(sampling: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return what makes one of several samples: its seed is that of vLLM's."""
    one = {name: value for name, value in sampling.items() if name != "n"}
    if type(seed := one.get("seed")) is int:
        one["seed"] = seed + number
    return one


def one_prompt_each(endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a body for each prompt of a completion.

    Raises:
        ApiError: they are too many.
    """
    given = body.get("prompt")
    if endpoint != COMPLETIONS or not (isinstance(given, msgspec.Raw) and _SEVERAL.match(given)):
        return [body]
    prompts = read_json(given)
    if len(prompts) < 2 or {*map(type, prompts)} not in ({str}, {list}):
        return [body]
    if len(prompts) * samples_of(body) > MOST_CHOICES:
        raise _too_many("prompt", len(prompts) * samples_of(body))
    return [{**body, "prompt": msgspec.Raw(msgspec.json.encode(each))} for each in prompts]


def _too_many(field: str, choices: int) -> ApiError:
    text = f"{field} asks for {choices:,} answers: give {MOST_CHOICES:,} at most"
    # Of more than its VLLM_MAX_N_SEQUENCES vLLM says so itself.
    return ApiError(400, text, param=field, ours=choices <= 16_384)


def tokens_can_be_counted(endpoint: str, body: Mapping[str, Any]) -> bool:
    """Whether an engine that answers the request itself can send token ids with its events.

    It has none where it hides reasoning; asked for them it echoes no text; and log-probs of the
    prompt, which an echo brings, are in no stream.
    """
    if endpoint in FORWARDED:
        return False
    echoes = bool(body.get("echo"))
    hides = body.get("include_reasoning") is False
    return not (echoes or hides or body.get("prompt_logprobs") is not None)


def text_field(body: Mapping[str, Any], name: str) -> str:
    """Return an optional text of a body.

    Raises:
        ApiError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be a text", param=name)
    return value


def rendered_ids(body: Mapping[str, Any], prompts: PromptReader, session: str) -> Rendered:
    """Read a request of token ids, which may be JSON still.

    Raises:
        ApiError: a field is wrong.
    """
    ids, sampling = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise ApiError(400, "sampling_params must be an object", param="sampling_params")
    check_supported(sampling)
    sampling = {**sampling, "n": None} if samples_of(sampling) > 1 else sampling
    if body.get("output_mode", "tokens") != "tokens":
        raise ApiError(400, "output_mode must be 'tokens'", param="output_mode")
    limit = sampling.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ApiError(400, f"max_tokens must be 1 or more, not {limit!r}", param="max_tokens")
    found = prompts.read(session, bytes(ids)) if isinstance(ids, msgspec.Raw) else None
    if found is None:
        found = _read_ids(ids)
    if not found.prompt_ids:
        raise ApiError(
            400,
            "token_ids must be a list of at least one id, from 0 to 4,294,967,295",
            param="token_ids",
        )
    try:
        chosen = checked_sampling(sampling)
    except SamplingError as error:
        raise ApiError(400, str(error), param=error.field, ours=True) from None
    found.sampling, found.max_tokens = chosen, limit
    return found


def _read_ids(ids: Any) -> Rendered:
    # NO_JSON: of a number that no float has, or of a text that is not UTF-8.
    with suppress(TypeError, OverflowError, *NO_JSON):
        ids = msgspec.json.decode(ids) if isinstance(ids, msgspec.Raw) else ids
        return Rendered(prompt_ids=array("I", ids if isinstance(ids, list) else ()))
    if isinstance(ids, msgspec.Raw) and bytes(ids).startswith(b"["):
        read_json(ids, list[msgspec.Raw])
    return Rendered(prompt_ids=array("I"))


def new_step(
    endpoint: str,
    body: dict[str, Any],
    rendered: Rendered,
    *,
    context_tokens: int,
    relayed: bool = False,
    **about: Any,
) -> ClientStep:
    """Return the step of a request; its output is limited by what the context has space for.

    `relayed`: whether engines answer the request themselves. `ClientStep` gets the rest.

    Raises:
        ApiError: the prompt fills the context.
    """
    prompt = len(rendered.prompt_ids)
    left = context_tokens - prompt
    if left < 1:
        raise too_long(
            f"this model's context has {context_tokens:,} tokens, and the prompt has {prompt:,}: "
            "shorten it"
        )
    wanted = left if rendered.max_tokens is None else min(rendered.max_tokens, left)
    salt = text_field(body, "cache_salt") or rendered.features.get("cache_salt", "")
    return ClientStep(
        endpoint,
        rendered,
        max_tokens=wanted,
        cache_salt=salt,
        has_text=endpoint != GENERATE,
        streams=bool(body.get("stream")),
        body=body if relayed else None,
        counts_tokens=not relayed or tokens_can_be_counted(endpoint, body),
        **about,
    )


_OF_REPLIES: Final = frozenset(
    {"assistant", "tool", "function", "function_call", "function_call_output", "reasoning"}
)


def has_reply(endpoint: str, body: Mapping[str, Any]) -> bool | None:
    """Whether messages contain a model's reply; None where there are no messages."""
    messages = body.get("input" if endpoint == RESPONSES else "messages")
    if endpoint not in (CHAT, *FORWARDED) or not isinstance(messages, msgspec.Raw):
        return None
    with suppress(*NO_JSON):
        roles = [each.role or each.type for each in _MESSAGES.decode(messages)]
        return any(isinstance(role, str) and role in _OF_REPLIES for role in roles)
    return None


def generate_choice(
    ids: Sequence[int], end: GenerationEnd | None, *, logprobs: bool
) -> dict[str, Any]:
    """Return the choice of a response, or of a chunk of a stream, of token ids."""
    choice: dict[str, Any] = {"index": 0, "token_ids": list(ids), "finish_reason": None}
    if end is not None:
        choice["finish_reason"] = end.finish_reason
        choice["stop_reason"] = end.stop_reason
        if logprobs:
            choice["logprobs"] = {"content": list(end.logprobs)}
        if end.weight_versions:
            choice["weight_versions"] = list(end.weight_versions)
    return choice


def counted_usage(
    prompt_tokens: int, output_tokens: int, end: GenerationEnd | None
) -> dict[str, Any]:
    """Return OpenAI's count of tokens."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }
    if end is not None and end.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": end.cached_tokens}
    return usage


def generate_response(
    request_id: str,
    body: Mapping[str, Any],
    prompt_ids: Sequence[int],
    step: ClientStep,
    end: GenerationEnd,
) -> dict[str, Any]:
    """Return the response of token ids."""
    response: dict[str, Any] = {
        "request_id": request_id,
        "model": body.get("model"),
        "created": int(time.time()),
        "output_mode": "tokens",
        "choices": [generate_choice(step.output_ids, end, logprobs=step.wants_logprobs)],
        "usage": counted_usage(step.prompt_tokens, len(step.output_ids), end),
    }
    if body.get("return_token_ids"):
        response["prompt_token_ids"] = list(prompt_ids)
    return response


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """The model that all engines serve, and its adapters."""

    names: tuple[str, ...] = ()
    """Names that requests may give; the first is the default. Empty while no engine is known."""
    context_tokens: int
    """Longest prompt and output together."""
    adapters: Callable[[], Collection[str]] = tuple
    """LoRA adapters that some engine lists now."""


def models_response(model: ServedModel, others: Collection[str] = ()) -> dict[str, Any]:
    """Return the list of models; `others` are those of other servers."""
    about = {"object": "model", "created": int(time.time()), "owned_by": "heddle"}
    about["max_model_len"] = model.context_tokens
    base = model.names[0] if model.names else None
    bases = [{"id": name, **about, "parent": None} for name in model.names]
    adapters = [{"id": name, **about, "parent": base} for name in sorted(model.adapters())]
    beside = [{"id": name, **about, "max_model_len": None, "parent": None} for name in others]
    return {"object": "list", "data": bases + adapters + beside}


def joined_usage(usages: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Return the usage of several answers, `samples` of each prompt: prompts count once."""
    total = dict(usages[0])
    prompts = sum(usage["prompt_tokens"] for usage in usages[::samples])
    outputs = sum(usage["completion_tokens"] for usage in usages)
    for name in total:
        if name.endswith("_details") and isinstance(total[name], dict):
            step = samples if name.startswith("prompt") else 1
            parts = [usage.get(name) or {} for usage in usages[::step]]
            total[name] = {
                key: value if value is None else sum(part.get(key) or 0 for part in parts)
                for key, value in total[name].items()
            }
    counts = {"prompt_tokens": prompts, "completion_tokens": outputs}
    return total | counts | {"total_tokens": prompts + outputs}


def joined_answers(answers: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Return several answers of one choice as one answer."""
    choices = [{**each["choices"][0], "index": n} for n, each in enumerate(answers)]
    usage = joined_usage([each["usage"] for each in answers], samples)
    return {**answers[0], "choices": choices, "usage": usage}
