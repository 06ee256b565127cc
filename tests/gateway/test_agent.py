"""What a session's trajectory tells its engine."""

from array import array

import pytest

from heddle_core.ids import GroupId, TrajectoryId
from heddle_gateway.agent import GatewayAgent
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.streams import token_deltas
from heddle_rollout.agents import ToolAnswer
from heddle_rollout.engines import StepResult
from heddle_runtime.generation import GenerationEnd, Rendered
from heddle_runtime.virtual_time import run_virtual

SESSION = TrajectoryId("s")


class Listener:
    """A rollout that waits for the client's next request, and a gateway that ignores ends."""

    def __init__(self) -> None:
        self.answers: list[ToolAnswer] = []

    def step_done(self, agent: GatewayAgent) -> None:
        pass

    def step_over(self, agent: GatewayAgent) -> None:
        pass

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        self.answers.append(answer)

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        raise error


def step(*prompt: int, most: int = 10, has_text: bool = False) -> ClientStep:
    rendered = Rendered(prompt_ids=array("I", prompt), sampling={}, max_tokens=most)
    return ClientStep("generate", rendered, max_tokens=most, has_text=has_text)


def result(*ids: int, finished: bool = False) -> StepResult:
    return StepResult(trajectory=SESSION, tokens=len(ids), finished=finished, output_ids=ids)


def agent(first: ClientStep) -> GatewayAgent:
    return GatewayAgent(SESSION, GroupId("g"), "coding", first, Listener())


def test_a_step_that_goes_on_after_an_interruption_shares_all_that_its_engine_had():
    session = agent(step(1, 2, 3))
    assert session.request().shared_tokens == 0
    session.on_step_end(result(4, 5))
    again = session.request()
    assert list(again.prompt_ids) == [1, 2, 3, 4, 5]
    assert (again.shared_tokens, again.max_tokens) == (5, 8)


def test_tokens_beyond_the_limit_of_a_step_are_left_out():
    session = agent(step(1, most=3))
    session.request()
    session.on_step_end(result(2, 3))
    session.request()
    session.on_step_end(result(4, 5, 6))
    assert session.step.output_ids.tolist() == [2, 3, 4]


def test_the_next_request_shares_what_it_repeats():
    session, listener = agent(step(1, 2)), Listener()
    session.request()
    session.on_step_end(result(3, 4, finished=True))
    session.call_tool(listener)
    session.begin(step(1, 2, 3, 4, 5))
    asked = session.request()
    assert (asked.shared_tokens, asked.rewritten) == (4, False)
    assert listener.answers[0].observation_tokens == 1
    session.on_step_end(result(6, finished=True))
    session.call_tool(listener)
    session.begin(step(1, 9))
    asked = session.request()
    assert (asked.shared_tokens, asked.rewritten, asked.prompt_tokens) == (1, True, 2)


def test_a_name_of_the_tool_follows_only_where_a_client_has_the_text_made():
    for has_text, clients, follows in ((True, 1, True), (True, 0, False), (False, 1, False)):
        first = step(1, 2, has_text=has_text)
        first.clients = clients
        session = agent(first)
        session.request()
        session.on_step_end(result(3, finished=True))
        assert session.next_action().tool_follows is follows


def test_progress_is_there_at_once_when_tokens_have_come_and_waits_otherwise():
    async def main() -> list[bool]:
        first = step(1, 2, 3)
        first.take([7, 8])
        news = first.news
        seen = [await first.progress(news - 1, 0.0), await first.progress(news, 0.0)]
        first.finish(GenerationEnd(finish_reason="stop"))
        return [*seen, await first.progress(first.news, 0.0)]

    assert run_virtual(main()) == [True, False, True]


@pytest.mark.parametrize("kept", [0, 2, 3])
@pytest.mark.parametrize("again", [[7, 8, 9, 5], [7, 8, 4, 5], [7, 8]])
def test_tokens_that_are_void_are_made_again_and_sent_once(kept: int, again: list[int]):
    async def main() -> list[list[int]]:
        first, sent = step(1, 2, 3), []
        first.take([7, 8, 9])
        async for new in token_deltas(first, keep_alive_s=1.0, coalesce_s=0.0):
            if not sent:
                first.revoke(kept)
                first.take(again[kept:])
                first.finish(GenerationEnd(finish_reason="length"))
            sent.append(list(new or ()))
        return sent

    made = [7, 8, 9][:kept] + again[kept:]
    if made[:3] == [7, 8, 9]:
        assert run_virtual(main()) == [[7, 8, 9], [5]][: len(made) - 2]
    else:
        with pytest.raises(ApiError, match="cannot be resumed exactly: send it again"):
            run_virtual(main())
