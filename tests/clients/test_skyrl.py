"""SkyRL's own inference client, with the gateway as its only URL."""

import asyncio
import socket
import typing
import warnings
from typing import Any

import pytest

from heddle_core.events import (
    StepFinished,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
    WeightsUpdated,
)

pytest.importorskip("skyrl", reason="no SkyRL here; `make clients` has it")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def client_class() -> Any:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        typing_extensions = pytest.importorskip("typing_extensions")
        # SkyRL is for Python 3.12, from which on pydantic takes this class of `typing`.
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
            RemoteInferenceClient,
        )
    return RemoteInferenceClient


def at(client_class: Any, url: str) -> Any:
    return client_class(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="fake")


async def trajectory(client: Any, session: str, steps: int) -> list[int]:
    """As SkyRL's generator: token ids, several steps, and the end in any case."""
    context = list(range(100, 140))
    try:
        for step in range(steps):
            out = await client.generate(
                {
                    "prompt_token_ids": [context],
                    "sampling_params": {"max_tokens": 30, "temperature": 1.0, "logprobs": 1},
                    "session_ids": [session],
                    "cache_salt": "version-0",
                }
            )
            ids = out["response_ids"][0]
            assert len(out["response_logprobs"][0]) == len(ids) > 0
            assert out["stop_reasons"][0] in ("stop", "length")
            assert len(out["responses"][0].split()) in (len(ids), len(ids) - 1)
            context = [*context, *ids, *range(200 + step, 212 + step)]
    finally:
        await client.finish_session(session)
    return context


def test_trajectories_of_groups_are_what_its_generator_sends(client_class: Any, serve: Any):
    async def main(url: str) -> None:
        async with at(client_class, url) as client:
            names = [f"task-{n // 4}_{n % 4}" for n in range(16)]
            await asyncio.gather(*(trajectory(client, name, 3) for name in names))
            # The ids come again in the next epoch.
            await asyncio.gather(*(trajectory(client, name, 2) for name in names[:4]))

    with serve("--engines", "2", "--set", "serve.fake_tokens=20") as run:
        asyncio.run(main(run.url))
    arrived = run.events(TrajectoryArrived)
    assert len(arrived) == 20
    assert len({e.group for e in arrived}) == 4
    assert len(run.events(StepFinished)) == 16 * 3 + 4 * 2
    assert all(12 <= e.observation_tokens <= 13 for e in run.events(ToolReturned))
    assert {e.outcome for e in run.events(TrajectoryFinished)} == {"completed"}


def test_texts_prompts_and_tokens_go_through(client_class: Any, serve: Any):
    async def main(url: str) -> None:
        async with at(client_class, url) as client:
            messages = [{"role": "user", "content": "What is three and four ?"}]
            body = {"messages": messages, "max_tokens": 20, "session_id": "s"}
            answer = await client.chat_completion({"json": dict(body)})
            assert answer["choices"][0]["message"]["content"]
            rendered = await client.render_chat_completion({"json": dict(body)})
            assert rendered["token_ids"]
            answer = await client.completion({"json": {"prompt": "one two", "max_tokens": 5}})
            assert answer["usage"]["prompt_tokens"] == 2
            [ids] = await client.tokenize(["t17 t18"])
            assert ids == [17, 18]
            assert await client.detokenize([ids]) == ["t17 t18"]
            sampled = await client.sample(
                {
                    "json": {
                        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [20, 21]}]},
                        "sampling_params": {"max_tokens": 6},
                    }
                }
            )
            [sequence] = sampled["sequences"]
            assert len(sequence["tokens"]) == len(sequence["logprobs"]) > 0

    with serve() as run:
        asyncio.run(main(run.url))


def test_a_weight_update_passes_through_and_held_steps_go_on(client_class: Any, serve: Any):
    async def main(url: str) -> None:
        async with at(client_class, url) as client:
            assert await client.get_world_size() == (2, 2)
            await client.pause_generation()
            held = asyncio.create_task(trajectory(client, "a_0", 2))
            await asyncio.sleep(0.3)
            assert not held.done()
            await client.start_weight_update()
            await client.update_named_weights({"names": ["w"], "shapes": [[2, 2]]})
            await client.update_weights_nccl({"names": ["w"]})
            await client.finish_weight_update()
            await client.reset_prefix_cache()
            await client.resume_generation()
            assert len(await held) > 40
            await client.sleep(level=1)
            await client.wake_up(tags=["weights"])
            await client.wake_up(tags=["kv_cache"])
            await trajectory(client, "a_1", 1)

    with serve("--engines", "2") as run:
        asyncio.run(main(run.url))
    assert next(e.version for e in run.events(WeightsUpdated)) == 1
    assert len(run.events(TrajectoryFinished)) == 2


def test_a_gateway_that_is_not_there_yet_is_called_again(client_class: Any, serve: Any):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def main() -> Any:
        async with at(client_class, f"http://127.0.0.1:{port}") as client:
            waiting = asyncio.create_task(trajectory(client, "a_0", 1))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            manager = serve("--port", str(port))
            run = await asyncio.to_thread(manager.__enter__)
            try:
                assert len(await waiting) > 40
            finally:
                await asyncio.to_thread(manager.__exit__, None, None, None)
            return run

    assert len(asyncio.run(main()).events(StepFinished)) == 1
