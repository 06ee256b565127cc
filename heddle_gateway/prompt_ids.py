"""Prompts of token ids, read from JSON: of one that goes on from its session's last, the rest."""

from array import array
from collections import OrderedDict
from hashlib import sha256
from typing import Any, Final

import msgspec

from heddle_runtime.generation import Rendered

KNOWN_BYTES: Final = 64 << 20
"""Of the prompts that are kept."""
_PLAIN: Final = b"[]0123456789, \t\r\n"
SMALL_BYTES: Final = 16_384
"""No smaller body takes a megabyte once it is read."""
_LONG: Final = 4_096
"""Bytes of a body whose ids are cut out before it is read, and where they are looked for."""
_NAME: Final = b'"token_ids"'
_PLACE: Final = b"-31415926"
"""In place of the ids, which cannot be negative."""
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def split_body(raw: bytes) -> dict[str, Any] | None:
    """Read a JSON object whose `token_ids` stay JSON; None where it has to be read as a whole.

    That is so where there is much beside them.
    They may be no JSON where they follow a `[`: who reads them has to see.
    """
    found = _without_ids(raw)
    try:
        found = dict(_FIELDS.decode(raw)) if found is None else found
        if len(raw) - len(memoryview(found.get("token_ids", b""))) > SMALL_BYTES:
            return None
        for name, value in found.items():
            if name != "token_ids":
                found[name] = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return found


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
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
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
        except (msgspec.DecodeError, OverflowError, RecursionError, TypeError):
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
