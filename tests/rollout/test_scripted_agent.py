"""Scripted trajectories: their requests, and their random tokens."""

import asyncio
from dataclasses import replace

import pytest

from heddle_rollout.agents import ToolAnswer
from heddle_rollout.engines import StepResult
from heddle_rollout.scripted_agent import ScriptedAgent, TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_trace.schema import StepScript, TrajectoryScript

FIRST = StepScript(
    prompt_tokens=10,
    shared_tokens=0,
    output_tokens=5,
    tool="sandbox",
    tool_s=2.0,
    tool_ok=True,
    tool_tokens=4,
)
SECOND = replace(FIRST, prompt_tokens=19, shared_tokens=15, tool=None, tool_s=0.0, tool_tokens=0)
SCRIPT = TrajectoryScript("g/0", "g", "coding", 3.0, (FIRST, SECOND), truncated=False)


def end(tokens: int, *, finished: bool = True, ids: tuple[int, ...] = ()) -> StepResult:
    return StepResult(trajectory="g/0", tokens=tokens, finished=finished, output_ids=ids)


class Answer:
    """Takes the answer of one tool call."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[ToolAnswer] = asyncio.get_running_loop().create_future()

    def tool_returned(self, trajectory, answer):
        self.answer.set_result(answer)

    def tool_failed(self, trajectory, error):
        self.answer.set_exception(error)


async def called(agent: ScriptedAgent) -> ToolAnswer:
    answer = Answer()
    agent.call_tool(answer)
    return await answer.answer


def in_virtual_time(script: TrajectoryScript, use):
    async def main():
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        return await use(ScriptedAgent(script, clock, tokens=TokenSource(1000, seed=1)), clock)

    return run_virtual(main())


def test_a_preempted_step_requests_the_rest_and_keeps_its_tokens():
    async def use(agent, clock):
        first = agent.request()
        prompt = list(first.prompt_ids)
        assert (first.prompt_tokens, first.shared_tokens, first.max_tokens) == (10, 0, 5)
        assert first.exact
        agent.on_step_end(end(2, finished=False, ids=(7, 8)))
        rest = agent.request()
        assert (rest.prompt_tokens, rest.shared_tokens, rest.max_tokens) == (12, 12, 3)
        assert list(rest.prompt_ids) == [*prompt, 7, 8]

    in_virtual_time(SCRIPT, use)


def test_the_next_prompt_is_the_context_and_the_observation():
    async def use(agent, clock):
        prompt = list(agent.request().prompt_ids)
        agent.on_step_end(end(5, ids=(1, 2, 3, 4, 5)))
        assert agent.next_action().tool == "sandbox"
        answer = await called(agent)
        assert clock.now_s == 2.0
        assert (answer.ok, answer.observation_tokens, answer.context_tokens) == (True, 4, 19)
        following = agent.request()
        assert list(following.prompt_ids[:15]) == [*prompt, 1, 2, 3, 4, 5]
        assert len(following.prompt_ids) == following.prompt_tokens == 19
        assert not following.rewritten
        agent.on_step_end(end(5, ids=(1, 2, 3, 4, 5)))
        last = agent.next_action()
        assert (last.tool, last.reason, last.outcome) == (None, "answer", "completed")

    in_virtual_time(SCRIPT, use)


def test_a_compacted_history_keeps_its_shared_part_and_is_marked():
    short = replace(SECOND, prompt_tokens=9, shared_tokens=6)

    async def use(agent, clock):
        prompt = list(agent.request().prompt_ids)
        agent.on_step_end(end(5, ids=(1, 2, 3, 4, 5)))
        await called(agent)
        following = agent.request()
        assert following.rewritten
        assert list(following.prompt_ids[:6]) == prompt[:6]
        assert len(following.prompt_ids) == 9

    in_virtual_time(replace(SCRIPT, steps=(FIRST, short)), use)


def test_tokens_are_of_the_name_and_the_seed_alone():
    source, same, other = TokenSource(1000, seed=1), TokenSource(1000, seed=1), TokenSource(1000)
    assert source.ids("prompt g", 50) == same.ids("prompt g", 50)
    assert source.ids("prompt g", 50)[:20] == source.ids("prompt g", 20)
    assert source.ids("prompt g", 50) != other.ids("prompt g", 50)
    assert source.ids("prompt g", 50) != source.ids("prompt h", 50)
    assert all(3 <= i < 1000 for i in source.ids("prompt g", 500))


def test_a_vocabulary_without_ordinary_tokens_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 3"):
        TokenSource(3)
