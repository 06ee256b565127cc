"""Fields of bodies, read from JSON; of a prompt that goes on from its session's last, the rest."""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_gateway.errors import ApiError
from heddle_runtime.generation import Rendered

KNOWN_BYTES: Final = 64 << 20
"""Of the prompts that are kept."""
_PLAIN: Final = b"[]0123456789, \t\r\n"
CONTENT: Final = frozenset(
    ("token_ids", "prompt", "messages", "input", "tools", "system", "documents", "response_format")
)
"""Fields of a body that stay JSON: engines read them."""
_EMPTY: Final = len(b"null")
_FEW: Final = 1_024
"""Bytes of JSON that are not looked through for what they take."""
_TAKEN: Final = {b",": 40, b'"': 48, b":": 64, b"[": 88, b"{": 192}
"""Bytes that a value, a text, a field, a list and an object take once they are read."""
_WIDE, _NAMED = 4, 200
"""Bytes that a character and a field of a body may take."""
_LONG: Final = 4_096
"""Bytes of a body whose ids are cut out before it is read, and where they are looked for."""
_NAME: Final = b'"token_ids"'
_PLACE: Final = b"-31415926"
"""In place of the ids, which cannot be negative."""
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def split_body(raw: bytes, *, has_ids: bool = False) -> dict[str, Any]:
    """Return the fields of a JSON object as JSON.

    With `has_ids`, `token_ids` may be no JSON where they follow a `[`: who reads them has to see.

    Raises:
        ApiError: it is none.
    """
    if has_ids and (found := _without_ids(raw)) is not None:
        return found
    with suppress(*NO_JSON):
        return dict(_FIELDS.decode(raw))
    read_json(msgspec.Raw(raw), msgspec.Raw)
    raise ApiError(400, "the body must be a JSON object")


def read_json(value: Any, kind: Any = Any) -> Any:
    """Return a field of a body that may be JSON still.

    Raises:
        ApiError: it cannot be read.
    """
    try:
        return msgspec.json.decode(value, type=kind) if isinstance(value, msgspec.Raw) else value
    except NO_JSON as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def read_fields(fields: dict[str, Any], hold: Callable[[int], None]) -> dict[str, Any]:
    """Read all fields but the `CONTENT`, in place.

    Before, `hold` is called with the bytes that they take at most, beside their JSON.

    Raises:
        ApiError: one cannot be read.
    """
    names = [n for n, raw in fields.items() if n not in CONTENT or len(memoryview(raw)) <= _EMPTY]
    read = b"[%b]" % b",".join([fields[name] for name in names])
    size = _NAMED * len(fields)
    if len(read) > _FEW:
        size += _WIDE * len(read) + sum(read.count(mark) * each for mark, each in _TAKEN.items())
    hold(size)
    fields.update(zip(names, read_json(msgspec.Raw(read)), strict=True))
    return fields


def _without_ids(raw: bytes) -> dict[str, Any] | None:
    """Read all but a long list of ids near the begin, whose numbers need not be looked at yet."""
    if len(raw) < _LONG or (at := raw.find(_NAME, 0, _LONG)) < 0:
        return None
    begin = raw.find(b"[", at, at + _LONG)
    end = raw.find(b"]", begin) + 1
    rest = b"%b%b%b" % (raw[:begin], _PLACE, raw[end:])
    if not end or raw[at + len(_NAME) : begin].strip() != b":" or rest.count(_NAME) > 1:
        return None
    try:
        found: dict[str, Any] = dict(_FIELDS.decode(rest))
    except NO_JSON:
        return None
    if found.get("token_ids") != msgspec.Raw(_PLACE):
        return None  # it was the field of another object
    found["token_ids"] = msgspec.Raw(raw[begin:end])
    return found


class PromptReader:
    """Reads prompts; the latest of each open session is kept, up to `KNOWN_BYTES`."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[bytes, array[int], Any]] = OrderedDict()
        """JSON without its end, the ids and their SHA-256, by session."""
        self._bytes = 0

    def forget(self, session: str) -> tuple[bytes, "array[int]", Any]:
        """Drop the prompt of a session, and return it; empty where there is none."""
        known = self._known.pop(session, (b"", array("I"), None))
        self._bytes -= 2 * len(known[0])
        return known

    def read(self, session: str, text: bytes) -> Rendered | None:
        """Return a prompt with its JSON; None: it is no list of ids, or none that can be sent on.

        `session` is its tenant's; "" for none.
        """
        begin, before, hashed = self.forget(session)
        rest, goes_on = text, False
        if begin and text.startswith(begin) and text[len(begin)] in b",]":
            goes_on = text[len(begin)] in b","
            rest = b"[" + text[len(begin) + goes_on :]
        else:
            before, hashed = array("I"), None
        if not text.startswith(b"[") or rest.translate(None, _PLAIN):
            return None
        try:
            added = array("I", msgspec.json.decode(rest))
        except (OverflowError, TypeError, *NO_JSON):
            return None
        if goes_on and not added:
            return None  # it ends with a comma
        ids = before + added
        hashed = sha256() if hashed is None else hashed.copy()
        hashed.update(added)
        if session and ids:
            self._known[session] = text[:-1], ids, hashed
            self._bytes += 2 * (len(text) - 1)
            while self._bytes > KNOWN_BYTES:
                _, (dropped, *_) = self._known.popitem(last=False)
                self._bytes -= 2 * len(dropped)
        return Rendered(prompt_ids=ids, prompt_json=text, prompt_hash=hashed)
