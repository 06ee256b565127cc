"""What a client sees of an answer, and where two answers differ.

Left out is what differs between two answers of one server: random ids and times, of which the form
remains, and counts of cached tokens. The events of a stream are joined: where a text is cut into
chunks depends on the time.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.gateway.corpus.answers import DONE, Answer

LOGPROB_ERROR: Final = 1e-4
"""Batches of other sizes give sums in another order."""
CLOCK_S: Final = 600.0
"""How far `created` may be from the time of the answer."""
NOW: Final = "<now>"
ANY: Final = "<random>"
COUNT: Final = "<count>"
_RANDOM: Final = re.compile(
    r"\b(chatcmpl-tool|chatcmpl|cmpl|call|resp|msg|rs)([-_])[0-9a-f]{6,}[0-9a-f-]*"
)
_TIMES: Final = ("created", "created_at", "completed_at")
_IDS: Final = ("id", "item_id")
_CACHE_COUNTS: Final = ("cached_tokens", "created_cache_tokens")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers differ; the place is the path of a field."""

    place: str
    expected: Any
    found: Any


class Missing:
    """The value of a field that is not there."""

    def __repr__(self) -> str:
        return "<absent>"


MISSING: Final = Missing()


def compare(expected: Answer, found: Answer, *, own_id: bool = False) -> list[Difference]:
    """Return where an answer is not the expected one to a client; `own_id`: see `seen`."""
    one, other = seen(expected, own_id=own_id), seen(found, own_id=own_id)
    keys = [each["keys"] for each in (one, other) if "keys" in each]
    for kind in ("middle", "last"):
        # All of a short answer may come in two chunks, or in one.
        if any(kind not in each for each in keys):
            for each in keys:
                each.pop(kind, None)
    return list(differences(one, other))


def seen(answer: Answer, *, own_id: bool) -> dict[str, Any]:
    """Return what a client sees; with `own_id` the id of an answer is not random."""
    head: dict[str, Any] = {"status": answer.status, "media_type": answer.media_type}
    if answer.streams:
        return head | _joined(answer, own_id=own_id)
    return head | {"body": _masked(answer.json, answer.received_s, own_id=own_id)}


def differences(expected: Any, found: Any, place: str = "") -> Iterator[Difference]:
    """Yield each place where two values differ; log-probs may differ a little."""
    match expected, found:
        case (dict(), dict()):
            for key in dict.fromkeys((*expected, *found)):
                at = f"{place}.{key}" if place else str(key)
                yield from differences(expected.get(key, MISSING), found.get(key, MISSING), at)
        case (list(), list()):
            for n, (one, other) in enumerate(zip(expected, found, strict=False)):
                yield from differences(one, other, f"{place}[{n}]")
            if len(expected) != len(found):
                yield Difference(f"{place}.length", len(expected), len(found))
        case (int() | float(), int() | float()) if bool not in (type(expected), type(found)):
            allowed = LOGPROB_ERROR if "logprob" in place else 0.0
            if abs(expected - found) > allowed:
                yield Difference(place, expected, found)
        case _:
            if type(expected) is not type(found) or expected != found:
                yield Difference(place, expected, found)


def places(found: Iterable[Difference]) -> list[str]:
    """Return the fields that differ, lists as a whole, each once."""
    return list(dict.fromkeys(re.sub(r"\[\d+\]|\.length$", "", each.place) for each in found))


def without(found: Iterable[Difference], varying: Sequence[str]) -> list[Difference]:
    """Return the differences that are not in fields of which the answers of one server differ."""
    return [each for each in found if not set(places([each])) & set(varying)]


def chunks(answer: Answer) -> int | None:
    """Return the number of events of a stream; None for a whole answer."""
    return len(answer.events) if answer.streams else None


def _masked(value: Any, now_s: float, *, own_id: bool, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _masked(v, now_s, own_id=own_id, key=k) for k, v in value.items()}
    if isinstance(value, list):
        return [_masked(each, now_s, own_id=own_id, key=key) for each in value]
    if key in _TIMES and type(value) is int and abs(value - now_s) < CLOCK_S:
        return NOW
    if key in _CACHE_COUNTS and type(value) is int:
        return COUNT
    if isinstance(value, str) and (key == "message" or (key in _IDS and not own_id)):
        return _RANDOM.sub(rf"\1\2{ANY}", value)
    if isinstance(value, str) and key == "id" and value.startswith("chatcmpl-tool-"):
        return _RANDOM.sub(rf"\1\2{ANY}", value)
    return value


