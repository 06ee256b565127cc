"""Prompts of token ids, read from JSON: of one that goes on from its session's last, the rest."""

from array import array
from collections import OrderedDict
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
    """Reads prompts; the latest of each session are kept, up to `KNOWN_BYTES`."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[bytes, array[int]]] = OrderedDict()
        """JSON without its end, and the ids, by session."""
        self._bytes = 0

    def read(self, session: str, text: bytes) -> Rendered | None:
        """Return a prompt with its JSON; None: it is no list of ids, or none that can be sent on.

        `session` is its tenant's; "" for none.
        """
        known = self._known.pop(session, None)
        before: array[int] = array("I")
        rest = text
        if known is not None:
            self._bytes -= 2 * len(known[0])
            if text.startswith(known[0]) and text[len(known[0])] in b",]":
                before, rest = known[1], b"[" + text[len(known[0]) :].removeprefix(b",")
        if not text.startswith(b"[") or rest.translate(None, _PLAIN):
            return None
        try:
            ids = before + array("I", msgspec.json.decode(rest))
        except (msgspec.DecodeError, OverflowError, TypeError):
            return None
        if session and ids:
            self._known[session] = text[:-1], ids
            self._bytes += 2 * (len(text) - 1)
            while self._bytes > KNOWN_BYTES:
                _, (dropped, _) = self._known.popitem(last=False)
                self._bytes -= 2 * len(dropped)
        return Rendered(prompt_ids=ids, prompt_json=text)
