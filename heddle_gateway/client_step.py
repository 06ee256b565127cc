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
    ) -> None:
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
        self._for_tokens: list[asyncio.Future[None]] = []
        self._for_end: list[asyncio.Future[None]] = []

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
        """Append tokens, as many as were wanted: an engine may be wrong."""
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
        waiter = self._waiter(self._for_tokens)
        try:
            async with asyncio.timeout(limit_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            if waiter in self._for_tokens:
                self._for_tokens.remove(waiter)
        return True

    async def ended(self, limit_s: float) -> bool:
        """Wait for the end; return False after `limit_s` without."""
        if self.over:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self._waiter(self._for_end)
        except TimeoutError:
            return False
        finally:
            self._for_end = [waiter for waiter in self._for_end if not waiter.done()]
        return True

    async def answer(self) -> GenerationEnd:
        """Wait for the end.

        Raises:
            ApiError: it ended without an answer.
        """
        while not self.over:
            await self._waiter(self._for_end)
        if self.error is not None:
            raise self.error
        return self.end or GenerationEnd(finish_reason="abort")

    def _waiter(self, waiting: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(waiter)
        return waiter

    def _notify(self) -> None:
        ended = self._for_end if self.over else []
        for waiter in (*self._for_tokens, *ended):
            if not waiter.done():
                waiter.set_result(None)
        self._for_tokens.clear()
        ended.clear()
