"""Requests that engines answer themselves: what is sent, what is checked, what comes of a step."""

import asyncio
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from aiohttp import web

from campaigns.faults.answers_scene import in_virtual_time_too
from campaigns.faults.mock_bodies import continued, text_of
from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepRequest
from heddle_runtime.generation import Generation, Refusal, Relay
from heddle_runtime.vllm_http.endpoint import Answer
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.relay import (
    EngineError,
    cached_tokens,
    check_event,
    completion_tokens,
    engine_id,
    read_object,
    relay_body,
)
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.step import HttpStep
from heddle_runtime.vllm_http.stream import ProtocolError, read_chunk
from tests.rollout.contract import LONG_OUTPUT, ids, request, until
from tests.runtime.fake_vllm import MODEL
from tests.runtime.test_circuit import Listens
from tests.runtime.test_engine_life import QUICK, computing, streamed, two
from tests.runtime.test_http_engine import OUTPUT, PROMPT, one, run, setup


class Asked:
    """A client's request, and what an engine has sent of the answer since it began last."""

    def __init__(
        self, name: str, path: str = COMPLETIONS, *, output: int = OUTPUT, **options: Any
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.begun = 0
        self.prompt = ids(name, PROMPT)
        prompt: dict[str, Any] = {"prompt": self.prompt}
        if path == CHAT:
            prompt = {"messages": [{"role": "user", "content": name}]}
        self.relay = Relay(
            path=path,
            body={"model": MODEL, **prompt, "max_tokens": output, **options.pop("body", {})},
            streams=options.pop("streams", True),
            counts_tokens=options.pop("counts_tokens", True),
            on_begin=self._begin,
            on_event=self.events.append,
        )
        payload = Generation(on_tokens=self.tokens.extend, relay=self.relay)
        plain = request(name, self.prompt, output, exact=False)
        resumable = self.relay.counts_tokens
        self.step: StepRequest = msgspec.structs.replace(
            plain, payload=payload, resumable=resumable
        )

    def _begin(self) -> None:
        self.begun += 1
        self.events.clear()

    @property
    def text(self) -> str:
        found = [choice for event in self.events for choice in event["choices"]]
        return "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in found)


# -- what is sent ---------------------------------------------------------------------------------


def test_an_abort_names_a_request_as_vllm_does():
    assert engine_id(CHAT, "x") == "chatcmpl-x"
    assert engine_id(COMPLETIONS, "x") == "cmpl-x-0"


def test_what_is_not_counted_is_sent_as_the_client_sent_it():
    body = {"prompt": "a", "stream": False, "logprobs": 3}
    sent = relay_body(body, "r", streams=False, counts_tokens=False, counts_each=True)
    assert sent == {**body, "request_id": "r"}


@pytest.mark.parametrize(
    ("options", "streams", "counts_each", "continuous"),
    [
        (None, True, False, False),
        (None, False, True, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, False, False, False),
        ({"continuous_usage_stats": True}, True, False, False),
        ("nonsense", True, False, False),
    ],
)
def test_what_is_counted_is_sent_as_a_stream_with_ids_and_usage(
    options, streams, counts_each, continuous
):
    body = {"prompt": "a"} | ({} if options is None else {"stream_options": options})
    before = msgspec.json.encode(body)
    sent = relay_body(body, "r", streams=streams, counts_tokens=True, counts_each=counts_each)
    assert (sent["stream"], sent["return_token_ids"], sent["request_id"]) == (True, True, "r")
    assert sent["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": continuous,
    }
    assert msgspec.json.encode(body) == before


@pytest.mark.parametrize(
    ("body", "streams", "interval"),
    [({}, False, 8), ({"stream_interval": 3}, False, 3), ({}, True, None)],
)
def test_events_of_a_client_that_does_not_stream_have_several_tokens(body, streams, interval):
    asked = Asked("whole", streams=streams, body=body)
    sent = HttpStep(asked.step, "id", HttpSettings(stream_interval=8)).body()
    assert sent.get("stream_interval") == interval


# -- what is checked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b'{"error": {"message": "no", "code": 404}}', 404, "no"),
        (b'{"error": {"message": "no", "code": 503}}', 503, "no"),
        (b'{"error": {"message": "no", "code": "invalid"}}', 500, "no"),
        (b'{"error": {"message": "no", "code": true}}', 500, "no"),
        (b'{"error": {"message": "no", "code": 200}}', 500, "no"),
        (b'{"error": "Unauthorized"}', 500, "Unauthorized"),
        (b'{"error": {"reason": 7}}', 500, '{"reason":7}'),
    ],
)
def test_an_error_object_has_the_status_that_it_names(data, status, message):
    with pytest.raises(EngineError, match=message) as caught:
        read_object(data)
    assert caught.value.status == status
    assert caught.value.body["error"]["message"] == message


