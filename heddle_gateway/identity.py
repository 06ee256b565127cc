"""Which trajectory a request belongs to, by what the client sends of it.

In this order, the first that is there: the path, headers of sessions, headers of agent programs,
fields of the body. A request without any of them is identified by its tokens
(`heddle_gateway.continuation`). Request ids never identify a trajectory.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote

import msgspec

from heddle_gateway.errors import ApiError

SESSION_HEADERS: Final = (
    "X-Heddle-Session",
    "X-Session-ID",
    "X-Dynamo-Session-ID",
    "X-SMG-Routing-Key",
)
PROGRAM_HEADERS: Final = (
    ("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id"),
    ("Thread-Id", ""),
    ("Session-Id", ""),
    ("X-Litellm-Session-Id", ""),
)
"""Headers of agent programs, each with one that tells parallel agents of a session apart."""
BODY_FIELDS: Final = (
    ("session_id",),
    ("vllm_xargs", "agentic_context", "program_id"),
    ("vllm_xargs", "session_id"),
    ("program_id",),
    ("metadata", "session_id"),
    ("prompt_cache_key",),
)
FINAL_HEADER: Final = "X-Dynamo-Session-Final"
LONGEST_ID: Final = 512
"""Characters of an id."""
_SAMPLE: Final = re.compile(r"(.+)_(\d+)")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of its trajectory."""

    session: str = ""
    """Empty: its tokens decide."""
    group: str = ""
    """Empty: the hash of its first prompt."""
    task: str = ""
    """Empty: the model's name."""
    tenant: str = ""
    """Whose it is; only requests of the same continue it."""
    tier: int = 0
    """Steps of a higher one go first."""
    final: bool = False
    """Whether the session ends with this request's answer."""


def identify(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    *,
    path_session: str = "",
    user_is_session: bool = False,
    tenant: str = "",
    tier: int = 0,
) -> Identity:
    """Return what a request says of its trajectory.

    Raises:
        ApiError: an id is too long, or no text.
    """
    session = (
        path_session
        or _of_headers(headers)
        or _of_body(body)
        or (_text(body.get("user"), "user") if user_is_session else "")
    )
    sample = _SAMPLE.fullmatch(session)
    group = _checked(headers.get("X-Heddle-Group", ""), "X-Heddle-Group")
    return Identity(
        session=owned(tenant, _checked(session, "the session id")),
        group=owned(tenant, group or (sample[1] if sample else "")),
        tenant=tenant,
        tier=tier,
        task=_checked(headers.get("X-Heddle-Task", ""), "X-Heddle-Task"),
        final=headers.get(FINAL_HEADER, "").lower() == "true",
    )


def owned(tenant: str, label: str) -> str:
    """Return a label that no other tenant can give."""
    return f"{tenant}:{label}" if tenant and label else label


def readable(id_: str) -> str:
    """Return an id as part of a name: printable ASCII in which "#" and "~" are escaped."""
    return quote(id_, safe="/:@!$&'()*+,;=?. ", errors="replace").replace("~", "%7E")


class UniqueNames:
    """Gives each name once, a later one with a number; what was given is kept in 2 MiB.

    That is a Bloom filter of four hashes: after 10^6 names, one new name of 400 gets a number too.
    """

    def __init__(self) -> None:
        self._bits, self._numbered = bytearray(1 << 21), 1

    def of(self, name: str) -> str:
        """Return `name`, or where it was given before, with a number that no other has."""
        hashes, used = blake2b(name.encode(), digest_size=12).digest(), True
        for n in range(0, 12, 3):
            byte, bit = divmod(int.from_bytes(hashes[n : n + 3], "little"), 8)
            used = used and bool(self._bits[byte] >> bit & 1)
            self._bits[byte] |= 1 << bit
        self._numbered += used
        return f"{name}#{self._numbered}" if used else name


def _of_headers(headers: Mapping[str, str]) -> str:
    for name in SESSION_HEADERS:
        if headers.get(name):
            return headers[name]
    for name, agent in PROGRAM_HEADERS:
        if headers.get(name):
            beside = headers.get(agent, "") if agent else ""
            return f"{headers[name]}/{beside}" if beside else headers[name]
    return ""


def _of_body(body: Mapping[str, Any]) -> str:
    for path in BODY_FIELDS:
        value: Any = body
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        found = _text(value, ".".join(path))
        if found:
            return found
    return ""


def _text(value: Any, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        text = f"{field} must be a text, not {type(value).__name__}"
        raise ApiError(400, text, param=field, ours=True)
    return value


def _checked(id_: str, what: str) -> str:
    if len(id_) > LONGEST_ID:
        text = f"{what} has {len(id_):,} characters; give {LONGEST_ID} at most"
        raise ApiError(400, text, ours=True)
    return id_
