"""Names of tools, read from replies: events have them, and so has the trace that is extracted."""

import asyncio
from typing import Any

import pytest

from heddle_core.events import ToolReturned, ToolStarted, TrajectoryFinished
from heddle_gateway.answers import tool_of
from heddle_gateway.fake_engines import Replies, WordRenderer, fake_agents
from tests.gateway.served import NO_AIOHTTP, Served, run, served

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

CHAT = "/v1/chat/completions"


def called(*names: str) -> list[dict[str, Any]]:
    return [{"function": {"name": name, "arguments": '{"n": 1}'}} for name in names]


@pytest.mark.parametrize(
    ("message", "tool"),
    [
        ({"content": "words", "tool_calls": called("search")}, "search"),
        ({"content": None, "tool_calls": called("b", "a", "b")}, "b+a"),
        ({"content": "I run it.\n```bash\nls\n```"}, "bash"),
        ({"content": "```mswea_bash_command\nls\n```"}, "bash"),
        ({"content": "```python\nprint()\n```"}, ""),
        ({"content": "it said ```bash"}, ""),
        ({"content": "done", "tool_calls": []}, ""),
        ({"content": None, "tool_calls": [{"function": {"name": 7}}, "x", {}]}, ""),
        ({"content": None, "tool_calls": called("n" * 400)}, "n" * 128),
        ({"content": None, "tool_calls": called("a\nb~#")}, "a%0Ab%7E%23"),
        (None, ""),
    ],
)
def test_a_tool_is_named_by_its_calls_or_its_block_of_commands(message: Any, tool: str):
    assert tool_of({"choices": [{"message": message}]}) == tool


@pytest.mark.parametrize("response", [{}, {"choices": []}, {"choices": [7]}, {"choices": "x"}])
def test_a_response_of_another_shape_names_no_tool(response: Any):
    assert tool_of(response) == ""


def test_the_text_of_a_completion_may_have_a_block_of_commands():
    assert tool_of({"choices": [{"text": "```sh\nls\n```"}]}) == "bash"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no reply"),
        (["text"], "reply 1"),
        ([{"content": "a"}, {"content": ""}], "reply 2 has neither"),
        ([{"content": 7}], "must be a text"),
        ([{"tool_calls": [{"function": {}}]}], "function.name"),
    ],
)
def test_replies_that_are_no_messages_are_refused_by_number(messages: Any, says: str):
    with pytest.raises(ValueError, match=says):
        Replies(messages)


async def post(bench: Served, body: dict[str, Any], session: str = "") -> Any:
    headers = {"X-Session-ID": session} if session else {}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(bench.url + CHAT, json=body) as answer,
    ):
        assert answer.status == 200
        return await (answer.text() if body.get("stream") else answer.json())


def replying(*messages: dict[str, Any]) -> dict[str, Any]:
    replies = Replies(messages)
    return {"make_agent": fake_agents(32, replies), "renderer": WordRenderer("fake", replies)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["", "s_1"])
def test_steps_end_in_the_tools_that_their_replies_call(stream: bool, session: str):
    messages: list[Any] = [{"role": "user", "content": "Mend it . " * 20}]
    calls = ({"tool_calls": called("edit")}, {"content": "```bash\nls\n```"}, {"content": "Done ."})

    async def main() -> Served:
        async with served(**replying(*calls)) as bench:
            for n in range(3):
                await post(bench, {"messages": messages, "stream": stream}, session)
                messages.append({"role": "assistant", **calls[n]})
                messages.append({"role": "tool", "content": f"it returned {n}"})
            bench.gateway.sessions.finish(session)
            return bench

    bench = run(main())
    started, returned = bench.events(ToolStarted), bench.events(ToolReturned)
    assert [e.tool for e in started] == ["edit", "bash", ""]
    assert [e.tool for e in returned] == ["edit", "bash"]
    assert len(bench.events(TrajectoryFinished)) == 1


def test_a_tool_call_begins_though_no_reply_was_made():
    class Broken(WordRenderer):
        async def derender(self, *args: Any) -> dict[str, Any]:
            raise RuntimeError("broken")

    async def main() -> Served:
        async with served(renderer=Broken("fake")) as bench, aiohttp.ClientSession() as http:
            body = {"messages": [{"role": "user", "content": "a"}]}
            async with http.post(bench.url + CHAT, json=body) as answer:
                assert answer.status == 500
            while not bench.gateway.sessions.idle:
                await asyncio.sleep(0.01)
            return bench

    assert [e.tool for e in run(main()).events(ToolStarted)] == [""]
