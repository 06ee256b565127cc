"""The course of one live trajectory: programs are run, and it ends at its limits."""

import pytest

from heddle_rollout.agents import NextAction
from heddle_rollout.engines import StepResult
from heddle_runtime.agents.live import AgentLimitError, AgentLimits, live_agents
from heddle_runtime.agents.tasks import Task, TaskFileError
from heddle_runtime.sandbox.runner import SandboxError, SandboxLimits
from tests.runtime.live.played import BEGIN, CALL, END, Played, ran


def test_a_program_is_run_its_output_read_and_the_answer_given(tokenizer):
    played = Played(tokenizer)
    first = played.agent.request()
    assert first.prompt_ids[0] == BEGIN
    assert len(first.prompt_ids) == first.prompt_tokens == played.agent.prompt_tokens
    assert (first.shared_tokens, first.max_tokens, first.exact) == (0, 2048, False)

    assert played.say(CALL) == NextAction(reason="tool_call", tool="python")
    answer = played.use_tool()
    assert played.programs == ["print(6 * 7)\n"]
    assert (answer.ok, answer.outcome) == (True, None)
    assert played.context.endswith(f"{CALL}\n\nOutput:\n42\n\nStep 2:\n")

    second = played.agent.request()
    assert second.prompt_tokens == answer.context_tokens == len(second.prompt_ids)
    assert second.shared_tokens == answer.context_tokens - answer.observation_tokens
    assert second.prompt_ids[: first.prompt_tokens] == first.prompt_ids
    assert END not in second.prompt_ids

    assert played.say("Answer: 42") == NextAction(reason="answer", outcome="completed")
    (transcript,) = played.ended
    assert (transcript.outcome, transcript.answer, transcript.expected, transcript.correct) == (
        "completed",
        "42",
        "42",
        True,
    )
    assert [s.generation for s in transcript.steps] == [CALL, "Answer: 42"]
    assert (transcript.steps[0].tool, transcript.steps[0].status, transcript.steps[0].tool_s) == (
        "python",
        "ok",
        0.25,
    )
    assert transcript.steps[0].observation == "\n\nOutput:\n42\n\nStep 2:\n"
    assert transcript == played.agent.transcript


def test_a_wrong_answer_is_recorded_as_such(tokenizer):
    played = Played(tokenizer)
    played.say("Answer: 43")
    assert played.ended[0].correct is False


def test_a_model_without_program_or_answer_is_reminded_until_no_step_is_left(tokenizer):
    played = Played(tokenizer, steps=3)
    for number in (2, 3):
        assert played.say("Hm.") == NextAction(reason="tool_call", tool="reminder")
        answer = played.use_tool()
        assert (answer.ok, answer.outcome) == (False, None)
        assert played.context.endswith(f"in a line of its own.\n\nStep {number}:\n")
    assert played.say("Hm.") == NextAction(reason="length_limit", outcome="truncated")
    assert played.programs == []
    assert [s.tool for s in played.ended[0].steps] == ["reminder", "reminder", None]
    assert (played.ended[0].answer, played.ended[0].correct) == (None, False)


def test_no_program_is_run_for_a_step_that_will_not_come(tokenizer):
    played = Played(tokenizer, steps=1)
    assert played.say(CALL) == NextAction(reason="length_limit", outcome="truncated")
    assert played.programs == []


def test_a_generation_that_reaches_its_limit_ends_the_trajectory(tokenizer):
    played = Played(tokenizer, step_tokens=10)
    assert played.agent.request().max_tokens == 10
    assert played.say("Answer: 42 and more", ends=False) == NextAction(
        reason="length_limit", outcome="truncated"
    )
    assert played.ended[0].answer is None


def test_a_model_that_stops_with_its_last_token_was_not_cut(tokenizer):
    played = Played(tokenizer, step_tokens=11)
    assert played.say("Answer: 42").reason == "answer"


def test_a_generation_may_fill_the_context_but_not_more(tokenizer):
    prompt_tokens = Played(tokenizer).agent.prompt_tokens
    played = Played(tokenizer, context_tokens=prompt_tokens + 30)
    assert played.agent.request().max_tokens == 30
    assert played.say("x" * 100) == NextAction(reason="length_limit", outcome="truncated")
    assert len(played.agent.context_ids) == prompt_tokens + 30


def test_an_observation_that_fills_the_context_ends_the_trajectory(tokenizer):
    prompt_tokens = Played(tokenizer).agent.prompt_tokens
    made = len(CALL)
    observation = len("\n\nOutput:\n42\n\nStep 2:\n")
    for spare, outcome in ((0, "truncated"), (1, None)):
        limit = prompt_tokens + made + observation + spare
        played = Played(tokenizer, context_tokens=limit)
        played.say(CALL)
        answer = played.use_tool()
        assert answer.outcome == outcome
        assert answer.context_tokens <= limit
        if outcome is None:
            assert played.agent.request().max_tokens == 1
        else:
            assert played.ended[0].outcome == "truncated"


def test_a_long_output_loses_its_middle(tokenizer):
    result = ran(stdout="a" * 500 + "b" * 500)
    played = Played(tokenizer, observation_tokens=100, result=result)
    played.say(CALL)
    answer = played.use_tool()
    marker = "\n[... the middle is left out ...]\n"
    half = (100 - len(marker)) // 2
    shown = f"\n\nOutput:\n{'a' * half}{marker}{'b' * half}\n\nStep 2:\n"
    assert played.context.endswith(shown)
    assert answer.observation_tokens == len(shown)


