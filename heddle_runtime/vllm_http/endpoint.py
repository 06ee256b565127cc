"""Calls of one vLLM endpoint: its URL and key, limits of its answers, errors in one line."""

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_runtime.vllm_http.connections import (
    BrokenError,
    ConnectError,
    Connections,
    HttpCall,
    Origin,
)

ANSWER_BYTES = 64 << 20
"""Of one answer; rendered prompts and metrics have less."""
MESSAGE_CHARACTERS = 500
"""Of an endpoint's own error message, as far as it is quoted."""
_IN_URLS = "/?#[]@!$&'()*+,;=:%~"
"""Characters that a path and its query have as they are, escapes of others among them."""
_URL = re.compile(r"(?i:https?)://[^/?#@\s]+(/[^?#@\s]*)?")
_USER = re.compile(r"\A((?:https?://)?).*@", re.IGNORECASE | re.DOTALL)
_END = re.compile(r"(/+v1)*/*\Z")
_PORTS = {"http": 80, "https": 443}


class UnreachableError(Exception):
    """An endpoint did not answer as HTTP; the message says how."""


class SlowError(UnreachableError):
    """It did not answer in time."""


class UrlError(ValueError):
    """A URL cannot be that of an engine; the message quotes it and says what one looks like."""


def without_user(url: str) -> str:
    """Return a URL as messages quote it: without a name and a password, whatever these have."""
    return _USER.sub(r"\1...@", url)


def base_of(url: str) -> str:
    """Return the URL below which the paths of vLLM are, the same for each way to write it.

    Small letters in the host; no port where it is the usual one; no `/v1` at the end.

    Raises:
        UrlError: it is no HTTP URL, or has a password, any other "@", a query or a fragment.
    """
    try:
        found = _URL.fullmatch(url) and urlsplit(url)
        port = found and found.port
    except ValueError:  # a host in brackets that is no address, or no port that there can be
        found = None
    if not (found and found.hostname) or port == 0:
        raise UrlError(
            f"{without_user(url)[:200]!r} is not the URL of an engine: write http://host:port, and "
            "its key apart"
        )
    host = found.hostname or ""
    host = f"[{host}]" if ":" in host else host
    host += "" if port in (None, _PORTS[found.scheme]) else f":{port}"
    return f"{found.scheme}://{host}{_END.sub('', found.path)}"


class Endpoint:
    """A URL with its key. Redirects are not followed: the key would go with them."""

    def __init__(self, url: str, connections: Connections, *, api_key: str = "") -> None:
        """`connections` are shared by all endpoints of a launcher.

        Raises:
            UrlError: see `base_of`.
        """
        self.url = base_of(url)
        self._connections = connections
        parts = urlsplit(self.url)
        port = parts.port or _PORTS[parts.scheme]
        self._origin = Origin(parts.hostname or "", port, parts.scheme == "https")
        self._prefix = quote(parts.path, safe=_IN_URLS)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UrlError(f"the key for {self.url} has characters that no header can have")
        self._own = {"Content-Type": "application/json"}
        if api_key:
            self._own["Authorization"] = f"Bearer {api_key}"
        self._host = f"Host: {parts.netloc}\r\n"

    def post(
        self,
        path: str,
        body: Any,
        *,
        limit_s: float | None,
        silence_s: float | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> HttpCall:
        """Begin a call, to be used by `async with`; `silence_s` limits each wait for bytes."""
        data = msgspec.json.encode(body)
        return self._call("POST", path, data, {**self._own, **headers}, limit_s, silence_s)

    def open(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> HttpCall:
        """Begin a call of a body as it is, to be used by `async with`; it may last for ever."""
        kept = {k: v for k, v in headers.items() if k.title() not in self._own}
        return self._call(method, path, data, {**kept, **self._own}, None)

    def _call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limit_s: float | None,
        silence_s: float | None = None,
    ) -> HttpCall:
        head = [f"{method} {self._prefix}{quote(path, safe=_IN_URLS)} HTTP/1.1\r\n", self._host]
        head += [f"{name}: {value}\r\n" for name, value in headers.items()]
        length = "" if data is None else f"Content-Length: {len(data)}\r\n"
        sent = "".join([*head, length, "\r\n"]).encode("utf-8", "surrogateescape")
        request = sent + (data or b"")
        return HttpCall(
            self._connections, self._origin, request, limit_s=limit_s, silence_s=silence_s
        )

    async def call(self, path: str, body: Any = None, *, limit_s: float) -> "Answer":
        """Make one call, a GET without a body, and return its whole answer.

        Raises:
            UnreachableError: no connection, no answer within `limit_s`, or one without end.
        """
        data = None if body is None else msgspec.json.encode(body)
        return await self._answer(path, data, self._own, limit_s)

    async def send(self, path: str, data: bytes, content_type: str, *, limit_s: float) -> "Answer":
        """Post a body as it is; see `call`.

        Of a stream the answer is the data of its first event.
        """
        headers = self._own | {"Content-Type": content_type}
        return await self._answer(path, data, headers, limit_s, whole_stream=False)

    async def _answer(
        self,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limit_s: float,
        *,
        whole_stream: bool = True,
    ) -> "Answer":
        method = "GET" if data is None else "POST"
        try:
            async with self._call(method, path, data, headers, limit_s) as response:
                found = b""
                if response.content_type == "text/event-stream" and not whole_stream:
                    while b"\n" not in found and (more := await response.some()):
                        found += more
                    found = found.partition(b"\n")[0].removeprefix(b"data:").strip()
                else:
                    found = await response.read(ANSWER_BYTES)
                return Answer(response.status, found, response.headers)
        except (BrokenError, OSError, ValueError) as error:
            kind = SlowError if isinstance(error, TimeoutError) else UnreachableError
            raise kind(f"{path} {reason_of(error, limit_s)}") from None


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    data: bytes
    headers: Mapping[str, str]
    """By names in lower case."""

    def json(self) -> Any:
        """Its content; None if that is no JSON."""
        try:
            return msgspec.json.decode(self.data)
        except NO_JSON:
            return None

    def first_event(self) -> Any:
        """Content of the first event of a stream; None if there is none."""
        for line in self.data.splitlines():
            if line.startswith(b"data:"):
                with suppress(*NO_JSON):
                    return msgspec.json.decode(line[len(b"data:") :])
        return None

    @property
    def message(self) -> str:
        """Its error in one line: the `message` of OpenAI's error object, or the text itself."""
        content = self.json()
        error = content.get("error", content) if isinstance(content, dict) else content
        found = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        text = found if isinstance(found, str) else self.data.decode("utf-8", "replace")
        return " ".join(text.split())[:MESSAGE_CHARACTERS]


def reason_of(error: BaseException, limit_s: float | None = None) -> str:
    """Why a call failed, as the rest of a sentence that begins with its path."""
    if isinstance(error, TimeoutError):
        return "did not answer in time" if limit_s is None else f"did not answer in {limit_s:g} s"
    if isinstance(error, ConnectError):
        return f"cannot be reached: {error}"
    return f"broke off: {error or type(error).__name__}"
