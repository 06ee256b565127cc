"""The engine that does everything wrong: what it answers when well, and each of its faults."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

aiohttp = pytest.importorskip(
    "aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'"
)

from campaigns.faults import mock_bodies  # noqa: E402
from campaigns.faults.answers_requests import (  # noqa: E402
    Sent,
    direct_s,
    hostile_request,
    new_request,
    send,
)
from campaigns.faults.answers_scene import in_virtual_time_too  # noqa: E402
from campaigns.faults.mock_answers import BLOCK, BLOCKS  # noqa: E402
from campaigns.faults.mock_bodies import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    GENERATE,
    MODEL,
    continued,
    ids_of,
    text_of,
)
from campaigns.faults.mock_faults import (  # noqa: E402
    ANSWERS,
    CALLS,
    ENGINES,
    KINDS,
    SLOW_FACTOR,
    STREAMS,
    Fault,
)
from campaigns.faults.mock_vllm import MockVllm  # noqa: E402
from heddle_runtime.vllm_http.metrics import read_iterations, read_sample  # noqa: E402
from tests.runtime import counting_process  # noqa: E402
from tests.runtime.fake_vllm import FakeVllm  # noqa: E402

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hi"},
    GENERATE: {"token_ids": [2104, 2105]},
}
IDS = {
    CHAT: ids_of("<user>hi<assistant>"),
    COMPLETIONS: ids_of("hi"),
    GENERATE: [2104, 2105],
}
PATHS = [CHAT, COMPLETIONS, GENERATE]
TOKENS = 9


class Direct:
    """A client of one engine, without a gateway."""

    def __init__(self, engine: Any, http: Any) -> None:
        self.engine, self.http = engine, http

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.engine.url + path, json=body, **options) as answer:
            raw = await answer.read()
            return answer.status, raw

    async def whole(self, path: str, **fields: Any) -> tuple[int, Any]:
        status, raw = await self.post(path, body_of(path, **fields))
        return status, json.loads(raw)

    async def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events, without `[DONE]`, which must be the last."""
        status, raw = await self.post(path, body_of(path, stream=True, **fields))
        assert status == 200, raw
        lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, **PROMPTS[path]}
    of_body = ("stream", "stream_options", "return_token_ids", "messages", "prompt", "token_ids")
    sampling = {name: value for name, value in fields.items() if name not in of_body}
    body |= {name: value for name, value in fields.items() if name in of_body}
    return body | ({"sampling_params": sampling} if path == GENERATE else sampling)


@asynccontextmanager
async def direct(**options: Any) -> AsyncIterator[Direct]:
    engine = await MockVllm(**options).start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Direct(engine, http)
    finally:
        await engine.close()


@asynccontextmanager
async def faulty(kind: str, *, seconds: float = 5.0, **options: Any) -> AsyncIterator[Direct]:
    async with direct(**options) as at:
        await at.engine.begin(Fault(kind=kind, engine=0, at_s=0.0, seconds=seconds))
        yield at


def run(main: Coroutine[Any, Any, None]) -> None:
    in_virtual_time_too(main)


def tokens_of(events: list[Any]) -> list[int]:
    choices = [choice for each in events for choice in each.get("choices", [])]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def text_in(path: str, events: list[Any]) -> str:
    choices = [choice for each in events for choice in each["choices"]]
    if path == CHAT:
        return "".join(choice["delta"]["content"] for choice in choices)
    return "".join(choice["text"] for choice in choices)


# -- a well engine --------------------------------------------------------------------------------


