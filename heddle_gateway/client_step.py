"""One step that clients wait for: what to generate, the tokens so far, and how it ended."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from heddle_gateway.errors import ApiError
from heddle_runtime.generation import GenerationEnd, Rendered
from heddle_runtime.sampling import INTERNAL_FIELDS

_EXACT: Final = INTERNAL_FIELDS | frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "stop_token_ids", "ignore_eos", "logprobs", "logprob_token_ids"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        "include_stop_str_in_output",
    )
)
"""Sampling parameters whose effect on a token does not depend on which tokens are output so far."""


def exactly_resumable(sampling: Mapping[str, Any]) -> bool:
    """Whether the rest of a generation, sent with the tokens so far as prompt, is the same.

    Parameters that are not known to be so count as ones that are not, unless they are empty or 0.
    """
    return all(name in _EXACT or not value for name, value in sampling.items())


class ClientStep:
    """A generation and its clients: the one that sent it first, and those that sent it again."""

    def __init__(
        self,
        endpoint: str,
        rendered: Rendered,
        *,
        max_tokens: int,
        cache_salt: str = "",
        has_text: bool = False,
    ) -> None:
        """`has_text`: whether its clients get a text, which may name a tool."""
        self.has_text = has_text
        self.prompt_ids = rendered.prompt_ids
        self.sampling = rendered.sampling
        self.features: dict[str, Any] = rendered.features.get("generate", {})
        self.cache_salt = cache_salt
        self.max_tokens = max_tokens
        self.resumable = exactly_resumable(rendered.sampling)
        given = (endpoint, rendered.sampling, self.features, max_tokens, cache_salt)
        digest = blake2b(rendered.prompt_ids.tobytes(), digest_size=16)
        digest.update(msgspec.json.encode(given, order="deterministic"))
        self.key = digest.digest()
        """Equal for equal generations."""
        self.output_ids: array[int] = array("I")
        self.logprobs: list[Any] = []
        self.weight_versions: list[Any] = []
        self.end: GenerationEnd | None = None
        self.error: ApiError | None = None
        self.cancelled = False
        """Whether it was ended before its end because no client waited for it."""
        self.abort_reason = ""
        """Why it ends as soon as its engine hands over its tokens; empty: it does not."""
        self.trajectory = ""
        """That it is a step of, once it is submitted."""
        self.clients = 0
        self.delivered = False
        """Whether a client has the whole answer."""
        self.engine = ""
        """Of its last dispatch."""
        self.submitted_s = 0.0
        self.dispatched_s: float | None = None
        """First dispatch; seconds of the event loop's clock, as `submitted_s`."""
        self.dispatches = 0
        self.engine_deaths = 0
        self.revoked_from: int | None = None
        """Tokens from here on were reported and are void: their engine died."""
        self._for_tokens: list[asyncio.Future[bool]] = []
        self._for_end: list[asyncio.Future[bool]] = []

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token is to come with its log-prob."""
        return self.sampling.get("logprobs") is not None

    @property
    def over(self) -> bool:
        """Whether nothing will be generated any more."""
        return self.end is not None or self.error is not None or self.cancelled

    @property
    def aborted(self) -> bool:
        """Whether an order ended it, not its clients."""
        return self.end is not None and self.end.finish_reason == "abort"

    def take(self, ids: Sequence[int]) -> None:
        """Append tokens, as many as were wanted: an engine may be wrong, and late."""
        if self.over:
            return
        ids = ids[: self.max_tokens - len(self.output_ids)]
        if ids:
            self.output_ids.extend(ids)
            self._notify()

    def revoke(self, kept: int) -> None:
        """Drop the tokens after the first `kept`: they are generated again."""
        if len(self.output_ids) > kept:
            del self.output_ids[kept:]
            self.revoked_from = kept

    def finish(self, end: GenerationEnd) -> None:
        """End it with its tokens."""
        if self.over:
            return
        if self.wants_logprobs and len(self.logprobs) != len(self.output_ids):
            if end.finish_reason == "abort":
                # Tokens that came since the last dispatch have none.
                del self.output_ids[len(self.logprobs) :]
            elif self.logprobs:
                found, tokens = len(self.logprobs), len(self.output_ids)
                text = f"the engine reported {found} log-probs for {tokens} tokens"
                self.fail(ApiError(502, text, kind="server_error"))
                return
        self.end = msgspec.structs.replace(
            end, logprobs=tuple(self.logprobs), weight_versions=tuple(self.weight_versions)
        )
        self._notify()

    def fail(self, error: ApiError) -> None:
        """End it with an error."""
        if not self.over:
            self.error = error
            self._notify()

    def cancel(self) -> None:
        """End it without an answer; nobody waits for it."""
        if not self.over:
            self.cancelled = True
            self._notify()

    async def progress(self, seen: int, limit_s: float) -> bool:
        """Wait for more than `seen` tokens, or the end; return False after `limit_s` without."""
        if self.over or len(self.output_ids) > seen:
            return True
        return await self._notified(self._for_tokens, limit_s)

    async def ended(self, limit_s: float) -> bool:
        """Wait for the end; return False after `limit_s` without."""
        if self.over:
            return True
        return await self._notified(self._for_end, limit_s)

    async def answer(self) -> GenerationEnd:
        """Wait for the end.

        Raises:
            ApiError: it ended without an answer.
        """
        while not self.over:
            await self._notified(self._for_end)
        if self.error is not None:
            raise self.error
        return self.end or GenerationEnd(finish_reason="abort")

    async def _notified(
        self, waiting: list[asyncio.Future[bool]], limit_s: float | None = None
    ) -> bool:
        """Wait for a notification; with a limit, return False after so long without one."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        waiting.append(waiter)
        # Not asyncio.timeout: it takes several times as long, and streams wait once an event.
        timer = loop.call_later(limit_s, _expire, waiter) if limit_s is not None else None
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in waiting:
                waiting.remove(waiter)

    def _notify(self) -> None:
        ended = self._for_end if self.over else []
        for waiter in (*self._for_tokens, *ended):
            if not waiter.done():
                waiter.set_result(True)
        self._for_tokens.clear()
        ended.clear()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
