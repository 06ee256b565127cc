"""The stream of `/inference/v1/generate`: server-sent events, checked as they come."""

from collections.abc import Iterator
from typing import Any

import msgspec

from heddle_core.json_faults import NO_JSON

EVENT_BYTES = 16 << 20
"""Of one event: log-probs of a whole vocabulary for one token have less."""
DONE = b"[DONE]"


class ProtocolError(Exception):
    """An endpoint does not do what its interface says; the message states what it did."""


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Any] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class GenerateChunk(msgspec.Struct):
    """An event of the stream, or the whole answer of a call without one."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from the prefix cache; None where the engine does not report them."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None


_decoder = msgspec.json.Decoder(GenerateChunk)


def read_chunk(data: bytes) -> GenerateChunk:
    """Decode an event or an answer.

    Raises:
        ProtocolError: it is not what vLLM sends.
    """
    try:
        return _decoder.decode(data)
    except NO_JSON as error:
        raise ProtocolError(f"its answer is not that of /inference/v1/generate: {error}") from None


class EventReader:
    """Cuts a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is complete; comments and other fields are dropped.

        Raises:
            ProtocolError: an event is larger than any that vLLM sends.
        """
        *lines, incomplete = data.split(b"\n")
        for line in lines:
            self._buffer += line
            if self._buffer.startswith(b"data:"):
                yield bytes(self._buffer[5:].strip())
            self._buffer.clear()
        self._buffer += incomplete
        if len(self._buffer) > EVENT_BYTES:
            raise ProtocolError(f"an event of its stream has more than {EVENT_BYTES >> 20} MiB")