def test_tokens_are_those_of_the_other_engines_without_a_model():
    draw = random.Random(1)
    for length in (1, 3, 7, 50):
        context = [draw.randrange(1 << 16) for _ in range(length)]
        assert mock_bodies.next_token(context) == counting_process.next_token(context, MODEL)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_every_token_once_and_its_counts(path: str):
    async def main() -> None:
        async with direct() as at:
            options = {"include_usage": True}
            events = await at.stream(
                path, max_tokens=TOKENS, return_token_ids=True, stream_options=options
            )
            made = continued(IDS[path], TOKENS)
            assert tokens_of(events) == made
            first, *_, last = events
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == TOKENS
            assert last["usage"]["prompt_tokens"] == len(IDS[path])
            ends = [c["finish_reason"] for e in events for c in e["choices"]]
            assert [end for end in ends if end] == ["length"]
            if path != GENERATE:
                assert text_in(path, events[:-1]) == text_of(made)
            if path == CHAT:
                assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                assert first["prompt_token_ids"] == IDS[path]
            elif path == COMPLETIONS:
                assert first["choices"][0]["prompt_token_ids"] == IDS[path]
            without = await at.stream(path, max_tokens=TOKENS)
            assert not any("usage" in event for event in without)
            assert bool(tokens_of(without)) is (path == GENERATE)

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [True, False])
def test_an_output_ends_at_a_stop_token_or_a_stop_string(path: str, streamed: bool):
    made = continued(IDS[path], TOKENS)

    async def ended(at: Direct, **fields: Any) -> tuple[str, Any, Any]:
        if streamed:
            events = await at.stream(path, max_tokens=TOKENS, return_token_ids=True, **fields)
            (end,) = [c for e in events for c in e["choices"] if c["finish_reason"]]
            text = "" if path == GENERATE else text_in(path, events)
            return text, end, tokens_of(events)
        _, answer = await at.whole(path, max_tokens=TOKENS, return_token_ids=True, **fields)
        (end,) = answer["choices"]
        text = end.get("text", end.get("message", {}).get("content", ""))
        return text, end, end["token_ids"]

    async def main() -> None:
        async with direct() as at:
            text, end, tokens = await ended(at, stop_token_ids=[made[4]])
            assert (end["finish_reason"], end["stop_reason"]) == ("stop", made[4])
            assert tokens == made[:5]
            text_too = path != GENERATE
            assert text == text_of(made[:4]) * text_too
            stop = f"{made[2]} t{made[3]}"
            text, end, tokens = await ended(at, stop=[stop])
            assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)
            assert tokens == made[:4]
            assert text == (text_of(made[:2]) + "t") * text_too

    run(main())


@pytest.mark.parametrize(
    ("path", "count"),
    [(COMPLETIONS, 16), (CHAT, 40 - len(IDS[CHAT])), (GENERATE, 38)],
)
def test_without_max_tokens_a_completion_has_16_and_others_fill_the_context(path, count):
    async def main() -> None:
        async with direct(context_tokens=40) as at:
            _, answer = await at.whole(path)
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == "length"

    run(main())


@pytest.mark.parametrize("path", PATHS)
def test_log_probs_are_those_of_each_token(path: str):
    made = continued(IDS[path], 5)
    asked = {CHAT: {"logprobs": True, "top_logprobs": 1}}.get(path, {"logprobs": 1})

    async def main() -> None:
        async with direct() as at:
            _, answer = await at.whole(path, max_tokens=5, **asked)
            events = await at.stream(path, max_tokens=5, **asked)
            whole = answer["choices"][0]["logprobs"]
            parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
            if path == COMPLETIONS:
                assert whole["tokens"] == [text_of([token]) for token in made]
                assert [t for part in parts for t in part["tokens"]] == whole["tokens"]
                offsets = [o for part in parts for o in part["text_offset"]]
                assert offsets == whole["text_offset"]
                assert offsets[2] == len(text_of(made[:2]))
            else:
                content = [entry for part in parts for entry in part["content"]]
                assert content == whole["content"]
                key, values = ("token", [text_of([t]) for t in made])
                if path == GENERATE:
                    key, values = ("token_id", made)
                assert [entry[key] for entry in content] == values

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_rendering_leaves_out_what_equals_a_default(path: str):
    async def main() -> None:
        async with direct(context_tokens=1000) as at:
            for wanted, shown in ((16, None), (17, 17), (None, None)):
                body = body_of(path, temperature=0.5, max_tokens=wanted)
                _, raw = await at.post(f"{path}/render", body)
                answer = json.loads(raw)
                (made,) = [answer] if path == CHAT else answer
                assert made["token_ids"] == IDS[path]
                sampling = made["sampling_params"]
                assert sampling["temperature"] == 0.5
                if wanted is None and path == CHAT:
                    shown = 1000 - len(IDS[CHAT])
                assert sampling.get("max_tokens") == shown
                assert "seed" not in sampling
            _, raw = await at.post(f"{path}/render", body_of(path, temperature=-1))
            assert json.loads(raw)["error"]["param"] == "temperature"

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_derendering_gives_the_text_of_tokens(path: str):
    async def main() -> None:
        async with direct() as at:
            made = continued(IDS[path], 3)
            choice = {"index": 0, "token_ids": made, "finish_reason": "length"}
            response = {"request_id": "r", "choices": [choice]}
            count: Any = 7
            body: dict[str, Any] = {"generate_response": response, "prompt_tokens": count}
            if path == COMPLETIONS:
                body = {"generate_responses": [response], "prompt_tokens": [count]}
            _, raw = await at.post(f"{path}/derender", body)
            answer = json.loads(raw)
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text == text_of(made)
            assert answer["usage"]["total_tokens"] == 10

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_derendering_of_chunks_gives_the_text_of_all_tokens_and_one_role(path: str):
    async def main() -> None:
        async with direct() as at:
            made, state, events = continued(IDS[path], 5), None, []
            for ids, end in ((made[:2], None), (made[2:4], None), (made[4:], "length")):
                choice = {"index": 0, "token_ids": ids, "finish_reason": end}
                chunk = {"request_id": "r", "choices": [choice]}
                body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
                status, raw = await at.post(f"{path}/derender", body)
                assert status == 200
                answer = json.loads(raw)
                state = answer["stream_state"]
                events.append(answer["chunk"])
            assert text_in(path, events) == text_of(made)
            ends = [event["choices"][0]["finish_reason"] for event in events]
            assert ends == [None, None, "length"]
            if path == CHAT:
                roles = [event["choices"][0]["delta"]["role"] for event in events]
                assert roles == ["assistant", None, None]
            none = {"request_id": "r", "choices": [{"index": 0, "token_ids": []}]}
            body = {"generate_response": none, "generate_responses": [none]}
            assert (await at.post(f"{path}/derender", body))[0] == 400

    run(main())


