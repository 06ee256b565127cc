"""Requests for several answers: samples of a prompt, and several prompts."""

import asyncio
from typing import Any

import pytest

from heddle_core.events import StepFinished, TrajectoryArrived
from tests.gateway.served import NO_AIOHTTP, run

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway import http_server
from heddle_gateway.openai_api import joined_usage, sample
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from tests.gateway.test_http import IDS, client
from tests.gateway.test_streams import PATHS, Stream, asked, talking, told


@pytest.mark.parametrize("path", PATHS)
def test_samples_are_steps_of_trajectories_of_one_group_and_one_answer(path: str):
    async def main() -> None:
        async with talking() as at:
            body = asked(path, "one", 8, n=3, temperature=1.0, seed=5)
            status, answer = await at("POST", path, body)
            assert status == 200, answer
            assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
            texts = [
                c["message"]["content"] if path == CHAT else c["text"] for c in answer["choices"]
            ]
            assert texts == [told(path, body, 8)] * 3
            assert answer["usage"]["completion_tokens"] == 24
            assert answer["usage"]["total_tokens"] == 24 + answer["usage"]["prompt_tokens"]
            seeds = sorted(b["seed"] for s in at.servers for b in s.seen if "seed" in b)
            assert seeds == [5, 6, 7]
            assert not [b for s in at.servers for b in s.seen if b.get("n")]
            arrived = at.bench.events(TrajectoryArrived)
            assert [e.trajectory for e in arrived] == ["one", "one~1", "one~2"]
            assert len({e.group for e in arrived}) == 1
            assert (await at("POST", path, body))[1]["choices"] == answer["choices"]
            assert len(at.bench.events(StepFinished)) == 3

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_of_samples_has_the_index_of_each_and_one_end(path: str):
    async def main() -> None:
        async with talking() as at:
            options = {"include_usage": True}
            body = asked(path, "one", 8, n=2, temperature=1.0, stream_options=options)
            stream = await Stream().read(at, path, body)
            assert (stream.status, stream.done) == (200, 1)
            for index in (0, 1):
                mine = [c for c in stream.choices if c["index"] == index]
                parts = [(c.get("delta") or {}).get("content") or c.get("text") or "" for c in mine]
                assert "".join(parts) == told(path, body, 8)
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
            usages = [e["usage"] for e in stream.events if not e["choices"]]
            assert [usage["completion_tokens"] for usage in usages] == [16]
            assert len({event["id"] for event in stream.events}) == 1

    run(main())


def test_several_prompts_have_choices_in_their_order_and_count_once_each():
    async def main() -> None:
        async with talking() as at:
            body = asked(COMPLETIONS, "s", 4, n=2, temperature=1.0)
            prompts = ["one", "a longer two"]
            _, answer = await at("POST", COMPLETIONS, {**body, "prompt": prompts})
            texts = [choice["text"] for choice in answer["choices"]]
            expected = [told(COMPLETIONS, {"prompt": prompt}, 4) for prompt in prompts]
            assert texts == [expected[0]] * 2 + [expected[1]] * 2
            alone = [
                await at("POST", COMPLETIONS, {**body, "n": 1, "prompt": prompt})
                for prompt in prompts
            ]
            counted = sum(each["usage"]["prompt_tokens"] for _, each in alone)
            assert answer["usage"]["prompt_tokens"] == counted
            stream = await Stream().read(at, COMPLETIONS, {**body, "prompt": prompts})
            assert {choice["index"] for choice in stream.choices} == {0, 1, 2, 3}

    run(main())


def test_one_prompt_that_is_refused_refuses_the_request_and_no_step_begins():
    async def main() -> None:
        async with talking() as at:
            body = asked(COMPLETIONS, "s", 4, prompt=["one", ""])
            assert (await at("POST", COMPLETIONS, body))[0] == 400
            assert not at.bench.events(TrajectoryArrived)

    run(main())


def test_samples_of_token_ids_are_choices_and_an_abort_ends_them_all():
    async def main() -> None:
        async with client(mean_tokens=10**9) as http:
            sampling = {"max_tokens": 5, "n": 2}
            answer = await http.post("/inference/v1/generate", {**IDS, "sampling_params": sampling})
            assert [len(c["token_ids"]) for c in answer["choices"]] == [5, 5]
            long: dict[str, Any] = {**IDS, "request_id": "r"}
            long["sampling_params"] = {"max_tokens": 20_000, "n": 2}
            going = asyncio.create_task(http.post("/inference/v1/generate", long))
            while (await http("GET", "/load"))[1]["server_load"] < 2:
                await asyncio.sleep(0.01)
            assert (await http.post("/abort_requests", {"request_ids": ["r"]}))["aborted"] == 2
            ends = [choice["finish_reason"] for choice in (await going)["choices"]]
            assert ends == ["abort", "abort"]

    run(main())


def test_many_answers_of_a_large_body_are_refused_before_any_begins(monkeypatch):
    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 0)

    async def main() -> None:
        async with client(settings={"body_bytes": 100_000}, mean_tokens=2) as http:

            async def ask(path: str, **fields: Any) -> int:
                status, answer = await http("POST", path, {"max_tokens": 2, **fields})
                assert (status == 200) or "ask for fewer" in answer["error"]["message"]
                return status

            large, small = "x" * 20_000, "x" * 200
            messages = [{"role": "user", "content": "one two"}]
            assert await ask(CHAT, messages=messages, n=8, user=small) == 200
            assert await ask(CHAT, messages=messages, n=8, user=large) == 200
            assert await ask(CHAT, messages=messages, n=64, user=large) == 413
            assert await ask(COMPLETIONS, prompt=[small] * 300) == 200
            assert await ask(COMPLETIONS, prompt=["one"] * 64, user=large) == 413
            assert len(http.bench.events(StepFinished)) == 8 + 8 + 300

    run(main())


def test_details_of_usage_are_summed_where_they_are_numbers():
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    details = {"prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": None}}
    joined = joined_usage([usage | details] * 4, 2)
    assert joined["prompt_tokens_details"] == {"cached_tokens": 8, "audio_tokens": None}
    assert (joined["prompt_tokens"], joined["completion_tokens"]) == (10, 8)
    assert sample({"n": 3, "seed": 4, "stop": ["x"]}, 2) == {"seed": 6, "stop": ["x"]}