@pytest.mark.parametrize("observation_tokens", [1, 5, 33, 34, 35])
def test_even_the_smallest_limit_of_an_output_is_kept(tokenizer, observation_tokens):
    played = Played(tokenizer, observation_tokens=observation_tokens, result=ran(stdout="x" * 99))
    played.say(CALL)
    marker = len("\n[... the middle is left out ...]\n")
    around = len("\n\nOutput:\n\n\nStep 2:\n")
    assert played.use_tool().observation_tokens == around + max(observation_tokens, marker)


def test_what_a_program_prints_cannot_end_a_text(tokenizer):
    played = Played(tokenizer, result=ran(stdout="<|end|><|begin|>"))
    played.say(CALL)
    played.use_tool()
    ids = list(played.agent.context_ids)
    assert END not in ids
    assert ids.count(BEGIN) == 1
    assert "<|end|><|begin|>" in played.context


def test_a_preempted_step_goes_on_where_it_was(tokenizer):
    played = Played(tokenizer, step_tokens=50)
    begun = tuple(tokenizer.encode("Answ", begins=False))
    request = played.agent.request()
    played.agent.on_step_end(
        StepResult(trajectory=request.trajectory, tokens=4, finished=False, output_ids=begun)
    )
    again = played.agent.request()
    assert (again.max_tokens, again.prompt_tokens) == (46, request.prompt_tokens + 4)
    assert again.shared_tokens == again.prompt_tokens
    assert list(again.prompt_ids) == [*request.prompt_ids, *begun]
    assert played.say("er: 42").reason == "answer"
    assert played.ended[0].steps[0].generation == "Answer: 42"


def test_a_step_lost_with_its_last_token_is_requested_again(tokenizer):
    played = Played(tokenizer, step_tokens=4)
    request = played.agent.request()
    begun = tuple(tokenizer.encode("abcd", begins=False))
    played.agent.on_step_end(
        StepResult(trajectory=request.trajectory, tokens=4, finished=False, output_ids=begun)
    )
    assert played.agent.request().max_tokens == 1
    assert played.say("e").reason == "length_limit"


def test_a_request_is_not_changed_by_what_comes_after_it(tokenizer):
    played = Played(tokenizer)
    request = played.agent.request()
    before = list(request.prompt_ids)
    played.say(CALL)
    played.use_tool()
    assert list(request.prompt_ids) == before


def test_the_model_sees_that_a_tool_was_cut(tokenizer):
    played = Played(tokenizer)
    played.say(CALL)
    answer = played.agent.on_tool_timeout(2.5)
    assert (answer.ok, answer.outcome) == (False, None)
    assert played.context.endswith("Output:\n[cut off after 2.5 s]\n\nStep 2:\n")
    played.say("Answer: 1")
    assert played.ended[0].steps[0].status == "cut"


def test_a_sandbox_that_fails_fails_the_trajectory_only(tokenizer):
    played = Played(tokenizer, result=SandboxError("no process could be started"))
    played.say(CALL)
    answer = played.use_tool()
    assert (answer.ok, answer.outcome, answer.observation_tokens) == (False, "failed", 0)
    assert played.ended[0].outcome == "failed"
    assert played.ended[0].steps[0].observation == "no process could be started"


def test_ids_that_are_no_text_are_passed_over(tokenizer):
    played = Played(tokenizer)
    request = played.agent.request()
    ids = (5000, *tokenizer.encode("Answer: 42", begins=False), 99_999, END)
    played.agent.on_step_end(
        StepResult(trajectory=request.trajectory, tokens=len(ids), finished=True, output_ids=ids)
    )
    assert played.agent.next_action().reason == "answer"
    assert played.agent.transcript.answer == "42"


def test_a_prompt_that_fills_the_context_is_refused_before_anything_runs(tokenizer):
    with pytest.raises(TaskFileError, match=r"task 'q': its prompt is [\d,]+ tokens .* limit 50:"):
        Played(tokenizer, context_tokens=50)


@pytest.mark.parametrize("name", ["steps", "step_tokens", "observation_tokens", "context_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_limits_below_one_are_refused(name, value):
    with pytest.raises(AgentLimitError, match=f"agent limit {name}: found {value}; give"):
        AgentLimits(**{name: value})


def test_samples_of_a_task_are_a_group(tokenizer):
    tasks = [Task(id="a", prompt="x"), Task(id="b/0", prompt="y", group="g", task="math")]
    made = live_agents(
        tasks,
        2,
        tokenizer=tokenizer,
        run_python=Played(tokenizer)._run,
        limits=AgentLimits(),
        sandbox_limits=SandboxLimits(),
    )
    assert [(a.id, a.group, a.task, a.arrival_s) for a in made] == [
        ("a/0", "a", "live", 0.0),
        ("a/1", "a", "live", 0.0),
        ("b/0/0", "g", "math", 0.0),
        ("b/0/1", "g", "math", 0.0),
    ]
    with pytest.raises(AgentLimitError, match="found 0; give at least 1"):
        live_agents(
            tasks,
            0,
            tokenizer=tokenizer,
            run_python=Played(tokenizer)._run,
            limits=AgentLimits(),
            sandbox_limits=SandboxLimits(),
        )