def test_metrics_count_iterations_that_give_a_token_and_kv_of_each_part_of_a_prompt():
    async def metrics(at: Direct) -> tuple[float, ...]:
        async with at.http.get(at.engine.url + "/metrics") as answer:
            text = await answer.text()
        sample = read_sample(text, (BLOCKS - 1) * BLOCK)
        iterations, tokens = read_iterations(text)
        return iterations or 0, tokens or 0, sample.running, sample.waiting, sample.kv_used_tokens

    async def main() -> None:
        async with direct(prefill_tokens=100, iteration_s=1.0) as at:
            assert await metrics(at) == (0, 0, 0, 0, 0)
            steps = [
                asyncio.create_task(at.whole(GENERATE, token_ids=[2000] * n, max_tokens=3))
                for n in (1000, 10)
            ]
            await asyncio.sleep(5.5)
            assert await metrics(at) == (0, 0, 1, 1, 500)
            assert at.engine.generated == 0
            assert [(await step)[0] for step in steps] == [200, 200]
            assert await metrics(at) == (4, 1016, 0, 0, 0)
            await asyncio.sleep(60.0)
            assert await metrics(at) == (4, 1016, 0, 0, 0)

    run(main())


def test_what_does_not_fit_waits_and_an_abort_ends_one():
    async def main() -> None:
        async with direct(max_running=2, iteration_s=1.0) as at:
            steps = [
                asyncio.create_task(
                    at.post(GENERATE, body_of(GENERATE, max_tokens=4) | {"request_id": f"a{n}"})
                )
                for n in range(4)
            ]
            await asyncio.sleep(2.5)
            done = await at.post(
                "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a0"]}
            )
            assert done[0] == 200
            answers = [json.loads(raw) for _, raw in await asyncio.gather(*steps)]
            ends = [a["choices"][0]["finish_reason"] for a in answers]
            assert ends == ["abort", "length", "length", "length"]
            assert at.engine.running == 0

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [400, 404, 408, 413, 422])
def test_a_marked_prompt_is_refused_in_words_of_its_own(path: str, status: int):
    async def main() -> None:
        async with direct() as at:
            for mark, streamed in (("", False), ("", True), ("render", False), ("sse", True)):
                text = f"one !{mark}{status} two"
                prompt = {
                    CHAT: {"messages": [{"role": "user", "content": text}]},
                    COMPLETIONS: {"prompt": text},
                    GENERATE: {"token_ids": ids_of(text)},
                }[path]
                if mark == "sse":
                    (event,) = await at.stream(path, max_tokens=4, **prompt)
                    said = event["error"]
                else:
                    found, answer = await at.whole(path, stream=streamed, max_tokens=4, **prompt)
                    assert found == status
                    said = answer["error"]
                assert said["code"] == status
                assert f"refused with {status}" in said["message"]
            *events, last = await at.stream(path, max_tokens=4, **marked(path, "!mid400"))
            assert last["error"]["code"] == 400
            assert events

    run(main())


