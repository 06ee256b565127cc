"""Answers made of an engine's events: what a client did not ask for is not in them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.served import NO_AIOHTTP

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway.answers import EventFilter, Reply, whole_answer, whole_finish
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
HEAD = {"id": "of-the-engine", "created": 7, "model": "m"}


def chunk(ids: list[int], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event of a chat whose tokens have a text each."""
    text = "".join(f"t{i} " for i in ids)
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return {**HEAD, "choices": [choice | {"token_ids": ids} | fields], "usage": USAGE}


def role() -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return {**HEAD, "choices": [choice], "prompt_token_ids": [1, 2, 3]}


def usage() -> dict[str, Any]:
    return {**HEAD, "choices": [], "usage": USAGE, "system_fingerprint": "f"}


def filtered(body: dict[str, Any], events: list[Any], *, as_they_are: bool = False) -> list[Any]:
    made = EventFilter(body, "chatcmpl-x", as_they_are=as_they_are)
    return [each for event in events for each in made.take(event)] + list(made.end())


# -- streams --------------------------------------------------------------------------------------


def test_a_client_that_asked_for_text_only_gets_no_ids_and_no_usage():
    found = filtered({}, [role(), chunk([5]), chunk([6], "stop"), usage()])
    assert len(found) == 3
    for event in found:
        assert event["id"] == "chatcmpl-x"
        assert "usage" not in event
        assert event.get("prompt_token_ids") is None
        assert event["choices"][0].get("token_ids") is None
    assert found[-1]["system_fingerprint"] == "f"
    assert "".join(e["choices"][0]["delta"]["content"] for e in found) == "t5 t6 "


def test_what_a_client_asked_for_stays():
    events = [role(), chunk([5]), chunk([6], "stop"), usage()]
    found = filtered({"return_token_ids": True}, events)
    assert [e["choices"][0].get("token_ids") for e in found] == [None, [5], [6]]
    assert found[0]["prompt_token_ids"] == [1, 2, 3]
    found = filtered({"stream_options": {"include_usage": True}}, events)
    assert ["usage" in e for e in found] == [False, False, False, True]
    each = {"include_usage": True, "continuous_usage_stats": True}
    found = filtered({"stream_options": each}, events)
    assert ["usage" in e for e in found] == [False, True, True, True]
    only = filtered({"stream_options": {"continuous_usage_stats": True}}, events)
    assert not any("usage" in e for e in only)


def test_an_engine_that_was_asked_as_the_client_asked_is_passed_on_as_it_is():
    events = [role(), chunk([5]), chunk([6], "stop"), usage()]
    found = filtered({}, events, as_they_are=True)
    assert found == [event | {"id": "chatcmpl-x"} for event in events]


def test_the_end_waits_for_the_end_of_the_step():
    made = EventFilter({"stream_options": {"include_usage": True}}, "x", as_they_are=False)
    assert len(list(made.take(chunk([5])))) == 1
    assert list(made.take(chunk([6], "stop"))) == []
    assert list(made.take(usage())) == []
    assert [bool(e["choices"]) for e in made.end()] == [True, False]
    assert list(made.end()) == []


def test_an_event_that_is_there_for_its_ids_only_is_left_out_where_none_are_wanted():
    silent = chunk([5]) | {"choices": [{"index": 0, "delta": {}, "token_ids": [5]}]}
    assert filtered({}, [silent]) == []
    assert len(filtered({"return_token_ids": True}, [silent])) == 1


def test_events_of_the_engine_are_not_changed():
    events = [role(), chunk([5]), chunk([6], "stop"), usage()]
    filtered({}, events)
    assert events == [role(), chunk([5]), chunk([6], "stop"), usage()]


# -- what was said --------------------------------------------------------------------------------


def called(index: int, name: str = "", arguments: str = "", **fields: Any) -> dict[str, Any]:
    part = {"index": index, "function": {"name": name, "arguments": arguments}, **fields}
    return {**HEAD, "choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}


def test_parts_of_tool_calls_are_put_together_by_their_number():
    reply = Reply(
        [
            role(),
            called(0, "f", "", id="a"),
            called(1, "g", "{", id="b"),
            called(0, arguments='{"x"'),
            called(1, arguments="}"),
            called(0, arguments=": 1}"),
        ]
    )
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in reply.tool_calls]
    assert calls == [("a", "f", '{"x": 1}'), ("b", "g", "{}")]
    assert reply.message["tool_calls"] == reply.tool_calls
    assert reply.says_anything
    assert not Reply([role()]).says_anything


def test_reasoning_and_log_probs_are_joined():
    entry = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -2.0}]}
    part = {"index": 0, "delta": {"reasoning": "so "}, "logprobs": {"content": [entry]}}
    reply = Reply([{**HEAD, "choices": [part]}] * 2)
    assert reply.reasoning == "so so "
    assert [e["token"] for e in reply.logprobs["content"]] == ["a", "a"]
    top = reply.logprobs["content"][0]["top_logprobs"]
    assert top == [{"token": "b", "logprob": -2.0, "bytes": None}]
    lists = {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0], "top_logprobs": None}
    reply = Reply([{**HEAD, "choices": [{"index": 0, "text": "a", "logprobs": lists}]}] * 2)
    assert (reply.logprobs["tokens"], reply.logprobs["top_logprobs"]) == (["a", "a"], [])


