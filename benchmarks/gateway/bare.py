"""The calls that `heddle serve` makes for a request, by its own HTTP code, and nothing else.

    PYTHONPATH=.:benchmarks python -m gateway.bare PORT ENGINE_PORT...

A chat step is two calls, its render and the chat itself; other requests are one. There are no
sessions, no policy, no journal, no metrics: what a request costs here is the least that the
gateway's could cost with this HTTP code and these calls.
"""

import asyncio
import sys
from contextlib import suppress
from itertools import cycle

from heddle_gateway.http import HttpRequest, Response, Stream
from heddle_gateway.http_server import serving
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LIMIT_S = 60.0


async def run(port: int, engine_ports: list[int]) -> None:
    """Serve until the process is ended."""
    connections = Connections()
    engines = cycle([Endpoint(f"http://127.0.0.1:{each}", connections) for each in engine_ports])

    async def handle(request: HttpRequest) -> Response:
        if request.method == "GET":
            return Response(b"{}", headers=JSON)
        body, engine = await request.read(32 << 20, LIMIT_S), next(engines)
        if b'"stream":true' in body[:400] + body[-400:]:
            stream = Stream(request, headers={"Content-Type": "text/event-stream"})
            async with engine.open("POST", request.path, body, JSON) as answer:
                while data := await answer.some():
                    await stream.begin(data)
            return stream
        for path in (f"{CHAT}/render", CHAT) if request.path == CHAT else (request.path,):
            made = await engine.send(path, body, JSON["Content-Type"], limit_s=LIMIT_S)
        return Response(made.data, headers=JSON)

    async with serving(
        handle, host="127.0.0.1", port=port, body_bytes=32 << 20, head_s=60.0, grace_s=0.1
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(run(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
