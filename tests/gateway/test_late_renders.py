"""A render that is late is asked of another engine, and what comes first counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from heddle_gateway import rendering
from heddle_gateway.rendering import RenderingEngines
from heddle_runtime.generation import RenderError


class Engine:
    """Answers its name, or fails with a status, after some seconds."""

    def __init__(self, name: str, after_s: float, status: int = 200) -> None:
        self.url, self.after_s, self.status = name, after_s, status
        self.engine = SimpleNamespace(takes_steps=True)
        self.facts = SimpleNamespace(adapters=())
        self.calls = self.cancelled = 0

    @property
    def endpoint(self) -> "Engine":
        return self


class Renderer:
    def __init__(self, engine: Engine, *, generates: bool) -> None:
        self.engine = engine

    async def call(self, path: str, body: Any) -> str:
        engine = self.engine
        engine.calls += 1
        try:
            await asyncio.sleep(engine.after_s)
        except asyncio.CancelledError:
            engine.cancelled += 1
            raise
        if engine.status != 200:
            raise RenderError(engine.status, {"message": engine.url})
        return engine.url

    derender = call


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "HttpRenderer", Renderer)
    monkeypatch.setattr(rendering, "HEDGE_S", 0.05)


def over(*engines: Engine) -> RenderingEngines:
    launcher: Any = SimpleNamespace(registered=engines, usable=engines)
    return RenderingEngines(launcher, wait_s=0.0)


A, B = "a", "b"
CASES: dict[str, tuple[list[Engine], str | int, list[int]]] = {
    "in time": ([Engine(A, 0.0), Engine(B, 0.0)], A, [1, 0]),
    "late, and first": ([Engine(A, 0.1), Engine(B, 0.3)], A, [1, 1]),
    "late, and overtaken": ([Engine(A, 9.0), Engine(B, 0.0)], B, [1, 1]),
    "late, and alone": ([Engine(A, 0.1)], A, [1]),
    "broken": ([Engine(A, 0.0, 502), Engine(B, 0.0)], B, [1, 1]),
    "late, then broken": ([Engine(A, 0.1, 502), Engine(B, 0.2)], B, [1, 1]),
    "late, and the other broken": ([Engine(A, 0.2), Engine(B, 0.0, 502)], A, [1, 1]),
    "refused": ([Engine(A, 0.0, 400), Engine(B, 0.0)], 400, [1, 0]),
    "late, and refused elsewhere": ([Engine(A, 9.0), Engine(B, 0.0, 400)], 400, [1, 1]),
    "all broken": ([Engine(A, 0.0, 502), Engine(B, 0.0, 503)], 502, [1, 1]),
    "late, and all broken": ([Engine(A, 0.1, 502), Engine(B, 0.1, 503)], 502, [1, 1]),
    "late, alone and broken": ([Engine(A, 0.1, 502)], 502, [1]),
    "the third": ([Engine(A, 9.0), Engine(B, 9.0), Engine("c", 0.0)], "c", [1, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_first_counts(case: str):
    engines, expected, calls = CASES[case]

    async def run() -> None:
        asked = over(*engines).call("/tokenize", {})
        if isinstance(expected, str):
            assert await asked == expected
        else:
            with pytest.raises(RenderError) as failed:
                await asked
            assert failed.value.status == expected
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert [each.calls for each in engines] == calls
    assert [each.cancelled for each in engines if each.after_s == 9.0] == [
        1 for each in engines if each.after_s == 9.0
    ]


def test_a_refusal_of_ones_own_tokens_is_asked_of_another_engine():
    async def run() -> None:
        assert await over(Engine(A, 0.0, 400), Engine(B, 0.0)).derender("/x", {}) == B

    asyncio.run(run())


@pytest.mark.parametrize("after_s", [0.01, 0.1])
def test_who_is_cancelled_is_cancelled_and_leaves_no_call(after_s: float):
    async def run() -> None:
        engines = [Engine(A, 9.0), Engine(B, 9.0)]
        asked = asyncio.ensure_future(over(*engines).call("/tokenize", {}))
        await asyncio.sleep(after_s)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(0.01)
        assert [each.cancelled for each in engines] == [each.calls for each in engines]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
