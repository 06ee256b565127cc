"""One dispatch at an endpoint: its request, and its tokens as they come."""

import time
from collections.abc import Sequence
from typing import Any

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.generation import FinishReason, Generation, GenerationEnd, report_tokens
from heddle_runtime.sampling import checked_sampling
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.stream import GenerateChunk, ProtocolError

REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request; an abort names the whole."""
FEATURES = frozenset({"features", "reasoning_ended", "reasoning_parser_kwargs"})
"""Fields that rendering returns and a generation needs."""
_FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",
}


class HttpStep:
    """A step under way. Times are of `time.monotonic`."""

    def __init__(self, request: StepRequest, id_: str, settings: HttpSettings) -> None:
        """Check its sampling too.

        Raises:
            SamplingError: no engine can do it.
        """
        self.trajectory: TrajectoryId = request.trajectory
        self.resumable = request.resumable
        self.request, self.id = request, id_
        self.payload = request.payload if isinstance(request.payload, Generation) else None
        given = settings.sampling if self.payload is None else self.payload.sampling
        self._sampling = checked_sampling(given)
        self._stream_interval = settings.stream_interval
        self.sent_s = time.monotonic()
        self.first_s = 0.0
        self.made: list[int] = []
        self.aborted = False
        """Whether an abort was ordered."""
        self.credible = True
        """Whether what came of it can be true."""
        self.finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._content: list[dict[str, Any]] = []
        self._versions: list[Any] = []
        self._cached = 0

    @property
    def salt(self) -> str:
        """What separates its KV from that of others."""
        return self.payload.cache_salt if self.payload is not None else ""

    @property
    def complete(self) -> bool:
        """Whether all of its tokens have come, whatever happens to the rest of its stream."""
        return self.finish in ("stop", "length") or len(self.made) >= self.request.max_tokens

    def body(self) -> dict[str, Any]:
        """What is sent to `/inference/v1/generate`."""
        request, payload, sampling = self.request, self.payload, dict(self._sampling)
        features = {} if payload is None else payload.features
        if request.exact:
            sampling |= {"ignore_eos": True} if payload is not None else _EXACT
        sampling.setdefault("detokenize", bool(sampling.get("stop")))
        sampling["max_tokens"] = request.max_tokens
        sampling["stream_interval"] = self._stream_interval
        return {
            **{key: value for key, value in features.items() if key in FEATURES},
            "request_id": self.id,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": self.salt} if self.salt else {}),
        }

    def take(self, chunk: GenerateChunk) -> None:
        """Keep what an event brought.

        Raises:
            ProtocolError: it cannot be true.
        """
        if chunk.usage is not None:
            self._check_usage(chunk.usage.completion_tokens)
            self._cached = min(max(0, chunk.cached_tokens or 0), self.request.prompt_tokens)
        for choice in chunk.choices:
            if self.finish is not None:
                raise ProtocolError(f"it sent more of {self.trajectory} after its end")
            tokens = choice.token_ids or []
            self._keep(tokens)
            if choice.logprobs is not None:
                self._keep_logprobs(choice.logprobs.content or ())
            if choice.finish_reason is not None:
                self._finish(choice.finish_reason)
                self._stop_reason = choice.stop_reason
                self._versions = choice.weight_versions or []
            report_tokens(self.payload, tokens)

    def result(self, *, finished: bool, error: str = "", keep: bool = True) -> StepResult:
        """What to report of it now; without `keep`, as of a step that never began."""
        now_s = time.monotonic()
        first_s = self.first_s or now_s
        made: Sequence[int] = self.made if keep else ()
        content = self._content[: len(made)]
        finish: FinishReason = self.finish or ("error" if error else "abort")
        if finish == "abort" and finished:
            finish = "length"
        return StepResult(
            trajectory=self.trajectory,
            tokens=len(made),
            finished=finished,
            prefill_s=first_s - self.sent_s,
            decode_s=now_s - first_s,
            cached_tokens=self._cached,
            output_ids=tuple(made),
            output_logprobs=tuple(entry["logprob"] for entry in content),
            extras=None
            if self.payload is None
            else GenerationEnd(
                finish_reason=finish,
                stop_reason=self._stop_reason,
                logprobs=tuple(content),
                weight_versions=tuple(self._versions),
            ),
            error=error,
        )

    def _keep(self, tokens: Sequence[int]) -> None:
        if tokens and not self.first_s:
            self.first_s = time.monotonic()
        if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 31:
            raise ProtocolError(f"it sent token ids for {self.trajectory} that are none")
        self.made += tokens
        if len(self.made) > self.request.max_tokens:
            raise ProtocolError(
                f"{self.trajectory} was to have {self.request.max_tokens} tokens at most, and it "
                f"sent {len(self.made)}"
            )

    def _keep_logprobs(self, content: Sequence[dict[str, Any]]) -> None:
        """Keep those that can be read: results are made of them whatever ends the step."""
        if not all(isinstance(entry.get("logprob"), float | int) for entry in content):
            raise ProtocolError(f"the log-probs of {self.trajectory} are no numbers")
        self._content += content

    def _finish(self, reason: str) -> None:
        self.finish = _FINISHES.get(reason)
        wanted = self.request.max_tokens
        if self.finish is None:
            raise ProtocolError(f"{self.trajectory} ended with {reason!r}, which is no end")
        whole = self.finish == "length" or (self.finish == "stop" and self.request.exact)
        if whole and len(self.made) != wanted:
            raise ProtocolError(
                f"{self.trajectory} ended with {reason!r} after {len(self.made)} of {wanted} tokens"
            )
        if self.payload is not None and self.payload.sampling.get("logprobs") is not None:
            self._check_logprobs()

    def _check_logprobs(self) -> None:
        if [entry.get("token_id") for entry in self._content] != self.made:
            raise ProtocolError(f"the log-probs of {self.trajectory} are not those of its tokens")

    def _check_usage(self, counted: int | None) -> None:
        if counted is not None and self.finish is not None and counted != len(self.made):
            raise ProtocolError(
                f"it counted {counted} tokens of {self.trajectory} and sent {len(self.made)}"
            )


_EXACT = {"temperature": 0.0, "ignore_eos": True}
