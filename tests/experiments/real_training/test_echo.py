"""The task of real training: its prompts, rewards and tokens."""

import asyncio

import pytest

from experiments.real_training.echo import SHOW, EchoAgent, EchoPrompt, EchoTask
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import ToolAnswer
from heddle_rollout.engines import StepResult
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual

TASK = EchoTask(letters=4, steps=3, step_tokens=4, tool_s=0.5)
PROMPT = EchoPrompt(letters=(5, 6), tool_s=(0.25,))
NAME = TrajectoryId("prompt-0/0")


def result(*tokens: int, finished: bool = True) -> StepResult:
    return StepResult(
        trajectory=NAME,
        tokens=len(tokens),
        finished=finished,
        output_ids=tokens,
        output_logprobs=tuple(-0.1 * token for token in tokens),
    )


class Listener:
    def __init__(self) -> None:
        self.answers: list[ToolAnswer] = []

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        self.answers.append(answer)


def test_a_trajectory_keeps_its_tokens_its_log_probs_and_where_it_generated():
    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        agent = EchoAgent(NAME, GroupId("prompt-0"), TASK, PROMPT, clock)
        assert agent.request().prompt_ids == [SHOW, 5]
        assert agent.request().max_tokens == 4
        agent.on_step_end(result(5, 7, finished=False))  # interrupted
        assert agent.request().max_tokens == 2
        assert agent.request().prompt_ids == [SHOW, 5, 5, 7]
        agent.on_step_end(result(5, 5))
        assert agent.next_action().tool is not None
        listener = Listener()
        agent.call_tool(listener)
        await clock.sleep(1.0)
        assert [answer.context_tokens for answer in listener.answers] == [8]
        agent.on_step_end(result(6, 0))
        assert agent.next_action().tool is None
        assert agent.context_ids == [SHOW, 5, 5, 7, 5, 5, SHOW, 6, 6, 0]
        assert agent.spans == [(2, 6), (8, 10)]
        assert agent.logprobs == pytest.approx([-0.5, -0.7, -0.5, -0.5, -0.6, 0.0])
        assert agent.reward == pytest.approx((3 + 1) / 8)

    run_virtual(main())


def test_tokens_without_log_probs_are_refused():
    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        agent = EchoAgent(NAME, GroupId("prompt-0"), TASK, PROMPT, clock)
        with pytest.raises(ValueError, match="log-probs"):
            agent.on_step_end(StepResult(trajectory=NAME, tokens=1, finished=True, output_ids=(5,)))

    run_virtual(main())


def test_prompts_are_the_same_each_time_and_differ_in_length():
    prompts = [TASK.prompt(number) for number in range(40)]
    assert prompts == [TASK.prompt(number) for number in range(40)]
    assert {len(prompt.letters) for prompt in prompts} == {1, 2, 3}
    assert all(SHOW < letter < TASK.vocabulary for p in prompts for letter in p.letters)
    assert all(len(prompt.tool_s) == len(prompt.letters) - 1 for prompt in prompts)


@pytest.mark.parametrize("wrong", [{"letters": 0}, {"steps": 0}, {"tool_s": -1.0}])
def test_a_task_that_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EchoTask(**wrong)
