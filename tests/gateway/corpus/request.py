"""One request of a client, and lists of them; equal seeds give equal lists."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from heddle_runtime.tiny_model import SPECIAL

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
JSON_TYPE: Final = "application/json"
ABSENT: Final = object()
"""A field with this value is left out."""
_WORDS: Final = (
    *("river", "stone", "seven", "lamp", "north", "paper", "glass", "train", "quiet", "orange"),
    *("window", "copper", "bridge", "letter", "winter", "garden", "signal", "harbour", "needle"),
)


def token_of(byte: int) -> int:
    """The token of a byte in the tokenizer of `heddle_runtime.tiny_model`.

    It sorts bytes as byte-level tokenizers write them: printable ones as themselves, then the rest.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [other for other in range(256) if other not in printable]
    return len(SPECIAL) + [*printable, *rest].index(byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is sent, to the byte."""

    name: str
    """Unique in its list."""
    area: str
    """What it is about; reports count by it."""
    method: str = "POST"
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    """Whether it is asked by itself only, as it changes what vLLM answers others meanwhile."""

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], *, name: str = "", area: str = "") -> "Request":
        """Return a request of a JSON body."""
        content, headers = json.dumps(body).encode(), {"Content-Type": JSON_TYPE}
        return cls(name=name, area=area, path=path, content=content, headers=headers)

    @property
    def body(self) -> Any:
        """The JSON that it carries; None if it is none."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None

    @property
    def own_id(self) -> bool:
        """Whether it names itself, so that the id of its answer is known."""
        body = self.body
        named = isinstance(body, dict) and bool(body.get("request_id"))
        return named or any(name.lower() == "x-request-id" for name in self.headers)


class Requests:
    """A list that grows. Where `stream` is not said, requests stream by turns."""

    def __init__(self, area: str, *, seed: int, model: str = "") -> None:
        """Bodies name the `model` by turns; they never do if it is empty."""
        self.area, self._model = area, model
        self._rng = random.Random(f"{area} {seed}")
        self._made: list[Request] = []
        self._turn = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._made)

    def words(self, count: int = 4) -> str:
        """Some words."""
        return " ".join(self._rng.choices(_WORDS, k=count))

    def chance(self) -> bool:
        """One of two, by the seed."""
        return self._rng.random() < 0.5

    def chat(self, name: str, *, stream: Any = None, **fields: Any) -> None:
        """Add a chat: greedy, twelve tokens, one message; `fields` say otherwise."""
        messages = [{"role": "user", "content": self.words()}]
        common = {"messages": messages, "max_tokens": 12, "temperature": 0}
        self._add(name, CHAT, common | fields, stream)

    def text(self, name: str, *, stream: Any = None, **fields: Any) -> None:
        """Add a completion: greedy, twelve tokens, one prompt; `fields` say otherwise."""
        common = {"prompt": self.words(), "max_tokens": 12, "temperature": 0}
        self._add(name, COMPLETIONS, common | fields, stream)

    def both(self, name: str, *, stream: Any = None, **fields: Any) -> None:
        """Add a chat and a completion."""
        self.chat(f"{name}, chat", stream=stream, **fields)
        self.text(f"{name}, text", stream=stream, **fields)

    def ways(self, name: str, **fields: Any) -> None:
        """Add a chat that streams and one that does not."""
        self.chat(name, stream=False, **fields)
        self.chat(f"{name}, streamed", stream=True, **fields)

    def raw(
        self,
        name: str,
        path: str,
        content: bytes,
        *,
        method: str = "POST",
        content_type: str = JSON_TYPE,
    ) -> None:
        """Add bytes as they are."""
        headers = {"Content-Type": content_type} if content_type else {}
        self._made.append(
            Request(
                name=name,
                area=self.area,
                method=method,
                path=path,
                content=content,
                headers=headers,
            )
        )

    def _add(self, name: str, path: str, fields: Mapping[str, Any], stream: Any) -> None:
        body = {key: value for key, value in fields.items() if value is not ABSENT}
        headers = {"Content-Type": JSON_TYPE, **body.pop("headers", {})}
        self._turn += 1
        if stream is None:
            stream = self._turn % 2 == 0
        if self._model and self._turn % 3:
            body = {"model": self._model, **body}
        if stream is not False:
            body["stream"] = stream
        if stream is True:
            # Counts of tokens come on their own, with every chunk, or not at all.
            usage = ({"include_usage": True}, None, _CONTINUOUS)[self._turn // 2 % 3]
            if usage is not None:
                body.setdefault("stream_options", usage)
        made = Request(
            name=name,
            area=self.area,
            path=path,
            content=json.dumps(body, ensure_ascii=self._turn % 2 == 0).encode(),
            headers=headers,
            # Every log-prob of a batch has the tokens that one request of it names.
            alone=bool(body.get("logprob_token_ids")),
        )
        if any(other.name == name for other in self._made):
            raise ValueError(f"two requests are named {name!r}")
        self._made.append(made)


_CONTINUOUS: Final = {"include_usage": True, "continuous_usage_stats": True}
