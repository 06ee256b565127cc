"""Damage to the bytes of a file, as data that can be repeated and made smaller."""

import re
from random import Random
from typing import Final, Literal, TypeAlias

import msgspec

SCALAR: Final = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|"(?:[^"\\\n]|\\.)*"|true|false|null')
VALUES: Final = (
    b"NaN", b"nan", b"Infinity", b"-inf", b"1e400", b"-1", b"0", b"0.5", b"-0.0", b"1e308",
    b"9223372036854775807", b"18446744073709551616", b"9" * 400, b"null", b"true", b"[]", b"{}",
    b'""', b'"\\ud800"', b'"\\u0000"', b'"x"', b'"in.jsonl"', b'"' + b"y" * 3000 + b'"',
    b'"\xff\xfe"', b"[" * 400, b"1_0", b"0x10", b'"\xe2\x80\xae"', b'"1e3"', b"'", b'"',
)  # fmt: skip
"""What takes the place of a scalar of JSON or TOML."""
CHUNKS: Final = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\n\n", b"{", b"}", b"[[", b",",
    b"\x1b[31m",
    b"\xed\xa0\x80", b"=", b"#", b"[x]\n", b" " * 64, b'{"a":', b"\xf0\x9f\x98\x80",
)  # fmt: skip


Kind: TypeAlias = Literal["scalar", "insert", "delete", "flip", "repeat", "cut", "empty", "missing"]
BYTES: Final[tuple[Kind, ...]] = ("insert", "delete", "flip", "repeat", "cut", "flip")
TEXT: Final[tuple[Kind, ...]] = ("scalar",) * 8


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a file."""

    file: str
    kind: Kind
    place: int = 0
    """Byte, or number of the scalar; taken modulo the size."""
    length: int = 1
    value: bytes = b""


def any_edit(rng: Random, file: str, size: int) -> Edit:
    """Draw a change; text is changed by values more often."""
    binary = file.endswith((".gz", ".heddle", ".arrow", ".parquet"))
    kind: Kind = rng.choice(BYTES if binary else (*BYTES, *TEXT))
    if rng.random() < 0.01:
        kind = rng.choice(("empty", "missing"))
    values = {"scalar": VALUES, "insert": (*CHUNKS, *VALUES)}.get(kind, (b"",))
    return Edit(
        file=file,
        kind=kind,
        place=rng.randrange(max(size, 1)),
        length=rng.choice((1, 1, 2, 7, 40, 300)),
        value=rng.choice(values),
    )


def edited(data: bytes, edit: Edit) -> bytes | None:
    """Return the bytes after a change; None: the file is not there."""
    at = edit.place % max(len(data), 1)
    match edit.kind:
        case "scalar":
            spans = [match.span() for match in SCALAR.finditer(data)]
            if not spans:
                return data + edit.value
            begin, end = spans[edit.place % len(spans)]
            return data[:begin] + edit.value + data[end:]
        case "insert":
            return data[:at] + edit.value + data[at:]
        case "delete":
            return data[:at] + data[at + edit.length :]
        case "flip":
            flipped = bytes(b ^ (1 << edit.length % 8) for b in data[at : at + 1])
            return data[:at] + flipped + data[at + 1 :]
        case "repeat":
            return data[: at + edit.length] + data[at:]
        case "cut":
            return data[:at]
        case "empty":
            return b""
        case "missing":
            return None
