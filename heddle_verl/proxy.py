"""The handle that a client gets in place of an engine's: it calls the engine that the policy names.

It runs in the process of the client, so that prompts and tokens pass no further process. A step
that was preempted goes on with the tokens that it has, on the engine of its next dispatch.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayTaskError

from heddle_verl.steps import NO_LIMIT, Grant, StepPrompt

ABORTED = ("aborted", "abort")
"""verl's stop reasons of a request that was aborted."""

EXACT_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logprobs",
        "max_tokens",
        "max_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "include_stop_str_in_output",
    }
)
"""Sampling parameters under which tokens after a resumption are those of an undisturbed step."""


def group_of(prompt_ids: Sequence[int]) -> str:
    """A name for a prompt: samples of one prompt have the same."""
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()


def prompt_of(prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> StepPrompt:
    """What the policy needs of a request."""
    exact = all(name in EXACT_FIELDS for name, value in sampling_params.items() if value)
    return StepPrompt(
        tokens=len(prompt_ids),
        group=group_of(prompt_ids),
        max_tokens=limit_of(sampling_params) or NO_LIMIT,
        resumable=exact,
    )


def limit_of(sampling_params: Mapping[str, Any]) -> int | None:
    """The limit of the output in tokens, if one is given."""
    for name in ("max_tokens", "max_new_tokens"):
        if sampling_params.get(name) is not None:
            return int(sampling_params[name])
    return None


class Lengths:
    """What engines do with a step without a limit: they derive it from the length of the prompt."""

    def __init__(self, prompt_tokens: int | None, response_tokens: int | None) -> None:
        self.prompt_tokens, self.response_tokens = prompt_tokens, response_tokens

    def limit(self, prompt_tokens: int) -> int | None:
        """The limit that an engine of verl sets itself; None if it reports no lengths."""
        if self.prompt_tokens is None or self.response_tokens is None:
            return None
        rest = self.prompt_tokens + self.response_tokens - prompt_tokens
        return max(1, min(self.response_tokens, rest))


class _Output:
    """The output of a step over its dispatches; `TokenOutput` is verl's class of it."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self.tokens: list[int] = []

    def add(self, output: Any) -> None:
        self._parts.append(output)
        self.tokens.extend(output.token_ids)

    def keep(self, tokens: int) -> None:
        """Drop what the router does not count: an engine died, or the step begins again."""
        if tokens < len(self.tokens):
            self._parts, self.tokens = self._cut(tokens), self.tokens[:tokens]

    def _cut(self, tokens: int) -> list[Any]:
        kept: list[Any] = []
        for part in self._parts:
            if tokens >= len(part.token_ids) > 0:
                kept.append(part)
                tokens -= len(part.token_ids)
        return kept

    def whole(self) -> Any:
        """All dispatches as one output."""
        parts = self._parts
        if len(parts) == 1:
            return parts[0]
        first, last = parts[0], parts[-1]
        log_probs = [p for part in parts for p in part.log_probs or ()]
        counted = [part.num_preempted for part in parts if part.num_preempted is not None]
        fields = dict(last.extra_fields)
        for name in ("global_steps", "num_cached_tokens"):
            if name in first.extra_fields:
                fields["min_global_steps" if name == "global_steps" else name] = first.extra_fields[
                    name
                ]
        if "global_steps" in last.extra_fields:
            fields["max_global_steps"] = last.extra_fields["global_steps"]
        return last.model_copy(
            update={
                "token_ids": list(self.tokens),
                "log_probs": log_probs if any(p.log_probs is not None for p in parts) else None,
                "routed_experts": _joined_experts(parts),
                "num_preempted": sum(counted) + len(parts) - 1,
                "extra_fields": fields,
            }
        )


def _joined_experts(parts: Sequence[Any]) -> Any:
    """Routing of the prompt and of all tokens; each part has that of its own prompt, too."""
    joined = None
    for part in parts:
        experts = part.routed_experts
        if experts is None or not part.token_ids:
            continue
        joined = (
            experts if joined is None else np.concatenate([joined, experts[-len(part.token_ids) :]])
        )
    return joined


class _Remote:
    """A method that is called as one of an actor: `method.remote(...)` returns an awaitable."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, **kwargs: Any) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self._call(**kwargs))


class ProxyHandle:
    """An engine for one `generate` call of one request."""

    def __init__(
        self, router: Any, request_id: str, identity: Any, lengths: Lengths, by_priority: bool
    ) -> None:
        self._router, self._request_id, self._identity = router, request_id, identity
        self._lengths, self._by_priority = lengths, by_priority

    @property
    def generate(self) -> _Remote:
        """verl's call of an engine."""
        return _Remote(self._generate)

    async def _generate(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        priority: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Run a step to its end, whatever engines run it.

        `request_id` and `priority` are the client's, and the policy has others.
        """
        prompt = prompt_of(prompt_ids, sampling_params)
        limit = limit_of(sampling_params) or self._lengths.limit(prompt.tokens)
        number, grant = await self._router.begin_step.remote(
            self._request_id, prompt, self._identity
        )
        output = _Output()
        try:
            while True:
                output.keep(grant.kept_tokens)
                params, made = dict(sampling_params), len(output.tokens)
                if made and limit is not None:
                    params.pop("max_new_tokens", None)
                    params["max_tokens"] = limit - made
                if self._by_priority:
                    kwargs["priority"] = grant.priority
                try:
                    part = await grant.handle.generate.remote(
                        request_id=grant.request_id,
                        prompt_ids=[*prompt_ids, *output.tokens] if made else prompt_ids,
                        sampling_params=params,
                        **kwargs,
                    )
                except RayActorError as error:
                    if isinstance(error, RayTaskError):
                        raise
                    grant = await self._router.engine_died.remote(
                        number, grant.request_id, str(error).partition("\n")[0]
                    )
                    continue
                output.add(part)
                full = limit is not None and len(output.tokens) >= limit
                following = await self._router.dispatch_ended.remote(
                    number,
                    grant.request_id,
                    len(part.token_ids),
                    part.stop_reason in ABORTED and not full,
                )
                if following is None:
                    return output.whole()
                grant = following
        except BaseException as error:
            self._give_up(number, grant, error)
            raise

    def _give_up(self, number: int, grant: Grant, error: BaseException) -> None:
        """The client was cancelled, or its engine refused the step."""
        self._router.step_failed.remote(number, f"{type(error).__name__}: {error}"[:500])
        if isinstance(error, asyncio.CancelledError):
            abort = getattr(grant.handle, "abort_request", None)
            if abort is not None:
                abort.remote(grant.request_id, reset_prefix_cache=False)


class IdentifyingHandle:
    """The router's handle, for a client that knows the identity of its requests."""

    def __init__(self, router: Any, identify: Callable[[str], Any]) -> None:
        """`identify` returns the `SampleIdentity` of a request id, which is about to be sent."""
        self._router, self._identify = router, identify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    @property
    def acquire_server(self) -> _Remote:
        """verl's call of a router, with the identity."""
        return _Remote(self._acquire)

    async def _acquire(self, *, request_id: str, **fields: Any) -> Any:
        identity = self._identify(request_id)
        return await self._router.acquire_server.remote(
            request_id=request_id, identity=identity, **fields
        )


async def abort_request(handle: Any, request_id: str) -> bool:
    """Abort a request on an engine of verl, with its KV left in the prefix cache."""
    answer = await handle.abort_request.remote(request_id, reset_prefix_cache=False)
    return bool(answer.get("aborted"))
