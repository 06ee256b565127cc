"""Requests that go on as they are to the server of another model."""

from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp import web

from heddle_gateway.access import TENANT
from heddle_gateway.errors import ApiError, unavailable
from heddle_runtime.vllm_http.endpoint import Endpoint, reason_of
from heddle_runtime.vllm_http.probe import GATEWAY_HEADER

_OURS: Final = frozenset(
    {
        *("authorization", "x-api-key", "cookie", "host", "content-length", "accept-encoding"),
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"),
        *("proxy-authorization", "proxy-connection", "sec-fetch-site"),
    }
)
"""Headers between two neighbours only: keys of clients reach no other server."""

NO_TENANTS: Final = (
    "is a gateway, which cannot tell the tenants of serve.keys apart: give the URL of a vllm serve"
)


def is_gateway(headers: Mapping[str, str]) -> bool:
    """Whether a Heddle gateway sent an answer."""
    return any(name.lower() == GATEWAY_HEADER for name in headers)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OURS}


async def passed(request: web.Request, raw: bytes, endpoint: Endpoint) -> web.StreamResponse:
    """Send a request on, and its answer back as it comes.

    Raises:
        ApiError: the other server cannot be reached, broke off before its answer, or is a gateway
            that cannot tell tenants apart.
    """
    response: web.StreamResponse | None = None
    call = endpoint.open(request.method, request.rel_url.raw_path_qs, raw, _kept(request.headers))
    try:
        async with call as answer:
            if request.get(TENANT) and is_gateway(answer.headers):
                raise ApiError(502, f"the server of this model {NO_TENANTS}", kind="server_error")
            response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
            response.headers.pop("Content-Encoding", None)
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
    except (aiohttp.ClientError, TimeoutError) as error:
        if response is None or not response.prepared:
            raise unavailable(f"the server of this model {reason_of(error)}") from None
        if request.transport is not None:  # a client sees that the answer is not whole
            request.transport.close()
    else:
        await response.write_eof()
    return response
