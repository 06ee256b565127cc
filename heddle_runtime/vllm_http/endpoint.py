"""Calls of one vLLM endpoint: its URL and key, limits of its answers, errors in one line."""

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

ANSWER_BYTES = 64 << 20
"""Of one answer; rendered prompts and metrics have less."""
MESSAGE_CHARACTERS = 500
"""Of an endpoint's own error message, as far as it is quoted."""
CONNECT_LIMIT_S = 5.0
_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")


class UnreachableError(Exception):
    """An endpoint did not answer as HTTP; the message says how."""


class SlowError(UnreachableError):
    """It did not answer in time."""


class UrlError(ValueError):
    """A URL cannot be that of an engine; the message quotes it and says what one looks like."""


def base_of(url: str) -> str:
    """Return the URL below which the paths of vLLM are; a trailing `/v1` is dropped.

    Raises:
        UrlError: it is no HTTP URL, or has a password, a query or a fragment.
    """
    if not _URL.fullmatch(url):
        shown = re.sub(r"//[^/]*@", "//...@", url)[:200]
        raise UrlError(
            f"{shown!r} is not the URL of an engine: write http://host:port, and its key apart"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Endpoint:
    """A URL with its key. Redirects are not followed: the key would go with them."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, api_key: str = "") -> None:
        """`session` is shared by all endpoints of a launcher.

        Raises:
            UrlError: see `base_of`.
        """
        self.url = base_of(url)
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise UrlError(f"the key for {self.url} has characters that no header can have")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(
        self,
        path: str,
        body: Any,
        *,
        limit_s: float | None,
        silence_s: float | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """Begin a call, to be used by `async with`; `silence_s` limits each wait for bytes."""
        return self._session.post(
            self.url + path,
            data=msgspec.json.encode(body),
            headers={**self._headers, **headers},
            allow_redirects=False,
            timeout=_timeout(limit_s, silence_s),
        )

    def open(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> Any:
        """Begin a call of a body as it is, to be used by `async with`; it may last for ever."""
        return self._session.request(
            method,
            self.url + path,
            data=data,
            headers={**headers, **self._headers},
            allow_redirects=False,
            timeout=_timeout(None, None),
        )

    async def call(self, path: str, body: Any = None, *, limit_s: float) -> "Answer":
        """Make one call, a GET without a body, and return its whole answer.

        Raises:
            UnreachableError: no connection, no answer within `limit_s`, or one without end.
        """
        method = "GET" if body is None else "POST"
        data = None if body is None else msgspec.json.encode(body)
        return await self._request(method, path, data, self._headers, limit_s)

    async def send(self, path: str, data: bytes, content_type: str, *, limit_s: float) -> "Answer":
        """Post a body as it is; see `call`.

        Of a stream the answer is the data of its first event.
        """
        headers = self._headers | {"Content-Type": content_type}
        return await self._request("POST", path, data, headers, limit_s, whole_stream=False)

    async def _request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        limit_s: float,
        *,
        whole_stream: bool = True,
    ) -> "Answer":
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=_timeout(limit_s, None),
            ) as response:
                if response.content_type == "text/event-stream" and not whole_stream:
                    line = await response.content.readline()
                    first = line.removeprefix(b"data:").strip()
                    return Answer(response.status, first, dict(response.headers))
                found = await read_all(response)
                return Answer(response.status, found, dict(response.headers))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            kind = SlowError if isinstance(error, TimeoutError) else UnreachableError
            raise kind(f"{path} {reason_of(error, limit_s)}") from None


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    data: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        """Its content; None if that is no JSON."""
        try:
            return msgspec.json.decode(self.data)
        except msgspec.DecodeError:
            return None

    def first_event(self) -> Any:
        """Content of the first event of a stream; None if there is none."""
        for line in self.data.splitlines():
            if line.startswith(b"data:"):
                with suppress(msgspec.DecodeError):
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


async def read_all(response: aiohttp.ClientResponse) -> bytes:
    """Read the body, up to `ANSWER_BYTES`.

    Raises:
        aiohttp.ClientPayloadError: it is longer, or is cut.
    """
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {ANSWER_BYTES >> 20} MiB")
    return bytes(data)


def reason_of(error: BaseException, limit_s: float | None = None) -> str:
    """Why a call failed, as the rest of a sentence that begins with its path."""
    if isinstance(error, TimeoutError):
        return "did not answer in time" if limit_s is None else f"did not answer in {limit_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached: {error.os_error.strerror or error.os_error}"
    return f"broke off: {error or type(error).__name__}"


def _timeout(limit_s: float | None, silence_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_LIMIT_S, sock_read=silence_s)
