"""A gateway on simulated engines behind a real socket, for real clients."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from campaigns.faults.gateway_bench import Bench

if TYPE_CHECKING:
    from heddle_gateway.front import Front

NO_AIOHTTP = "tests of the gateway need aiohttp: pip install 'heddle-rl[dev]'"
T = TypeVar("T")


class Served(Bench):
    """A bench that answers HTTP at `url`."""

    front: "Front"
    url: str


@asynccontextmanager
async def served(
    *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Served]:
    from heddle_gateway.app import listening
    from heddle_gateway.front import Front, FrontSettings
    from heddle_gateway.openai_api import ServedModel

    bench = Served(**({"speed": 50.0} | options))
    bench.front = Front(
        gateway=bench.gateway,
        model=ServedModel(names=("fake",), context_tokens=32_768),
        settings=FrontSettings(**(settings or {})),
        renderer=bench.renderer,
    )
    async with bench.running(), listening(bench.front, host="127.0.0.1", port=0) as port:
        bench.url = f"http://127.0.0.1:{port}"
        yield bench
    assert bench.replays()


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)
