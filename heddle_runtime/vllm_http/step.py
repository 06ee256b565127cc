"""One dispatch at an endpoint: its request, and its tokens as they come."""

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.generation import (
    FinishReason,
    Generation,
    GenerationEnd,
    Refusal,
    StepAttempts,
    TraceContext,
    report_tokens,
)
from heddle_runtime.sampling import checked_sampling
from heddle_runtime.vllm_http import relay
from heddle_runtime.vllm_http.probe import FORWARDED, GENERATE
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.stream import GenerateChunk, ProtocolError, read_chunk

REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request of tokens; an abort names the whole."""
NAME_CHARACTERS = 64
"""Of a client's id of its request, as far as engines get it."""
_TRACES = secrets.token_bytes(16)
"""Tells the traces of this process from others'."""
FEATURES = frozenset({"features", "reasoning_ended", "reasoning_parser_kwargs"})
"""Fields that rendering returns and a generation needs."""
_FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
}


def trace_of(trajectory: str) -> str:
    """Return the trace of a trajectory whose client names none."""
    return blake2b(trajectory.encode(), digest_size=16, key=_TRACES).hexdigest()


class HttpStep:
    """A step under way. Times are of `time.monotonic`, but for those of the event loop."""

    def __init__(self, request: StepRequest, id_: str, settings: HttpSettings) -> None:
        """Check its sampling too.

        Raises:
            SamplingError: no engine can do it.
        """
        self.trajectory: TrajectoryId = request.trajectory
        self.resumable = request.resumable
        self.request, self.id, self.span = request, id_, id_[:16]
        self.payload = request.payload if isinstance(request.payload, Generation) else None
        self.relay = self.payload.relay if self.payload is not None else None
        self.attempts = self.payload.attempts if self.payload is not None else StepAttempts()
        given = settings.sampling if self.payload is None else self.payload.sampling
        # An engine that answers the client's own request checks it itself.
        self._sampling = checked_sampling(given) if self.relay is None else {}
        streams = self.payload is not None and self.payload.streams
        self.stream_interval = 1 if streams else settings.stream_interval
        self.sent_s = time.monotonic()
        self.first_s = 0.0
        self.made: list[int] = []
        self.uncounted = 0
        """Tokens whose ids only the client has."""
        self.aborted = False
        """Whether an abort was ordered."""
        self.attempt: asyncio.Task[None] | None = None
        """What makes the call of an endpoint that is under way."""
        self.cut = ""
        """Why that call was cut by us; "": it was not."""
        self.posted_s = self.brought_s = 0.0
        """When the call began, and when it last brought a token; of the event loop's clock."""
        self.prefilled_by = 0.0
        """Tokens that its engine has prefilled in all when its own prompt is."""
        self.overtaken = False
        """Whether a step that was posted later had its first token sooner, and out of order."""
        self.preemptions = 0
        """Of its engine, when it last brought a token."""
        self.void = False
        """Whether its tokens cannot be what the endpoint made: it begins again."""
        self.finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._content: list[dict[str, Any]] = []
        self._versions: list[Any] = []
        self._cached: int | None = None

    @property
    def forwarded(self) -> bool:
        """Whether its answer is passed on as it is."""
        return self.relay is not None and self.relay.path in FORWARDED

    @property
    def adapter(self) -> str:
        """The LoRA adapter that it is for, "" for none."""
        return self.payload.adapter if self.payload is not None else ""

    @property
    def salt(self) -> str:
        """What separates its KV from that of others."""
        return self.payload.cache_salt if self.payload is not None else ""

    @property
    def complete(self) -> bool:
        """Whether all of its tokens have come, whatever happens to the rest of its stream."""
        if self.void:
            return False
        if self.finish in ("stop", "length"):
            return True
        # What a client streams has its end in the last event.
        return self.relay is None and len(self.made) >= self.request.max_tokens

    @property
    def path(self) -> str:
        """The endpoint's path that it is sent to."""
        return GENERATE if self.relay is None else self.relay.path

    @property
    def engine_id(self) -> str:
        """The id that an abort names; "": only the end of its connection ends it."""
        if self.relay is None:
            return REQUEST_PREFIX + self.id
        return relay.engine_id(self.relay.path, self.id)

    @property
    def trace_headers(self) -> dict[str, str]:
        """Its client's name for it, where no body has that, and W3C trace context."""
        given = self.payload.trace if self.payload is not None else TraceContext()
        trace, span = given.trace_id or trace_of(self.trajectory), given.span_id or self.span
        named = {"X-Request-Id": self.id} if self.forwarded and "-" in self.id else {}
        return {"traceparent": f"00-{trace}-{span}-{given.flags}", **named}

    @property
    def streams(self) -> bool:
        """Whether its answer is a stream."""
        return self.relay is None or self.relay.counts_tokens or self.relay.streams

    def posted(self, id_: str, now_s: float) -> None:
        """A call of an endpoint begins, under an id of its own."""
        name = self.payload.name if self.payload is not None else ""
        kept = re.sub(r"[^\w.:-]", "_", name[:NAME_CHARACTERS], flags=re.ASCII)
        self.id, self.span, self.cut = f"{kept}-{id_}" if kept else id_, id_[:16], ""
        self.posted_s, self.brought_s, self.overtaken = now_s, 0.0, False
        self.finish, self.uncounted = None, 0
        if self.relay is not None:
            self.relay.on_begin()

    def body(self, *, counts_each: bool = False) -> dict[str, Any]:
        """What is sent there; `counts_each` as in `relay_body`."""
        if self.forwarded and self.relay is not None:
            return self.relay.body
        if self.relay is not None:
            return relay.relay_body(
                self.relay.body,
                self.id,
                streams=self.relay.streams,
                counts_tokens=self.relay.counts_tokens,
                counts_each=counts_each,
                interval=self.stream_interval,
            )
        request, payload, sampling = self.request, self.payload, dict(self._sampling)
        features = {} if payload is None else payload.features
        known = b"" if payload is None else payload.prompt_json
        if request.exact:
            sampling |= {"ignore_eos": True} if payload is not None else _EXACT
        sampling.setdefault("detokenize", bool(sampling.get("stop")))
        sampling["max_tokens"] = request.max_tokens
        sampling["stream_interval"] = self.stream_interval
        return {
            **{key: value for key, value in features.items() if key in FEATURES},
            "request_id": self.id,
            "token_ids": msgspec.Raw(known) if known else list(request.prompt_ids),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **({"cache_salt": self.salt} if self.salt else {}),
            **({"model": self.adapter} if self.adapter else {}),
        }

    def take(self, event: bytes) -> int:
        """Keep what an event brought; return how many tokens: one, where only the client has them.

        Raises:
            ProtocolError: it cannot be true.
            EngineError: it is an error.
        """
        if self.relay is not None:
            return self._take_relayed(relay.read_object(event))
        chunk = read_chunk(event)
        if chunk.error is not None:
            relay.read_object(event)  # raises it
        return self._take_chunk(chunk)

    def take_whole(self, data: bytes) -> int:
        """Keep an answer that is no stream; return how many tokens it says to have.

        Raises:
            ProtocolError: it cannot be true.
            EngineError: it is an error.
        """
        assert self.relay is not None
        found = relay.read_object(data)
        if self.forwarded:
            self._take_forwarded(found)
            self.finish = "stop"
            return self.uncounted
        if not isinstance(found.get("choices"), list) or not found["choices"]:
            raise ProtocolError("it sent an answer without choices")
        self.uncounted = relay.completion_tokens(found) or 0
        self._cached = relay.cached_tokens(found)
        self.finish = "stop"
        self.relay.on_event(found)
        return self.uncounted

    def _take_forwarded(self, found: dict[str, Any]) -> int:
        assert self.relay is not None
        made, cached = relay.forwarded_counts(found)
        self.uncounted = made or self.uncounted
        self._cached = cached if cached is not None else self._cached
        if relay.ends_answer(found):
            self.finish = "stop"
        self.relay.on_event(found)
        return 1

    def _take_relayed(self, found: dict[str, Any]) -> int:
        if self.forwarded:
            return self._take_forwarded(found)
        assert self.relay is not None
        tokens, finish, stop_reason = relay.check_event(found)
        if self.finish is not None and (tokens or finish):
            raise ProtocolError(f"it sent more of {self.trajectory} after its end")
        if found.get("usage") is not None and not found["choices"]:
            self._cached = relay.cached_tokens(found)
            counted = relay.completion_tokens(found)
            if self.relay.counts_tokens:
                self._check_usage(counted)
            else:
                self.uncounted = counted or 0
        if self.relay.counts_tokens:
            if self._is_repeated(tokens, relay.completion_tokens(found)):
                relay.empty(found["choices"][0])
                tokens = []
            if found["choices"]:
                self._check_count(len(tokens), relay.completion_tokens(found))
            self._keep(tokens)
        if finish is not None:
            self.finish, self._stop_reason = _FINISHES[finish], stop_reason
            if self.finish == "abort" and self.aborted:
                found["choices"][0]["finish_reason"] = None
        self.relay.on_event(found)
        if self.relay.counts_tokens:
            report_tokens(self.payload, tokens)
        return len(tokens) if self.relay.counts_tokens else len(found["choices"])

    def _take_chunk(self, chunk: GenerateChunk) -> int:
        new_tokens = 0
        for choice in chunk.choices:
            if self.finish is not None:
                raise ProtocolError(f"it sent more of {self.trajectory} after its end")
            tokens = choice.token_ids or []
            logprobs = (choice.logprobs.content or []) if choice.logprobs else []
            counted = chunk.usage.completion_tokens if chunk.usage else None
            self._check_logprobs(tokens, logprobs if choice.logprobs else None)
            if self._is_repeated(tokens, counted):
                tokens, logprobs = [], []
            self._check_count(len(tokens), counted)
            self._keep(tokens)
            self._content += logprobs
            if choice.finish_reason is not None:
                self._finish(choice.finish_reason)
                self._stop_reason = choice.stop_reason
                self._versions = choice.weight_versions or []
            report_tokens(self.payload, tokens, logprobs)
            new_tokens += len(tokens)
        if chunk.usage is not None and not chunk.choices:
            self._check_usage(chunk.usage.completion_tokens)
            if chunk.cached_tokens is not None:
                self._cached = min(max(0, chunk.cached_tokens), self.request.prompt_tokens)
        return new_tokens

    def result(
        self,
        *,
        finished: bool,
        error: str = "",
        keep: bool = True,
        refusal: Refusal | None = None,
    ) -> StepResult:
        """What to report of it now; without `keep`, as of a step that never began."""
        now_s = time.monotonic()
        first_s = self.first_s or now_s
        made: Sequence[int] = self.made if keep else ()
        content = self._content[: len(made)]
        finish: FinishReason = self.finish or ("error" if error else "abort")
        if finish == "abort" and finished:
            finish = "length"
        extras: Any = refusal
        if refusal is None and self.payload is not None:
            extras = GenerationEnd(
                finish_reason=finish,
                stop_reason=self._stop_reason,
                logprobs=tuple(content),
                weight_versions=tuple(self._versions),
                cached_tokens=self._cached,
            )
        return StepResult(
            trajectory=self.trajectory,
            tokens=len(made) or (self.uncounted if finished else 0),
            finished=finished,
            prefill_s=first_s - self.sent_s,
            decode_s=now_s - first_s,
            cached_tokens=self._cached or 0,
            output_ids=tuple(made),
            output_logprobs=tuple(entry["logprob"] for entry in content),
            extras=extras,
            error=error,
        )

    def _keep(self, tokens: Sequence[int]) -> None:
        if tokens and not self.first_s:
            self.first_s = time.monotonic()
        if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 31:
            raise ProtocolError(f"it sent token ids for {self.trajectory} that are none")
        if (sent := len(self.made) + len(tokens)) > self.request.max_tokens:
            raise ProtocolError(
                f"{self.trajectory} was to have {self.request.max_tokens} tokens at most, and it "
                f"sent {sent}"
            )
        self.made += tokens

    def _check_logprobs(
        self, tokens: Sequence[int], content: Sequence[dict[str, Any]] | None
    ) -> None:
        """Check those of new tokens: results are made of them whatever ends the step."""
        wanted = self.payload is not None and self.payload.sampling.get("logprobs") is not None
        if content is None and not (wanted and tokens):
            return
        if [entry.get("token_id") for entry in content or ()] != list(tokens):
            raise ProtocolError(f"the log-probs of {self.trajectory} are not those of its tokens")
        if not all(isinstance(entry.get("logprob"), float | int) for entry in content or ()):
            raise ProtocolError(f"the log-probs of {self.trajectory} are no numbers")

    def _is_repeated(self, tokens: Sequence[int], counted: int | None) -> bool:
        """Whether the latest event came once more: the engine counts no token of it as new."""
        made = len(self.made)
        return bool(tokens) and counted == made and self.made[-len(tokens) :] == list(tokens)

    def _check_count(self, new: int, counted: int | None) -> None:
        if counted is not None and counted != len(self.made) + new:
            raise ProtocolError(
                f"it counted {counted} tokens of {self.trajectory} and sent {len(self.made) + new}"
            )

    def _finish(self, reason: str) -> None:
        self.finish = _FINISHES.get(reason)
        wanted = self.request.max_tokens
        if self.finish is None:
            raise ProtocolError(f"{self.trajectory} ended with {reason!r}, which is no end")
        whole = self.finish == "length" or (self.finish == "stop" and self.request.exact)
        if whole and len(self.made) != wanted:
            self.void = True
            raise ProtocolError(
                f"{self.trajectory} ended with {reason!r} after {len(self.made)} of {wanted} tokens"
            )

    def _check_usage(self, counted: int | None) -> None:
        if counted is not None and self.finish is not None and counted != len(self.made):
            self.void = True
            raise ProtocolError(
                f"it counted {counted} tokens of {self.trajectory} and sent {len(self.made)}"
            )


_EXACT = {"temperature": 0.0, "ignore_eos": True}
