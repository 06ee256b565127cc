"""The gateway's answers are those of vLLM itself, for requests of every kind.

`python -m tests.gateway.corpus` asks all of them; here it is a part that the seed chooses.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.served import NO_AIOHTTP
from tests.runtime.vllm_bench import VLLM_GROUP

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from tests.gateway.corpus.answers import Answer
from tests.gateway.corpus.compare import compare, places
from tests.gateway.corpus.groups import GROUPS, part
from tests.gateway.corpus.report import one_line, share
from tests.gateway.corpus.request import CHAT, Request, token_of
from tests.gateway.corpus.run import Compared, Outcome, compare_servers
from tests.gateway.corpus.serving import gateway_before, lacking

EQUAL = 295 / 300
PART = 0.35
"""Of the requests of each group, so that engines answer for minutes and not for a quarter hour."""
SEED = 0
LEAST = 320
"""Requests that `make soak` asks, at least."""
PARTS = [
    pytest.param("main", PART / 3, id="main, a third"),
    *(pytest.param(name, PART, marks=pytest.mark.soak, id=name) for name in GROUPS),
]
"""Groups and shares: each group starts two engines of its own."""


@pytest.mark.xdist_group(VLLM_GROUP)
@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.parametrize(("name", "share_asked"), PARTS)
def test_the_gateway_answers_as_vllm_does(name: str, share_asked: float, tmp_path: Path):
    group = GROUPS[name]
    if group.lacks:
        pytest.skip(f"{group.lacks} is not installed")
    requests = part(group.requests(SEED), share_asked, seed=SEED)
    with gateway_before(group, tmp_path) as (reference, other):
        outcome = compare_servers(name, requests, reference=reference, other=other)
    for each in outcome.unequal:
        print(f"{name}: {one_line(each)}")  # noqa: T201
    equal, counted = share([outcome])
    assert counted >= len(requests) * 0.9
    unequal = counted - equal
    assert unequal <= max(1.0, (1 - EQUAL) * counted), f"{unequal} of {counted} are not as vLLM's"


def test_the_corpus_has_each_request_once_and_is_the_same_each_time():
    total = 0
    for group in GROUPS.values():
        requests = group.requests(SEED)
        assert requests == group.requests(SEED)
        assert len({(each.area, each.name) for each in requests}) == len(requests)
        total += len(requests)
        some = part(requests, PART, seed=SEED)
        assert some == part(requests, PART, seed=SEED)
        assert len(some) == round(PART * len(requests))
    assert PART * total >= LEAST
    every = [each for group in GROUPS.values() for each in group.requests(SEED)]
    streams = sum(isinstance(e.body, dict) and e.body.get("stream") is True for e in every)
    assert 0.4 < streams / len(every) < 0.6


def test_another_seed_asks_with_other_words():
    one, other = GROUPS["main"].requests(0), GROUPS["main"].requests(1)
    assert len(one) == len(other)
    assert [each.content for each in one] != [each.content for each in other]


def test_bytes_have_the_tokens_that_the_tokenizer_gives_them(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    model = GROUPS["main"].make_model(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("a Z", "é", "日本", "🙂\n"):
        assert tokenizer.encode(text).ids == [token_of(byte) for byte in text.encode()]


@pytest.mark.parametrize("name", [name for name, group in GROUPS.items() if group.tokens])
def test_a_marker_is_one_token(name: str, tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    group = GROUPS[name]
    tokenizer = tokenizers.Tokenizer.from_file(str(group.make_model(tmp_path) / "tokenizer.json"))
    for marker, token in group.token_ids.items():
        assert tokenizer.encode(f"a{marker}b").ids == [token_of(97), token, token_of(98)]
        assert tokenizer.decode([token], skip_special_tokens=True) == marker
    assert tokenizer.get_vocab_size() == 2048


WHOLE: dict[str, Any] = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 0,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hello",
                "reasoning": None,
                "tool_calls": [
                    {
                        "id": "chatcmpl-tool-0123456789abcdef",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": 1}'},
                    }
                ],
            },
            "logprobs": {"content": [{"token": "h", "logprob": -1.5, "bytes": [104]}]},
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}},
}


def whole(change: Callable[[dict[str, Any]], object] | None = None, **fields: Any) -> Answer:
    body = json.loads(json.dumps(WHOLE)) | {"created": int(time.time())} | fields
    if change is not None:
        change(body)
    return Answer(
        status=200, media_type="application/json", text=json.dumps(body), received_s=time.time()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.update(id="chatcmpl-fedcba9876543210"),
        lambda b: b.update(created=b["created"] - 60),
        lambda b: b["usage"]["prompt_tokens_details"].update(cached_tokens=0),
        lambda b: b["choices"][0]["message"]["tool_calls"][0].update(id="chatcmpl-tool-00aa11bb"),
        lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=-1.50005),
        lambda b: b.update(model=b.pop("model")),
    ],
    ids=["id", "created", "cached_tokens", "tool call id", "log-prob", "order of fields"],
)
def test_what_no_client_can_foresee_is_no_difference(change: Callable[[dict[str, Any]], object]):
    assert compare(whole(), whole(change)) == []


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda b: b.update(id="mine"), "body.id"),
        (lambda b: b.update(created=5), "body.created"),
        (lambda b: b.update(created=str(b["created"])), "body.created"),
        (lambda b: b.pop("object"), "body.object"),
        (lambda b: b.update(extra=None), "body.extra"),
        (lambda b: b["usage"].update(prompt_tokens=6), "body.usage.prompt_tokens"),
        (lambda b: b["usage"].update(prompt_tokens=True), "body.usage.prompt_tokens"),
        (
            lambda b: b["usage"].update(prompt_tokens_details=None),
            "body.usage.prompt_tokens_details",
        ),
        (
            lambda b: b["usage"]["prompt_tokens_details"].update(cached_tokens=None),
            "body.usage.prompt_tokens_details.cached_tokens",
        ),
        (lambda b: b["choices"][0].pop("stop_reason"), "body.choices.stop_reason"),
        (lambda b: b["choices"][0].update(stop_reason=0), "body.choices.stop_reason"),
        (lambda b: b["choices"][0].update(finish_reason="length"), "body.choices.finish_reason"),
        (
            lambda b: b["choices"][0]["message"].update(content="hello "),
            "body.choices.message.content",
        ),
        (
            lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=-1.5002),
            "body.choices.logprobs.content.logprob",
        ),
        (
            lambda b: b["choices"][0]["message"]["tool_calls"][0].update(id="call-1"),
            "body.choices.message.tool_calls.id",
        ),
        (
            lambda b: b["choices"][0]["message"]["tool_calls"][0]["function"].update(
                arguments='{"a":1}'
            ),
            "body.choices.message.tool_calls.function.arguments",
        ),
        (lambda b: b["choices"].append(b["choices"][0]), "body.choices"),
    ],
)
def test_every_other_change_of_a_body_is_a_difference(
    change: Callable[[dict[str, Any]], object], place: str
):
    found = compare(whole(), whole(change))
    assert place in places(found)


def test_another_status_or_type_is_a_difference():
    text = '{"error": {"message": "no", "code": 400}}'
    one = Answer(status=400, media_type="application/json", text=text, received_s=0.0)
    other = Answer(status=422, media_type="application/json", text=text, received_s=0.0)
    assert places(compare(one, other)) == ["status"]
    other = Answer(status=400, media_type="text/plain", text=text, received_s=0.0)
    assert places(compare(one, other)) == ["media_type"]


def test_an_id_that_the_request_chose_is_compared_and_one_in_a_message_is_not():
    mine, other = whole(id="chatcmpl-0a0a0a0a"), whole(id="chatcmpl-0b0b0b0b")
    assert compare(mine, other) == []
    assert places(compare(mine, other, own_id=True)) == ["body.id"]
    named = Request.of(CHAT, {"request_id": "0a0a0a0a"})
    assert named.own_id
    assert not Request.of(CHAT, {"request_id": ""}).own_id
    said = [
        Answer(
            status=400,
            media_type="application/json",
            text=json.dumps({"error": {"message": f"request cmpl-{name}-0 is too long"}}),
            received_s=0.0,
        )
        for name in ("0123456789abcdef", "fedcba9876543210")
    ]
    assert compare(*said) == []


def stream(
    *deltas: dict[str, Any],
    usage: bool = True,
    done: bool = True,
    identity: str = "chatcmpl-0123456789abcdef",
    **last: Any,
) -> Answer:
    head = {"id": identity, "object": "chat.completion.chunk", "created": int(time.time())}
    head |= {"model": "tiny"}
    none = {"logprobs": None, "finish_reason": None}
    choices = [{"index": 0, "delta": {"role": "assistant", "content": ""}, **none}]
    choices += [{"index": 0, "delta": d, **none, "token_ids": None} for d in deltas]
    choices[-1] = {**choices[-1], "finish_reason": "stop", "stop_reason": None, **last}
    events = [json.dumps({**head, "choices": [choice]}) for choice in choices]
    if usage:
        counts = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
        events.append(json.dumps({**head, "choices": [], "usage": counts}))
    if done:
        events.append("[DONE]")
    return Answer(
        status=200,
        media_type="text/event-stream",
        text="".join(f"data: {each}\n\n" for each in events),
        received_s=time.time(),
    )


HELLO = [{"content": part} for part in ("he", "l", "lo")]


def test_where_a_stream_is_cut_is_no_difference_and_its_text_is():
    one = stream(*HELLO)
    assert compare(one, stream({"content": "h"}, *HELLO[1:2], {"content": "elo"})) != []
    assert compare(one, stream({"content": "h"}, {"content": "el"}, {"content": "lo"})) == []
    assert compare(one, stream({"content": "hello"})) == []
    assert places(compare(one, stream(*HELLO[:2]))) == ["choices.0.content"]


def test_comments_and_other_line_ends_of_a_stream_are_no_difference():
    one = stream(*HELLO)
    text = ": keep-alive\r\n\r\n" + one.text.replace("\n", "\r\n")
    other = Answer(status=200, media_type=one.media_type, text=text, received_s=one.received_s)
    assert compare(one, other) == []


@pytest.mark.parametrize(
    ("other", "place"),
    [
        (stream(*HELLO, usage=False), "usage.own"),
        (stream(*HELLO, done=False), "done.count"),
        (stream(*HELLO, finish_reason="length"), "choices.0.finish_reason"),
        (stream(*HELLO, stop_reason="x"), "choices.0.stop_reason"),
        (stream(*HELLO, extra=1), "keys.last.choice"),
        (stream(*HELLO, identity="cmpl-0123456789abcdef"), "id"),
        (stream(*({**delta, "role": "assistant"} for delta in HELLO)), "keys.later deltas"),
        (stream(*({"reasoning": delta["content"]} for delta in HELLO)), "choices.0.reasoning"),
    ],
)
def test_every_other_change_of_a_stream_is_a_difference(other: Answer, place: str):
    assert place in places(compare(stream(*HELLO), other))


def test_calls_of_a_stream_are_joined_by_their_index():
    def begin(n: int, identity: str) -> dict[str, Any]:
        name = {"name": f"f{n}"}
        return {"index": n, "id": identity, "type": "function", "function": name}

    def more(n: int, arguments: str) -> dict[str, Any]:
        return {"index": n, "function": {"arguments": arguments}}

    tool = "chatcmpl-tool-0123456789abcdef"
    one = stream(
        *({"tool_calls": [call]} for call in (begin(0, tool), more(0, "{"), more(0, "}"))),
        *({"tool_calls": [call]} for call in (begin(1, tool), more(1, "{}"))),
    )
    other = stream(
        {"tool_calls": [begin(0, "chatcmpl-tool-fedcba98"), more(0, "{}"), begin(1, tool)]},
        {"tool_calls": [more(1, "{"), more(1, "}")]},
    )
    assert compare(one, other) == []
    third = stream({"tool_calls": [begin(0, tool), more(0, "{}"), begin(1, tool), more(1, "{")]})
    assert places(compare(one, third)) == ["choices.0.tool_calls.1.arguments"]


def test_an_error_in_a_stream_is_a_difference():
    one = stream(*HELLO)
    text = one.text.replace("data: [DONE]", 'data: {"error": {"message": "no"}}\n\ndata: [DONE]')
    other = Answer(status=200, media_type=one.media_type, text=text, received_s=one.received_s)
    assert places(compare(one, other)) == ["errors"]


def test_what_varies_by_itself_and_what_vllm_fails_at_are_not_counted():
    def compared(expected: Answer, found: Answer, *varying: str) -> Compared:
        request = Request.of(CHAT, {})
        return Compared(
            request=request, expected=expected, varying=varying, alone=found, among=found
        )

    one = whole()
    other = whole(lambda b: b["choices"][0].update(finish_reason="length"))
    failed = Answer(status=500, media_type="application/json", text="{}", received_s=0.0)
    each = (
        compared(one, one),
        compared(one, other),
        compared(one, other, "body.choices.finish_reason"),
        compared(failed, one),
        compared(one, other, "status"),
    )
    outcome = Outcome(group="x", compared=each, took_s=0.0)
    assert [one.equal for one in outcome.counted] == [True, False, True]
    assert share([outcome]) == (2, 3)