pieces = st.lists(st.text(alphabet="ab", max_size=3), max_size=6)


def text_reply(parts: list[str]) -> Reply:
    return Reply([{**HEAD, "choices": [{"index": 0, "delta": {"content": p}}]} for p in parts])


@given(pieces, st.integers(0, 6))
def test_what_is_said_again_is_not_sent_again_however_it_is_cut(parts: list[str], upto: int):
    whole, said = "".join(parts), text_reply(parts[:upto])
    rest = text_reply([whole]).beyond(said)
    assert rest is not None
    assert said.text + rest["text"] == whole


@given(pieces, pieces)
def test_another_answer_is_never_taken_for_the_rest(before: list[str], again: list[str]):
    said, new = text_reply(before), text_reply(again)
    if new.text.startswith(said.text):
        assert new.beyond(said) == {"text": new.text[len(said.text) :]}
    elif said.text.startswith(new.text):
        assert new.beyond(said) is None
    else:
        with pytest.raises(ValueError, match="another answer"):
            new.beyond(said)


def test_of_tool_calls_said_again_only_what_is_new_is_sent():
    said = Reply([called(0, "f", '{"x"', id="a")])
    again = Reply([called(0, "f", '{"x": 1}', id="other"), called(1, "g", "{}", id="b")])
    rest = again.beyond(said)
    assert rest is not None
    first, second = rest["tool_calls"]
    assert first == {"index": 0, "function": {"arguments": ": 1}"}}
    assert (second["index"], second["function"]) == (1, {"name": "g", "arguments": "{}"})
    assert Reply([called(0, "f", "{", id="a")]).beyond(said) is None
    with pytest.raises(ValueError, match="another answer"):
        Reply([called(0, "h", '{"x"', id="a")]).beyond(said)


# -- whole answers --------------------------------------------------------------------------------

FORM = {
    "id": "probe",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a", "refusal": None, "tool_calls": []},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ],
    "usage": {**USAGE, "prompt_tokens_details": None},
    "service_tier": None,
    "prompt_token_ids": None,
}


def test_a_whole_answer_has_the_fields_of_the_engines_release_and_the_values_of_its_events():
    reply = Reply([role(), chunk([5]), chunk([6], "stop", stop_reason=9), usage()])
    made = whole_answer(CHAT, {}, reply, name="chatcmpl-x", form=FORM, counted={})
    assert set(made) >= set(FORM)
    assert (made["id"], made["object"], made["created"]) == ("chatcmpl-x", "chat.completion", 7)
    assert (made["service_tier"], made["prompt_token_ids"]) == (None, None)
    assert made["usage"] == {**USAGE, "prompt_tokens_details": None}
    [choice] = made["choices"]
    assert set(choice) == set(FORM["choices"][0])  # type: ignore[index, call-overload]
    assert choice["message"] == {"role": "assistant", "content": "t5 t6 ", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 9)
    assert choice["token_ids"] is None


def test_a_whole_answer_has_ids_where_they_are_asked_for():
    events = [role(), chunk([5]), chunk([6], "length"), usage()]
    body = {"return_token_ids": True}
    made = whole_answer(CHAT, body, Reply(events), name="x", form=FORM, counted={})
    assert made["choices"][0]["token_ids"] == [5, 6]
    assert made["prompt_token_ids"] == [1, 2, 3]


def test_a_whole_completion_has_its_text_and_the_count_where_the_engine_said_none():
    form = {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "a", "prompt_token_ids": None}],
        "usage": USAGE,
    }
    event = {**HEAD, "choices": [{"index": 0, "text": "so", "finish_reason": "length"}]}
    made = whole_answer(COMPLETIONS, {}, Reply([event]), name="x", form=form, counted=USAGE)
    assert made["choices"][0]["text"] == "so"
    assert "message" not in made["choices"][0]
    assert made["usage"] == USAGE


@pytest.mark.parametrize(
    ("streamed", "choice", "calls", "finish"),
    [
        ("stop", None, False, "stop"),
        ("length", "auto", False, "length"),
        ("tool_calls", "auto", True, "tool_calls"),
        ("length", "auto", True, "tool_calls"),
        ("length", "required", True, "length"),
        ("stop", "required", True, "tool_calls"),
        ("tool_calls", {"type": "function", "function": {"name": "f"}}, True, "stop"),
        ("stop", "none", False, "stop"),
    ],
)
def test_a_whole_chat_ends_as_vllm_says_for_whole_answers(streamed, choice, calls, finish):
    body = {"tools": [{"type": "function"}], "tool_choice": choice}
    message = {"content": "", "tool_calls": [{"id": "a"}] if calls else []}
    assert whole_finish(streamed, body, message) == finish
