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
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def split_body(raw: bytes) -> dict[str, Any] | None:
    """Read a JSON object whose `token_ids` stay JSON; None where it has to be read as a whole."""
    try:
        found: dict[str, Any] = dict(_FIELDS.decode(raw))
        for name, value in found.items():
            if name != "token_ids":
                found[name] = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
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
        rest = text
        if begin and text.startswith(begin) and text[len(begin)] in b",]":
            rest = b"[" + text[len(begin) :].removeprefix(b",")
        else:
            before, hashed = array("I"), None
        if not text.startswith(b"[") or rest.translate(None, _PLAIN):
            return None
        try:
            added = array("I", msgspec.json.decode(rest))
        except (msgspec.DecodeError, OverflowError, TypeError):
            return None
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