def _joined(answer: Answer, *, own_id: bool) -> dict[str, Any]:
    """What the events of a stream say together."""
    events = [_masked(each, answer.received_s, own_id=own_id) for each in answer.events]
    chunks = [each for each in events if _is_chunk(each)]
    with_choice = [each for each in chunks if each["choices"]]
    heads = ("id", "object", "created", "model", "system_fingerprint")
    return {
        "done": {"count": events.count(DONE), "last": bool(events) and events[-1] == DONE},
        "errors": [each for each in events if isinstance(each, dict) and not _is_chunk(each)],
        "no JSON": [each for each in events if isinstance(each, str) and each != DONE],
        **{name: _distinct(each.get(name, MISSING) for each in chunks) for name in heads},
        "one id": len(_distinct(e.get("id") for e in answer.events if _is_chunk(e))) <= 1,
        "prompt_token_ids": _said(chunks, "prompt_token_ids"),
        "prompt_text": _said(chunks, "prompt_text"),
        "choices": _choices(with_choice),
        "usage": {
            "prompt_tokens": _distinct(_prompt_tokens(each) for each in with_choice),
            "last": with_choice[-1].get("usage", MISSING) if with_choice else MISSING,
            "own": [each.get("usage", MISSING) for each in chunks if not each["choices"]],
        },
        "keys": _keys(chunks),
    }


def _prompt_tokens(chunk: Mapping[str, Any]) -> Any:
    """Of a chunk's usage; its other counts depend on where the text is cut."""
    usage = chunk.get("usage", MISSING)
    return usage.get("prompt_tokens", MISSING) if isinstance(usage, dict) else usage


def _is_chunk(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("choices"), list)


def _choices(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each choice, by its index, as if it had come at once."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts.setdefault(str(choice.get("index")), []).append(choice)
    return {index: _choice(each) for index, each in parts.items()}


def _choice(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    deltas = [part.get("delta") or {} for part in parts]
    calls: dict[str, list[Mapping[str, Any]]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            calls.setdefault(str(call.get("index")), []).append(call)
    return {
        "role": _said(deltas, "role"),
        "content": _text(deltas, "content"),
        "reasoning": _text(deltas, "reasoning"),
        "text": _text(parts, "text"),
        "tool_calls": {index: _call(each) for index, each in calls.items()},
        "finish_reason": _said(parts, "finish_reason"),
        "stop_reason": _said(parts, "stop_reason"),
        "token_ids": _flat(part.get("token_ids") for part in parts),
        "prompt_token_ids": _said(parts, "prompt_token_ids"),
        "logprobs": _logprobs(parts),
    }


def _call(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    functions = [part.get("function") or {} for part in parts]
    return {
        "id": _said(parts, "id"),
        "type": _said(parts, "type"),
        "name": _text(functions, "name"),
        "arguments": _text(functions, "arguments"),
    }


def _logprobs(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part.get("logprobs") or {}).items():
            joined.setdefault(name, []).extend(values or ())
    return joined


def _keys(chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Names of fields, by the kind of chunk: first, in the middle, last, and of usage alone."""
    with_choice = [each for each in chunks if each["choices"]]
    kinds = {
        "first": with_choice[:1],
        "middle": with_choice[1:-1],
        "last": with_choice[1:][-1:],
        "usage": [each for each in chunks if not each["choices"]],
    }
    keys: dict[str, Any] = {}
    for kind, each in kinds.items():
        if each:
            keys[kind] = {
                "chunk": sorted({key for chunk in each for key in chunk}),
                "choice": sorted({key for c in each for choice in c["choices"] for key in choice}),
            }
    deltas = [choice.get("delta") for each in with_choice for choice in each["choices"]]
    objects = [delta for delta in deltas if isinstance(delta, dict)]
    calls = [call for delta in objects for call in delta.get("tool_calls") or ()]
    return keys | {
        # Which chunk has the last text is a matter of time; all chunks together are none.
        "first delta": sorted(objects[0]) if objects else [],
        "later deltas": sorted({key for delta in objects[1:] for key in delta}),
        "calls that begin": sorted({k for c in calls if c.get("id") for k in c}),
        "calls that go on": sorted({k for c in calls if not c.get("id") for k in c}),
    }


def _said(parts: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [part[name] for part in parts if part.get(name) is not None]


def _text(parts: Iterable[Mapping[str, Any]], name: str) -> Any:
    texts = _said(parts, name)
    return "".join(texts) if all(isinstance(each, str) for each in texts) else texts


def _flat(lists: Iterable[Any]) -> list[Any]:
    return [each for values in lists if isinstance(values, list) for each in values]


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once; a set could not tell 1 from true."""
    found: list[Any] = []
    for value in values:
        if not any(type(value) is type(other) and value == other for other in found):
            found.append(value)
    return found
