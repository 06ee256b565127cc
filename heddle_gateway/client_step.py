"""One step that clients wait for: what to generate, the tokens so far, and how it ended."""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final
from weakref import WeakMethod

import msgspec

from heddle_gateway.errors import ApiError
from heddle_runtime.generation import GenerationEnd, Relay, Rendered, StepAttempts, TraceContext
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


_UNEQUAL: Final = frozenset({"stream", "stream_options", "request_id", "user", "metadata"})
"""Fields of a body in which equal requests may differ."""

_NO_TRACE: Final = TraceContext()


def exactly_resumable(sampling: Mapping[str, Any]) -> bool:
    """Whether the rest of a generation, sent with the tokens so far as prompt, is the same.

    Parameters that are not known to be so count as ones that are not, unless they are empty or 0.
    """
    return all(name in _EXACT or not value for name, value in sampling.items())


class EngineEvents:
    """What an engine that answers a request itself has sent so far, in vLLM's form."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.events: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        """Output tokens up to each event."""
        self.begun = 0
        """How often an engine began to answer from the start."""
        # A step and its events in a cycle would keep the ids of thousands of ended steps.
        self._notify = WeakMethod(notify)

    @property
    def tokens(self) -> int:
        """Output tokens that the events have."""
        return self._tokens[-1] if self._tokens else 0

    def begin(self) -> None:
        """Another answer begins."""
        self.events.clear()
        self._tokens.clear()
        self.begun += 1

    def take(self, found: dict[str, Any]) -> None:
        """Append an event, or a whole answer."""
        brought = sum(len(choice.get("token_ids") or ()) for choice in found.get("choices", ()))
        self._tokens.append(self.tokens + brought)
        self.events.append(found)
        if (notify := self._notify()) is not None:
            notify()

    def revoke(self, kept: int) -> None:
        """Drop the events from the first one on that has more than `kept` tokens."""
        while self.tokens > kept:
            del self.events[-1], self._tokens[-1]


class ClientStep:
    """A generation and its clients: the one that sent it first, and those that sent it again."""

    uncounted = 0
    """Output tokens whose ids only the client has, at the end."""
    first_s: float | None = None
    """When its first token came, of `time.monotonic`."""
    ended_s: float | None = None
    """When it ended, of `time.monotonic`."""
    traced = False
    """Whether its span was made."""
    measured = False
    """Whether metrics have it, or those of an earlier gateway."""
    trajectory = ""
    """That it is a step of, once it is submitted."""
    clients = 0
    delivered = False
    """Whether a client has the whole answer."""
    engine = ""
    """Of its last dispatch."""
    submitted_s = 0.0
    dispatched_s: float | None = None
    """First dispatch; seconds of the event loop's clock, as `submitted_s`."""
    dispatches = 0

    def __init__(
        self,
        endpoint: str,
        rendered: Rendered,
        *,
        max_tokens: int,
        cache_salt: str = "",
        has_text: bool = False,
        streams: bool = False,
        body: dict[str, Any] | None = None,
        counts_tokens: bool = True,
        deadline_s: float | None = None,
        sample: int = 0,
        adapter: str = "",
        tenant: str = "",
        name: str = "",
        trace: TraceContext = _NO_TRACE,
    ) -> None:
        """`has_text`: whether its clients get a text, which may name a tool. With `body`, an engine
        may answer the request itself; `counts_tokens` as in `Relay`. `deadline_s`: when it ends
        with an error, by the event loop's clock. `sample` tells equal steps of one request apart;
        `name` is the client's id of its request.
        """
        self.adapter, self.tenant, self.name = adapter, tenant, name
        self.trace, self.made_s = trace, time.monotonic()
        self.has_text, self.streams, self.deadline_s = has_text, streams, deadline_s
        self.attempts = StepAttempts()
        self.relayed = EngineEvents(self._notify)
        self.news = 0
        """Grows with whatever comes."""
        self.relay = self._relay(endpoint, body, counts_tokens=counts_tokens)
        self.opaque = body is not None and not counts_tokens
        """Whether only the client learns which tokens there are."""
        self.prompt_ids, self.prompt_json = rendered.prompt_ids, rendered.prompt_json
        self.prompt_tokens = len(rendered.prompt_ids)
        self.sampling = rendered.sampling
        self.features: dict[str, Any] = rendered.features.get("generate", {})
        self.cache_salt = cache_salt
        self.max_tokens = max_tokens
        self.resumable = counts_tokens and exactly_resumable(rendered.sampling)
        wanted = {name: value for name, value in (body or {}).items() if name not in _UNEQUAL}
        kind = (counts_tokens, counts_tokens or streams)
        request = (endpoint, tenant, sample, adapter, kind, wanted)
        given = (*request, rendered.sampling, self.features, max_tokens, cache_salt)
        known = rendered.prompt_hash
        digest = sha256(rendered.prompt_ids) if known is None else known.copy()
        self.prompt_name = digest.hexdigest()[:16]
        """Equal for equal prompts."""
        digest.update(msgspec.json.encode(given, order="deterministic"))
        self.key = digest.digest()
        """Equal for equal generations."""
        self.output_ids: array[int] = array("I")
        self.logprobs: list[Any] = []
        """Of the dispatches that have ended, in vLLM's form of `logprobs.content`."""
        self.live_logprobs: list[Any] = []
        """Of the tokens that no event has, as they come."""
        self.weight_versions: list[Any] = []
        self.end: GenerationEnd | None = None
        self.error: ApiError | None = None
        self.cancelled = False
        """Whether it was ended before its end because no client waited for it."""
        self.abort_reason = ""
        """Why it ends as soon as its engine hands over its tokens; empty: it does not."""
        self.engine_deaths = self.deaths_in_prefill = 0
        self.revocations, self.revoked_from = 0, 0
        """Tokens from here on were reported and are void: their engine died."""
        self._for_tokens: list[asyncio.Future[bool]] = []
        self._for_end: list[asyncio.Future[bool]] = []

    def _relay(
        self, endpoint: str, body: dict[str, Any] | None, *, counts_tokens: bool
    ) -> Relay | None:
        if body is None:
            return None
        return Relay(
            path=endpoint,
            body=body,
            streams=self.streams,
            counts_tokens=counts_tokens,
            on_begin=self.relayed.begin,
            on_event=self.relayed.take,
        )

    @property
    def tokens(self) -> int:
        """Output tokens so far, those of which only the client has the ids among them."""
        return len(self.output_ids) or self.uncounted

    def logprobs_of(self, start: int, count: int) -> Sequence[Any]:
        """Log-probs of tokens that no event has; fewer where they have not come."""
        first = start - self.relayed.tokens
        return self.live_logprobs[max(0, first) : max(0, first + count)]

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
            self.revocations += 1
        self.relayed.revoke(kept)
        del self.live_logprobs[max(0, kept - self.relayed.tokens) :]

    def finish(self, end: GenerationEnd) -> None:
        """End it with its tokens."""
        if self.over:
            return
        if self.wants_logprobs and self.relayed.tokens + len(self.logprobs) != len(self.output_ids):
            if end.finish_reason == "abort":
                # Tokens that came since the last dispatch have none.
                del self.output_ids[self.relayed.tokens + len(self.logprobs) :]
            elif self.logprobs:
                found = self.relayed.tokens + len(self.logprobs)
                tokens = len(self.output_ids)
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

    async def progress(self, news: int, limit_s: float) -> bool:
        """Wait until `news` has changed, or for the end; return False after `limit_s` without."""
        if self.over or self.news != news:
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
        self.news += 1
        if self.first_s is None and not self.over:
            self.first_s = time.monotonic()
        ended = []
        if self.over:
            # An answer is kept for a minute: what it was made of is much larger.
            self.relay, self.prompt_ids, self.prompt_json = None, array("I"), b""
            self.features = {}  # images among them
            ended = self._for_end
            if self.ended_s is None:
                self.ended_s = time.monotonic()
        for waiter in (*self._for_tokens, *ended):
            if not waiter.done():
                waiter.set_result(True)
        self._for_tokens.clear()
        ended.clear()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
