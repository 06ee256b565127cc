"""Drafts by n-grams change no token of a real engine, and are counted."""

from collections.abc import Iterator

import pytest

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineClient
from heddle_rollout.speculation import read_speculation
from heddle_runtime.vllm.engine import VllmEngine
from tests.rollout.contract import Bench, grown, ids, request, until
from tests.runtime.vllm_bench import needs_vllm, vllm_bench

pytestmark = [*needs_vllm, pytest.mark.soak]

DRAFTS, OUTPUT = 3, 120


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with vllm_bench(tmp_path_factory.mktemp("plain"), progress_s=0.02) as bench:
        yield bench


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    pytest.importorskip("numba")
    config = read_speculation(f"ngram:{DRAFTS}").vllm_config()
    folder = tmp_path_factory.mktemp("drafting")
    with vllm_bench(folder, progress_s=0.02, speculative=config) as bench:
        yield bench


def context_of(name: str) -> list[int]:
    """A prompt that repeats itself, so that n-grams are found in it."""
    return ids(name, 30) * 6


async def whole(bench: Bench, engine: EngineClient, name: str) -> list[int]:
    context = context_of(name)
    engine.start(request(name, context, OUTPUT))
    return grown(context, await bench.recorder.end_of(name))


def test_tokens_are_those_of_an_engine_without_drafts(plain: Bench, drafting: Bench):
    names = [f"alike{i}" for i in range(4)]

    async def made(bench: Bench) -> tuple[list[list[int]], tuple[int, ...]]:
        engine = await bench.engine()
        found = [await whole(bench, engine, name) for name in names]
        assert isinstance(engine, VllmEngine)
        if bench is drafting:
            await until(lambda: bool(engine.drafted))
        return found, engine.drafted

    expected, none = plain.run(made(plain))
    found, drafted = drafting.run(made(drafting))
    assert found == expected
    assert none == ()
    iterations, *accepted = drafted
    assert len(accepted) == DRAFTS
    assert 0 < iterations <= len(names) * OUTPUT
    assert accepted == sorted(accepted, reverse=True)


def test_a_step_that_is_cut_goes_on_with_the_same_tokens(plain: Bench, drafting: Bench):
    name = "cut"

    async def undisturbed() -> list[int]:
        return await whole(plain, await plain.engine(), name)

    async def cut() -> list[int]:
        engine = await drafting.engine()
        context = context_of(name)
        engine.start(request(name, context, OUTPUT))
        assert isinstance(engine, VllmEngine)

        def heard() -> bool:
            dispatch = engine._running.get(TrajectoryId(name))
            return dispatch is None or bool(dispatch.made)

        await until(heard)
        engine.abort(TrajectoryId(name))
        so_far = grown(context, await drafting.recorder.end_of(name))
        left = len(context) + OUTPUT - len(so_far)
        if not left:
            return so_far
        engine.start(request(name, so_far, left, shared=len(so_far)))
        return grown(so_far, await drafting.recorder.end_of(name))

    assert drafting.run(cut()) == plain.run(undisturbed())
