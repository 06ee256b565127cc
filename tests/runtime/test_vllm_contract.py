"""The engine contract, on vLLM."""

from collections.abc import Iterator

import pytest

from tests.rollout.contract import Bench, EngineContract
from tests.runtime.vllm_bench import needs_vllm, vllm_bench

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with vllm_bench(tmp_path_factory.mktemp("vllm")) as bench:
        yield bench


class TestVllmEngine(EngineContract):
    pass
