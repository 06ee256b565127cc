"""Requests that go on as they are to the server of another model."""

from collections.abc import Mapping
from typing import Final

from heddle_gateway.errors import ApiError, unavailable
from heddle_gateway.http import HttpRequest, Response, Stream
from heddle_runtime.vllm_http.connections import BrokenError
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


def _kept(headers: Mapping[str, str], *ours: str) -> dict[str, str]:
    return {n: value for n, value in headers.items() if n.lower() not in (*_OURS, *ours)}


async def passed(request: HttpRequest, raw: bytes, endpoint: Endpoint) -> Response:
    """Send a request on, and its answer back as it comes.

    Raises:
        ApiError: the other server cannot be reached, broke off before its answer, or is a gateway
            that cannot tell tenants apart.
    """
    response: Stream | None = None
    sent = _kept(request.headers, "content-encoding")  # the body was unpacked
    call = endpoint.open(request.method, request.target, raw, sent)
    try:
        async with call as answer:
            if request.tenant and GATEWAY_HEADER in answer.headers:
                raise ApiError(502, f"the server of this model {NO_TENANTS}", kind="server_error")
            response = Stream(request, status=answer.status, headers=_kept(answer.headers))
            await response.begin()
            while data := await answer.some():
                await response.begin(data)
    except (BrokenError, TimeoutError) as error:
        if response is None or not response.begun:
            raise unavailable(f"the server of this model {reason_of(error)}") from None
        if request.transport is not None:  # a client sees that the answer is not whole
            request.transport.close()
    return response
