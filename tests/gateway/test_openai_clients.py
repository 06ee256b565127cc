"""The openai package as the client: answers, streams, timeouts with retries, disconnects."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from heddle_core.events import (
    StepFinished,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_gateway.fake_engines import encode
from heddle_gateway.sessions import SessionLimits
from tests.gateway.served import NO_AIOHTTP, Served, run, served
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)
openai = pytest.importorskip("openai", reason="openai is not installed")

HELLO: Any = [{"role": "user", "content": "What is the sum of three and four ?"}]


def client_of(bench: Served, **options: Any) -> Any:
    return openai.AsyncOpenAI(
        **({"base_url": f"{bench.url}/v1", "api_key": "none", "max_retries": 0} | options)
    )


async def until(condition: Any, limit_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def streamed(client: Any, **body: Any) -> tuple[str, list[Any]]:
    chunks = [c async for c in await client.chat.completions.create(stream=True, **body)]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks


def test_a_stream_has_the_text_of_the_whole_answer():
    async def main() -> None:
        async with served() as bench, client_of(bench) as client:
            body = {"model": "fake", "messages": HELLO, "max_tokens": 60}
            told = {"X-Session-ID": "s"}
            whole = await client.chat.completions.create(**body, extra_headers=told)
            text = whole.choices[0].message.content
            assert len(text.split()) + (whole.choices[0].finish_reason == "stop") == (
                whole.usage.completion_tokens
            )
            # The same session and the same request: the kept answer.
            again, chunks = await streamed(
                client, **body, extra_headers=told, stream_options={"include_usage": True}
            )
            assert again == text
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].usage == whole.usage
            assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] is not None
            assert len({c.id for c in chunks}) == 1
            assert {choice.index for c in chunks for choice in c.choices} == {0}
            # And one that is generated while it is streamed.
            fresh, chunks = await streamed(client, **body, extra_headers={"X-Session-ID": "t"})
            assert fresh
            assert {choice.index for c in chunks for choice in c.choices} == {0}
            assert len(bench.events(StepFinished)) == 2

    run(main())


def test_tokens_reach_a_stream_before_the_end_of_the_step():
    async def main() -> None:
        async with (
            served(speed=1.0, mean_tokens=10**9) as bench,
            client_of(bench) as client,
        ):
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=10_000, stream=True
            )
            await until(lambda: list(bench.gateway.sessions.under_way))
            [step] = bench.gateway.sessions.under_way
            step.take([20, 21, 22])  # as engines report them
            texts = []
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
                if any(texts):
                    break
            assert "".join(texts) == "t20 t21"
            assert not step.over
            await stream.close()

    run(main())


def test_completions_take_text_or_ids_and_give_ids_back():
    async def main() -> None:
        async with served() as bench, client_of(bench) as client:
            for prompt in ("one two three", [20, 21, 22]):
                answer = await client.completions.create(
                    model="fake",
                    prompt=prompt,
                    max_tokens=5,
                    extra_body={"return_token_ids": True},
                )
                ids = encode(prompt) if isinstance(prompt, str) else prompt
                assert answer.model_dump()["prompt_token_ids"] == ids
                assert answer.usage.completion_tokens == len(answer.choices[0].token_ids) <= 5
            stream = await client.completions.create(
                model="fake", prompt="a b", max_tokens=5, stream=True
            )
            assert "".join([c.choices[0].text async for c in stream])
            models = [m.id async for m in client.models.list()]
            assert models == ["fake"]

    run(main())


def test_log_probs_come_with_the_tokens_streamed_or_not():
    async def main() -> None:
        async with served() as bench, client_of(bench) as client:
            body = {"model": "fake", "messages": HELLO, "max_tokens": 5, "logprobs": True}
            whole = await client.chat.completions.create(**body)
            assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
            _, chunks = await streamed(client, **body)
            found = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
            assert sum(len(each.content) for each in found) in range(1, 6)

    run(main())


def test_an_agent_without_headers_is_one_trajectory_over_its_steps():
    async def agent(client: Any, n: int) -> None:
        messages: Any = [
            {"role": "system", "content": "You are an agent . " * 40},
            {"role": "user", "content": f"Task {n} : mend the bug {n} ."},
        ]
        for step in range(4):
            answer = await client.chat.completions.create(
                model="fake", messages=messages, max_tokens=40
            )
            messages = [
                *messages,
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": f"The program printed {n} {step} ."},
            ]

    async def main() -> None:
        async with served() as bench, client_of(bench) as client:
            await asyncio.gather(*(agent(client, n) for n in range(16)))
            arrived = bench.events(TrajectoryArrived)
            assert len(arrived) == 16
            steps = [e.trajectory for e in bench.events(StepFinished)]
            assert all(steps.count(t.trajectory) == 4 for t in arrived)
            assert all(e.observation_tokens < 20 for e in bench.events(ToolReturned))

    run(main())


def test_a_client_that_times_out_and_retries_gets_one_generation():
    async def main() -> None:
        async with (
            served(speed=1.0, mean_tokens=10**9, limits=SessionLimits(grace_s=60.0)) as bench,
            client_of(bench, timeout=0.5, max_retries=8) as client,
        ):
            for headers in ({}, {"X-Session-ID": "s"}):
                before = len(bench.events(StepFinished))
                answer = await client.chat.completions.create(
                    model="fake", messages=HELLO, max_tokens=150, extra_headers=headers
                )
                assert answer.usage.completion_tokens == 150
                assert len(bench.events(StepFinished)) == before + 1
            assert len(bench.events(TrajectoryArrived)) == 2
            assert not bench.events(TrajectoryFinished)

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slot(stream: bool):
    async def main() -> None:
        async with (
            served(speed=1.0, mean_tokens=10**9, limits=SessionLimits(grace_s=0.2)) as bench,
            client_of(bench, timeout=1.0) as client,
        ):
            asking = asyncio.create_task(
                client.chat.completions.create(
                    model="fake", messages=HELLO, max_tokens=20_000, stream=stream
                )
            )
            await until(lambda: bench.gateway.driver.computes)
            if stream:
                await (await asking).close()
            else:
                with pytest.raises(openai.APITimeoutError):
                    await asking
            await until(lambda: not bench.gateway.driver.computes)
            [end] = bench.events(TrajectoryFinished)
            assert end.outcome == "cancelled"
            assert bench.front.metrics.open == 0

    run(main())


def test_errors_are_openais():
    async def main() -> None:
        async with served(settings={"api_key": "right"}) as bench:
            async with client_of(bench) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="fake", messages=HELLO)
            async with client_of(bench, api_key="right") as client:
                create = client.chat.completions.create
                with pytest.raises(openai.NotFoundError) as unknown:
                    await create(model="gpt-9", messages=HELLO)
                assert unknown.value.code == "model_not_found"
                for body, param in (
                    ({"messages": []}, "messages"),
                    ({"max_tokens": -1}, "max_tokens"),
                ):
                    with pytest.raises(openai.BadRequestError) as refused:
                        await create(**({"model": "fake", "messages": HELLO} | body))
                    assert refused.value.param == param
                long = [{"role": "user", "content": "word " * 40_000}]
                with pytest.raises(openai.BadRequestError) as refused:
                    await create(model="fake", messages=long)
                assert refused.value.code == "context_length_exceeded"

    run(main())


@pytest.fixture
def in_a_thread() -> Iterator[Served]:
    """A gateway whose event loop runs beside the test."""
    ready, over = threading.Event(), threading.Event()
    found: list[Served] = []

    async def main() -> None:
        async with served(mean_tokens=1000) as bench:
            found.append(bench)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: run(main()))
    thread.start()
    assert ready.wait(60.0)
    yield found[0]
    over.set()
    thread.join()


def test_the_client_that_blocks_is_answered_too(in_a_thread: Served):
    with openai.OpenAI(base_url=f"{in_a_thread.url}/sessions/a/b_1/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9)
        assert answer.choices[0].message.content
        with client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=9, stream=True
        ) as stream:
            text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        assert text == answer.choices[0].message.content
    [arrived] = in_a_thread.events(TrajectoryArrived)
    assert (arrived.trajectory, arrived.group) == ("a/b_1", "a/b")
