"""KV that moves between two real `vllm serve` by NIXL: the tokens stay those of a server alone."""

from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import KvPlaced
from tests.rollout.contract import Bench, ids
from tests.runtime.vllm_bench import needs_nixl
from tests.runtime.vllm_serve import (
    KV_LEASE_S,
    NIXL,
    PROMPT,
    VllmServe,
    cut,
    direct,
    few_cores,
    needs_serve,
    rest,
    serve_bench,
)

pytestmark = [*needs_serve, needs_nixl, few_cores]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Bench, list[VllmServe]]]:
    folder = tmp_path_factory.mktemp("nixl")
    with serve_bench(folder, options=NIXL, stream_interval=2, kv_lease_s=KV_LEASE_S) as served:
        yield served


@pytest.fixture(scope="module")
def bench(served: tuple[Bench, list[VllmServe]]) -> Bench:
    return served[0]


@pytest.fixture(scope="module")
def url(served: tuple[Bench, list[VllmServe]]) -> str:
    return served[1][0].url


@needs_nixl
def test_kv_moved_between_servers_makes_no_difference(bench, url):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        assert one.capabilities.export_kv
        expected = await direct(url, ids("traveller", PROMPT))
        context = await cut(bench, one, "traveller", ids("traveller", PROMPT))
        name = TrajectoryId("traveller")
        assert one.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        other.import_kv(name, GroupId("g"), context, handle)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("kv", len(context) // 32 * 32)
        assert await rest(bench, other, "traveller", context) == expected

    bench.run(main())


@needs_nixl
def test_a_handle_that_is_nearly_over_or_whose_source_is_unknown_costs_a_prefill(bench, url):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        expected = await direct(url, ids("late", PROMPT))
        context = await cut(bench, one, "late", ids("late", PROMPT))
        name = TrajectoryId("late")
        one.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        late = msgspec.structs.replace(handle, expires_s=bench.loop.time() + 4.0)
        gone = {**handle.params["kv"], "remote_port": 9, "remote_engine_id": "gone"}
        lost = msgspec.structs.replace(handle, params={"kv": gone, "salt": ""})
        for each in (late, lost):
            other.import_kv(name, GroupId("g"), context, each)
            _, placed = await bench.recorder.take("placed")
            assert isinstance(placed, KvPlaced)
            assert placed.way == "prefill"
        assert await rest(bench, other, "late", context) == expected

    bench.run(main())
