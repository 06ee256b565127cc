"""A check of JSON documents before the parser, which would need too much memory for some.

The parser keeps the path of each level: memory grows with the square of the depth, and 200 KB of
brackets would take a hundred gigabytes. It also keeps each text or number whole.
"""

from typing import BinaryIO, Final

import ijson

MAX_DEPTH: Final = 512
"""Logs nest about a dozen levels deep; quoted documents are text."""

MAX_TEXT_BYTES: Final = 64 * 1024**2
"""Of one text or number, about: it is counted in the pieces that are read."""

PIECE_BYTES: Final = 256 * 1024
"""Read at a time. With each piece the parser begins an unfinished text again, so small ones take
long; records that are in one piece with damage are lost."""

_BOM = b"\xef\xbb\xbf"
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_OPENING = b"[{"


class CheckedReader:
    """The parser's input: the stream without a byte order mark, checked while it is read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._first = True
        self._depth = 0
        self._in_string = False
        self._escape = b""
        self._length = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes. Raises ijson.JSONError, as the parser would, for those it cannot take."""
        data = self._stream.read(size)
        if self._first and data:
            self._first = False
            data = data.removeprefix(_BOM) or self._stream.read(size)
        self._check(data)
        return data

    def _check(self, data: bytes) -> None:
        """Follow the depth: what is escaped goes, then all but structure, then strings."""
        plain = (self._escape + data).replace(b"\\\\", b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        parts = plain.replace(b'\\"', b"").translate(None, _NOT_STRUCTURE).split(b'"')
        brackets = b"".join(parts[self._in_string :: 2])
        self._length = 0 if brackets or len(parts) > 1 else self._length + len(data)
        if self._length > MAX_TEXT_BYTES:
            raise ijson.JSONError(f"a text longer than {MAX_TEXT_BYTES // 1024**2} MiB")
        self._in_string ^= len(parts) % 2 == 0
        opening = brackets.count(b"[") + brackets.count(b"{")
        if self._depth + opening > MAX_DEPTH:  # else not even in the worst order
            self._follow(brackets)
        self._depth += 2 * opening - len(brackets)

    def _follow(self, brackets: bytes) -> None:
        depth = self._depth
        for bracket in brackets:
            depth += 1 if bracket in _OPENING else -1
            if depth > MAX_DEPTH:
                raise ijson.JSONError(f"nested more than {MAX_DEPTH} levels deep")