def marked(path: str, text: str) -> dict[str, Any]:
    return {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text},
        GENERATE: {"token_ids": ids_of(text)},
    }[path]


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_generation_is_answered_by_the_fault(kind: str):
    async def main() -> None:
        async with faulty(kind) as at:
            if kind == "reset before headers":
                with pytest.raises(aiohttp.ClientError):
                    await at.post(CHAT, body_of(CHAT))
            else:
                url = at.engine.url + CHAT
                async with at.http.post(url, json=body_of(CHAT, stream=True)) as answer:
                    raw = await answer.read()
                    assert answer.status == int(kind.rpartition(" ")[2])
                    assert ("Retry-After" in answer.headers) is (answer.status in (429, 503))
                if kind.startswith("empty"):
                    assert raw == b""
                elif kind.startswith("html"):
                    assert raw.startswith(b"<html>")
                elif kind.startswith("no object"):
                    assert isinstance(json.loads(raw), list)
                else:
                    assert json.loads(raw)["error"]["message"] == f"mock fault {kind}"
            assert [each for each, _ in at.engine.spoiled] == [kind]
            await at.engine.end()
            assert (await at.whole(CHAT, max_tokens=3))[0] == 200

    run(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_damaged_by_the_fault(kind: str, path: str):
    async def read(at: Direct) -> tuple[bytes, str]:
        body = body_of(path, stream=True, max_tokens=TOKENS, return_token_ids=True)
        raw, how = b"", "whole"
        async with at.http.post(at.engine.url + path, json=body) as answer:
            assert answer.status == 200
            try:
                async with asyncio.timeout(30.0):
                    async for data in answer.content.iter_any():
                        raw += data
            except TimeoutError:
                how = "silent"
            except aiohttp.ClientError:
                how = "cut"
        return raw, how

    async def main() -> None:
        async with faulty(kind, seed="a") as at:
            raw, how = await read(at)
            await at.engine.end()
            well, _ = await read(at)
            assert raw != well
            if kind.startswith(("stall", "drip", "comments")):
                assert how == "silent"
                assert b"[DONE]" not in raw
                assert (b"still here" in raw) is (kind == "comments")
            elif kind.startswith("reset"):
                assert how == "cut"
            else:
                assert how == "whole"
                assert (b"[DONE]" in raw) is (kind != "no finish")
            lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
            if kind.startswith("event"):
                assert json.loads(lines[-1])["error"]["code"] == 500
                assert (len(lines) == 1) is kind.endswith("first")
            if kind == "chunk twice":
                assert len(tokens_of([json.loads(line) for line in lines])) == TOKENS + 1

    run(main())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_whole_engine_is_at_fault_and_comes_back_on_its_port(kind: str):
    async def main() -> None:
        async with direct() as at:
            begun = asyncio.create_task(at.post(GENERATE, body_of(GENERATE, max_tokens=200)))
            await asyncio.sleep(1.0)
            fault = Fault(kind=kind, engine=0, at_s=0.0, seconds=5.0)
            made, url = at.engine.generated, at.engine.url
            await at.engine.begin(fault)
            async with aiohttp.ClientSession() as other:
                late = asyncio.create_task(state(other, at.engine.url))
                await asyncio.sleep(5.0)
                if kind in ("refuse", "die"):
                    assert await late == ("ClientConnectorError", "")
                elif kind == "silent":
                    assert not late.done()
                    assert at.engine.generated == made
                else:
                    shown = {"ill": ("503", "200"), "metrics 500": ("200", "500")}
                    assert await late == shown.get(kind, ("200", "200"))
                await at.engine.end()
                assert (await state(other, at.engine.url)) == ("200", "200")
            assert at.engine.url == url
            if kind == "die":
                with pytest.raises(aiohttp.ClientError):
                    await begun
            else:
                assert (await begun)[0] == 200

    async def state(http: Any, url: str) -> tuple[str, str]:
        try:
            async with http.get(url + "/health") as health, http.get(url + "/metrics") as metrics:
                return str(health.status), str(metrics.status)
        except aiohttp.ClientError as error:
            return type(error).__name__, ""

    run(main())


@pytest.mark.parametrize("kind", CALLS)
def test_rendering_is_at_fault_and_generating_is_not(kind: str):
    call, _, how = kind.partition(" ")

    async def main() -> None:
        async with faulty(kind) as at:
            choice = {"index": 0, "token_ids": [300], "finish_reason": "length"}
            body = body_of(CHAT)
            if call == "derender":
                body = {"generate_response": {"request_id": "r", "choices": [choice]}}
            calling = asyncio.create_task(at.post(f"{CHAT}/{call}", body))
            done, _ = await asyncio.wait([calling], timeout=100.0)
            if how == "hang":
                assert not done
                calling.cancel()
            elif how == "reset":
                assert isinstance(calling.exception(), aiohttp.ClientError)
            else:
                status, raw = await calling
                assert status == (int(how) if how.isdigit() else 200)
                assert b"counting" not in raw
            assert (await at.whole(CHAT, max_tokens=3))[0] == 200

    run(main())


def test_a_slow_engine_loses_nothing():
    async def main() -> None:
        async with direct() as at:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await at.whole(GENERATE, max_tokens=TOKENS)
            usual_s, began_s = loop.time() - began_s, loop.time()
            await at.engine.begin(Fault(kind="slow", engine=0, at_s=0.0, seconds=5.0))
            _, answer = await at.whole(GENERATE, max_tokens=TOKENS)
            assert answer["choices"][0]["token_ids"] == continued(IDS[GENERATE], TOKENS)
            assert loop.time() - began_s == pytest.approx(SLOW_FACTOR * usual_s)
            assert at.engine.dropped == []

    run(main())


def test_a_share_of_the_requests_is_hit_and_a_seed_draws_the_same():
    async def hit(seed: str) -> list[bool]:
        async with direct(seed=seed) as at:
            fault = Fault(kind="status 500", engine=0, at_s=0.0, seconds=5.0, share=0.5)
            await at.engine.begin(fault)
            return [(await at.whole(CHAT, max_tokens=1))[0] == 500 for _ in range(40)]

    async def main() -> None:
        first = await hit("a")
        assert 5 < sum(first) < 35
        assert first == await hit("a")
        assert first != await hit("b")

    run(main())


def test_every_kind_of_fault_is_in_one_group():
    assert len(set(KINDS)) == len(KINDS) == len([*ANSWERS, *STREAMS, *ENGINES, *CALLS]) + 1


# -- clients whose answers are known --------------------------------------------------------------


async def all_sent(at: Direct, requests: list[Sent]) -> list[Sent]:
    for sent in requests:
        sent.limit_s = direct_s(sent, iteration_s=0.05, prefill_tokens=8192)
    await asyncio.gather(*(send(at.http, at.engine.url, sent) for sent in requests))
    return requests


def test_requests_to_a_well_engine_have_nothing_wrong_and_take_the_time_stated():
    async def main() -> None:
        async with direct(max_running=1000, prefill_tokens=1 << 20) as at:
            draw = random.Random(7)
            requests = [new_request(draw, f"a{n}") for n in range(300)]
            requests += [hostile_request(draw, f"b{n}") for n in range(300)]
            for sent in await all_sent(at, requests):
                assert sent.wrong == "", sent
                if sent.refusal is None and sent.leaves_s is None:
                    assert sent.ended_s - sent.begun_s <= sent.limit_s + 1e-6
            assert {sent.kind for sent in requests} == {
                f"{path} {how}"
                for path in ("chat", "completion", "ids")
                for how in ("streamed", "whole")
            }
            refused = [sent for sent in requests if sent.refusal is not None]
            assert {sent.refusal[0] for sent in refused} == {400, 404, 408, 413, 422}

    run(main())


@pytest.mark.parametrize("kind", [*ANSWERS, *STREAMS])
def test_what_a_fault_does_to_an_answer_is_seen(kind: str):
    async def main() -> None:
        async with faulty(kind) as at:
            draw = random.Random(8)
            requests = [new_request(draw, f"a{n}") for n in range(40)]
            requests = [s for s in requests if len(s.made) > 2 and s.finish == "length"]
            seen = [sent for sent in await all_sent(at, requests) if sent.wrong]
            whole = [sent for sent in requests if not sent.streamed]
            assert len(seen) == len(requests), [sent for sent in requests if not sent.wrong]
            assert len(at.engine.spoiled) == len(requests)
            assert 0 < len(whole) < len(requests)

    run(main())


# -- the fake engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_fake_engine_answers_the_same(path: str):
    async def main() -> None:
        fake = FakeVllm()
        fake.scripted = False
        await fake.start()
        try:
            async with direct() as at:
                other = Direct(fake, at.http)
                for fields in (
                    {},
                    {"return_token_ids": True},
                    {"stop_token_ids": [continued(IDS[path], 4)[-1]]},
                    {"logprobs": True if path == CHAT else 1},
                ):
                    options = {"include_usage": True}
                    one, two = [
                        await each.stream(path, max_tokens=TOKENS, stream_options=options, **fields)
                        for each in (at, other)
                    ]
                    assert tokens_of(one) == tokens_of(two)
                    if path != GENERATE:
                        assert [set(event) for event in one] == [set(event) for event in two]
                        assert text_in(path, one) == text_in(path, two)
                        wholes = [
                            (await each.whole(path, max_tokens=TOKENS, **fields))[1]
                            for each in (at, other)
                        ]
                        assert wholes[0]["choices"] == wholes[1]["choices"]
        finally:
            await fake.close()

    asyncio.run(main())
