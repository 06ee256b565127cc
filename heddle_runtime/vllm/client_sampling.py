"""Requests whose sampling a client chose: converted as vLLM's own server converts them.

Runs in an engine's process, and finds stop strings, which vLLM's core does not know.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from heddle_runtime.process.stepped_engine import Finish, TopLogprobs
from heddle_runtime.vllm.settings import VllmSettings

NEED_TOKENIZER = ("stop", "bad_words", "structured_outputs")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Make each error a ValueError in one line: vLLM's own have no base in common, and what a
    client sends causes them.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


class _Request(NamedTuple):
    """What such a request needs beside the engine."""

    logprobs: bool
    stop_token_ids: frozenset[int]
    text: Any
    """Its output as text, where it has stop strings."""


class ClientSampling:
    """The requests of one engine with parameters of clients."""

    def __init__(self, engine: Any, settings: VllmSettings, eos_ids: list[int]) -> None:
        from pydantic import TypeAdapter
        from vllm.platforms import current_platform
        from vllm.sampling_params import SamplingParams

        self._engine, self._settings, self._eos_ids = engine, settings, eos_ids
        self._validate = TypeAdapter(SamplingParams).validate_python
        self._on_cpu = current_platform.is_cpu()
        self._requests: dict[str, _Request] = {}

    def params(self, sampling: dict[str, Any], max_tokens: int, *, exact: bool) -> Any:
        """Return vLLM's `SamplingParams`.

        Raises:
            ValueError: there are none, or this engine cannot follow them.
        """
        settings = self._settings
        needs = [name for name in NEED_TOKENIZER if sampling.get(name)]
        if needs and not settings.tokenizer:
            raise ValueError(f"{needs[0]} needs the model's tokenizer: set runtime.tokenizer")
        if sampling.get("seed") is not None and self._on_cpu and settings.temperature == 0:
            # A prefill in parts rewinds a request's generator, and the engine would die.
            raise ValueError("seed on a CPU needs whole prefills: set runtime.temperature above 0")
        chosen = {**sampling, "max_tokens": max_tokens, "detokenize": bool(sampling.get("stop"))}
        if exact:
            chosen["ignore_eos"] = True
        elif not chosen.get("ignore_eos"):
            given = chosen.get("stop_token_ids") or ()
            chosen["stop_token_ids"] = list(dict.fromkeys((*given, *self._eos_ids)))
        if settings.logprobs and chosen.get("logprobs") is None:
            chosen["logprobs"] = 0
        return self._validate(chosen)

    def begin(self, request: str, sampling: dict[str, Any], made: Any) -> None:
        """Watch a request; `made` is vLLM's form of it."""
        text = None
        if sampling.get("stop"):
            from vllm.v1.engine.detokenizer import IncrementalDetokenizer

            text = IncrementalDetokenizer.from_new_request(self._engine.get_tokenizer(), made)
        self._requests[request] = _Request(
            sampling.get("logprobs") is not None,
            frozenset(sampling.get("stop_token_ids") or ()),
            text,
        )

    def drop(self, request: str) -> None:
        """It is aborted, or has ended."""
        self._requests.pop(request, None)

    def end(
        self, output: Any, finish: Finish
    ) -> tuple[Finish, int | str | None, list[TopLogprobs]]:
        """How a request ended, by a stop string too, and the log-probs that its client wants."""
        request = self._requests.get(output.request_id)
        if request is None:
            return finish, None, []
        stop_reason = output.stop_reason
        if request.text is not None and output.new_token_ids:
            found = request.text.update(output.new_token_ids, finish == "stop")
            if found is not None:
                finish, stop_reason = "stop", found
        if isinstance(stop_reason, int) and stop_reason not in request.stop_token_ids:
            stop_reason = None  # the model's own end
        wants = request.logprobs and output.new_logprobs is not None
        return finish, stop_reason, _top(output.new_logprobs) if wants else []


def _top(logprobs: Any) -> list[TopLogprobs]:
    """Log-probs of each new token: those of the sampled one first, then of the most likely ones."""
    ranks = logprobs.sampled_token_ranks.tolist()
    rows = zip(logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist(), ranks, strict=True)
    return [
        list(zip(ids, values, (rank, *range(1, len(ids))), strict=True))
        for ids, values, rank in rows
    ]