@pytest.mark.parametrize("data", [b"", b"<html>", b'{"a"', b"[]", b'"x"', b"\xff", b"[" * 9_999])
def test_what_is_no_object_is_no_answer(data):
    for read in (read_object, read_chunk):
        with pytest.raises(ProtocolError):
            read(data)
    assert not isinstance(Answer(200, data, {}).json(), dict)
    assert not isinstance(Answer(200, b"data: " + data, {}).first_event(), dict)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"choices": None},
        {"choices": [{"text": ""}, {"text": ""}]},
        {"choices": ["a"]},
        {"choices": [{"index": 0}]},
        {"choices": [{"text": None}]},
        {"choices": [{"text": "a", "token_ids": "12"}]},
        {"choices": [{"text": "a", "token_ids": [1.5]}]},
        {"choices": [{"text": "a", "token_ids": [True]}]},
        {"choices": [{"text": "a", "finish_reason": "because"}]},
        {"choices": [{"text": "a", "finish_reason": ["stop"]}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": {"reasoning": []}}]},
        {"choices": [{"delta": {"tool_calls": {"a": 1}}}]},
        {"choices": [{"delta": {"tool_calls": [7]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": -1}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 10**9}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": "f"}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": 7}}]}}]},
        {"choices": [{"text": "a", "logprobs": 7}]},
        {"choices": [{"text": "a", "logprobs": {"content": [7]}}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": "abc"}}]},
        {"choices": [], "usage": "x"},
    ],
)
def test_an_event_that_vllm_does_not_send_is_refused(found):
    with pytest.raises(ProtocolError):
        check_event(found)


def test_an_event_has_its_tokens_and_its_end():
    assert check_event({"choices": []}) == ([], None, None)
    assert check_event({"choices": [{"delta": {"role": "assistant"}}]}) == ([], None, None)
    end = {"text": "a", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "x"}
    assert check_event({"choices": [end]}) == ([5, 6], "stop", "x")
    calls = [{"index": 1, "id": "c", "type": "function", "function": {"arguments": "{"}}]
    assert check_event({"choices": [{"delta": {"tool_calls": calls}}]}) == ([], None, None)
    for logprobs in ({"content": [{"token": "a"}]}, {"tokens": ["a"], "top_logprobs": None}, {}):
        assert check_event({"choices": [{"text": "a", "logprobs": logprobs}]})[0] == []


@pytest.mark.parametrize(
    ("usage", "cached", "made"),
    [
        (None, None, None),
        ("x", None, None),
        ({"completion_tokens": 3}, None, 3),
        ({"completion_tokens": -1}, None, None),
        ({"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, 2, 3),
        ({"prompt_tokens_details": {"cached_tokens": "2"}}, None, None),
    ],
)
def test_usage_is_read_as_far_as_it_is_there(usage, cached, made):
    found = {"choices": [], "usage": usage}
    assert (cached_tokens(found), completion_tokens(found)) == (cached, made)


def relayed(tokens: list[int], finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": finish}
    return msgspec.json.encode({"choices": [choice], **fields})


def test_counts_that_are_wrong_at_the_end_make_all_tokens_void():
    step = HttpStep(Asked("void", output=8).step, "id", HttpSettings())
    step.take(relayed([5, 6]))
    step.take(relayed([7], "stop"))
    assert step.complete
    with pytest.raises(ProtocolError, match="it counted 4 tokens of void and sent 3"):
        step.take(msgspec.json.encode({"choices": [], "usage": {"completion_tokens": 4}}))
    assert (step.void, step.complete) == (True, False)


def test_an_event_that_comes_twice_brings_nothing_the_second_time_but_its_end():
    asked = Asked("twice", output=8)
    step = HttpStep(asked.step, "id", HttpSettings())
    step.take(relayed([5], usage={"completion_tokens": 1}))
    step.take(relayed([6], usage={"completion_tokens": 2}))
    step.take(relayed([6], "stop", usage={"completion_tokens": 2}))
    assert (step.made, asked.tokens, step.finish) == ([5, 6], [5, 6], "stop")
    assert [e["choices"][0]["token_ids"] for e in asked.events] == [[5], [6], []]
    assert not asked.events[-1]["choices"][0]["text"]
    assert not step.void


@pytest.mark.parametrize(("tokens", "counted"), [([7], 2), ([6], 1), ([6], 4)])
def test_an_event_whose_count_is_wrong_is_reported_to_nobody(tokens, counted):
    asked = Asked("wrong", output=8)
    step = HttpStep(asked.step, "id", HttpSettings())
    step.take(relayed([5, 6], usage={"completion_tokens": 2}))
    with pytest.raises(ProtocolError, match=f"it counted {counted} tokens of wrong and sent 3"):
        step.take(relayed(tokens, usage={"completion_tokens": counted}))
    assert (step.made, len(asked.events), step.void) == ([5, 6], 1, False)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([relayed([5], "stop"), relayed([6])], "sent more of bad after its end"),
        ([relayed([5], "stop"), relayed([], "stop")], "sent more of bad after its end"),
        ([relayed(list(range(9)))], "was to have 8 tokens at most, and it sent 9"),
        ([relayed([-1])], "token ids for bad that are none"),
        ([b"<html>"], "is not JSON"),
    ],
)
def test_what_a_relayed_stream_cannot_be_is_no_event_of_the_clients(events, message):
    asked = Asked("bad", output=8)
    step = HttpStep(asked.step, "id", HttpSettings())
    *before, last = events
    for event in before:
        step.take(event)
    with pytest.raises(ProtocolError, match=message):
        step.take(last)
    assert len(asked.events) == len(before)


def test_an_abort_that_was_ordered_is_no_end_for_the_client():
    for ordered, finish in ((True, None), (False, "abort")):
        asked = Asked("cut", output=8)
        step = HttpStep(asked.step, "id", HttpSettings())
        step.aborted = ordered
        step.take(relayed([5], "abort"))
        assert asked.events[-1]["choices"][0]["finish_reason"] == finish


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_counted_request_brings_events_and_tokens_alike(path: str):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            asked = Asked("counted", path)
            engine.start(asked.step)
            end = await made.recorder.end_of("counted")
            assert (end.finished, end.error, end.extras.finish_reason) == (True, "", "length")
            assert list(end.output_ids) == asked.tokens
            assert len(asked.tokens) == OUTPUT
            assert asked.text == text_of(asked.tokens)
            if path == COMPLETIONS:
                assert asked.tokens == continued(asked.prompt, OUTPUT)
            assert asked.begun == 1
            assert server.seen[-1]["stream"]
            assert asked.events[-1]["usage"]["completion_tokens"] == OUTPUT

    run(main)


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_that_is_not_counted_brings_only_its_answer(streams: bool):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            options = {"stream": streams} | (
                {"stream_options": {"include_usage": True}} if streams else {}
            )
            asked = Asked("opaque", streams=streams, counts_tokens=False, body=options)
            engine.start(asked.step)
            end = await made.recorder.end_of("opaque")
            assert (end.finished, end.error) == (True, "")
            assert (end.tokens, list(end.output_ids), asked.tokens) == (OUTPUT, [], [])
            assert asked.text == text_of(continued(asked.prompt, OUTPUT))
            sent = dict(server.seen[-1])
            sent.pop("request_id")
            assert sent == asked.relay.body
            assert (len(asked.events) == 1) is not streams

    run(main)


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_that_is_not_counted_stays_where_it_is_answered(streams: bool):
    async def main() -> None:
        async with setup(QUICK) as made:
            engine, server, *_ = await two(made)
            body = {"stream": streams}
            asked = Asked(
                "opaque", output=LONG_OUTPUT, streams=streams, counts_tokens=False, body=body
            )
            async with computing(server, 1):
                engine.start(asked.step)
                end = await made.recorder.end_of("opaque")
            assert (end.finished, end.error, asked.begun) == (True, "", 1)
            assert asked.text == text_of(continued(asked.prompt, LONG_OUTPUT))

    in_virtual_time_too(main())


def test_a_relayed_stream_that_breaks_off_hands_over_its_tokens_each_once():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.cut_after, server.cuts = 20, 1
            asked = Asked("cut")
            engine.start(asked.step)
            first = await made.recorder.end_of("cut")
            assert not first.finished
            assert list(first.output_ids) == asked.tokens == continued(asked.prompt, first.tokens)
            # The rest comes as tokens only: the client's own request would begin again.
            rest = request("cut", [*asked.prompt, *asked.tokens], OUTPUT - first.tokens)
            engine.start(rest)
            second = await made.recorder.end_of("cut")
            made_all = [*first.output_ids, *second.output_ids]
            assert made_all == continued(asked.prompt, OUTPUT)

    run(main)


def test_a_whole_answer_that_breaks_off_begins_again_at_another_engine():
    async def main() -> None:
        async with setup() as made:
            engine, faulty, _, other = await two(made)
            asked = Asked("whole", streams=False, counts_tokens=False, body={"stream": False})
            faulty.stall_after = 10
            engine.start(asked.step)
            await until(lambda: faulty.running == 1)
            before = other.generated
            faulty.die()
            reason, salvaged = await made.recorder.take("failed")
            assert reason.startswith(faulty.url)
            assert (salvaged["whole"].tokens, salvaged["whole"].finished) == (0, False)
            assert other.generated == before
            assert asked.events == []

    run(main)


@pytest.mark.parametrize("counts_tokens", [True, False])
def test_a_refusal_of_a_relayed_request_has_the_engines_words(counts_tokens: bool):
    async def main() -> None:
        async with setup() as made:
            engine, _, _, other = await two(made)
            asked = Asked(
                "bad",
                streams=counts_tokens,
                counts_tokens=counts_tokens,
                body={"temperature": -1.0},
            )
            before = len(other.seen)
            engine.start(asked.step)
            end = await made.recorder.end_of("bad")
            assert (end.finished, end.tokens) == (True, 0)
            assert isinstance(end.extras, Refusal)
            error = end.extras.body["error"]
            assert (end.extras.status, error["param"]) == (400, "temperature")
            assert end.error == error["message"] == "temperature is -1.0, outside of its range"
            assert len(other.seen) == before
            assert engine.takes_steps
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize(
    ("path", "prefix", "suffix"), [(CHAT, "chatcmpl-", ""), (COMPLETIONS, "cmpl-", "-0")]
)
def test_an_abort_of_a_relayed_request_names_it_as_vllm_does(path, prefix, suffix):
    async def main() -> None:
        async with setup() as made:
            server = Listens()
            made.servers.append(await server.start())
            await made.launcher.add(server.url)
            engine = await made.begin()
            asked = Asked("abort", path, output=LONG_OUTPUT)
            engine.start(asked.step)
            await until(lambda: len(asked.tokens) > 10)
            engine.abort(TrajectoryId("abort"))
            end = await made.recorder.end_of("abort")
            assert (end.finished, end.extras.finish_reason) == (False, "abort")
            assert list(end.output_ids) == asked.tokens
            assert set(server.aborts) == {prefix + server.seen[-1]["request_id"] + suffix}
            await until(lambda: server.running == 0)

    run(main)


def test_a_stream_of_another_type_is_a_fault_and_runs_elsewhere(monkeypatch):
    async def main() -> None:
        async with setup() as made:
            engine, faulty, _, other = await two(made)

            async def html(*_: Any) -> web.Response:
                return web.Response(text="<html>", content_type="text/html")

            monkeypatch.setattr(faulty, "_stream_text", html)
            asked = Asked("proxy")
            engine.start(asked.step)
            end = await made.recorder.end_of("proxy")
            assert list(end.output_ids) == asked.tokens == continued(asked.prompt, OUTPUT)
            assert asked.begun == 2
            assert streamed(other) == 1

    run(main)


def test_many_relayed_requests_at_once_are_kept_apart():
    async def main() -> None:
        async with one() as (made, _):
            engine = await made.begin()
            many = [Asked(f"s{n}") for n in range(20)]
            for asked in many:
                engine.start(asked.step)
            await asyncio.gather(*(made.recorder.end_of(f"s{n}") for n in range(20)))
            for asked in many:
                assert asked.tokens == continued(asked.prompt, OUTPUT)
                assert asked.text == text_of(asked.tokens)

    run(main)
