"""Live agents: what models write is read, programs are run, and everything ends at its limit."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from heddle_core import Controller, Entry
from heddle_core.events import StepFinished, ToolReturned, ToolStarted, TrajectoryFinished
from heddle_rollout.agents import NextAction, ToolAnswer
from heddle_rollout.core import RecordedCore
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.agents.dialogue import (
    GiveAnswer,
    RunProgram,
    opening,
    output_of,
    read_generation,
)
from heddle_runtime.agents.live import AgentLimitError, AgentLimits, LiveAgent, live_agents
from heddle_runtime.agents.tasks import Task, TaskFileError, read_tasks
from heddle_runtime.agents.tokenizer import FileTokenizer, TokenizerError, load_tokenizer
from heddle_runtime.agents.transcripts import Transcript, transcript_file
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.sandbox.runner import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
)
from tests.conformance.scenario import Scenario, policy_of
from tests.runtime.processes import descendants
from tests.runtime.scripted import ScriptedLauncher

END, BEGIN = 0, 1


def library() -> Any:
    """A byte-level tokenizer, one token a byte, that begins texts with <|begin|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|begin|>"]
    made = Library(models.BPE(vocab={t: i for i, t in enumerate([*special, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)]
    )
    return made


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    return FileTokenizer(library())


PRINTED = SandboxResult(status="ok", exit_code=0, signal="", stdout="42\n", stderr="", wall_s=0.25)
CALL = "Let me see.\n```python\nprint(6 * 7)\n```"


def ran(**changes: Any) -> SandboxResult:
    fields = {"status": "ok", "exit_code": 0, "signal": "", "stdout": "", "stderr": "", "wall_s": 1}
    return SandboxResult(**(fields | changes))


class Played:
    """An agent called as by a driver, with chosen generations."""

    def __init__(
        self,
        tokenizer: FileTokenizer,
        *,
        result: SandboxResult | Exception = PRINTED,
        **limits: int,
    ) -> None:
        self.tokenizer, self.result = tokenizer, result
        self.programs: list[str] = []
        self.ended: list[Transcript] = []
        self.agent = LiveAgent(
            Task(id="q", prompt="What is six times seven?", answer="42"),
            0,
            tokenizer=tokenizer,
            run_python=self._run,
            limits=AgentLimits(**limits),
            sandbox_limits=SandboxLimits(),
            on_end=self.ended.append,
        )

    async def _run(self, source: str) -> SandboxResult:
        self.programs.append(source)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def say(self, text: str, *, ends: bool = True) -> NextAction:
        request = self.agent.request()
        ids = self.tokenizer.encode(text, begins=False) + [END] * ends
        made = tuple(ids[: request.max_tokens])
        self.agent.on_step_end(
            StepResult(
                trajectory=request.trajectory, tokens=len(made), finished=True, output_ids=made
            )
        )
        return self.agent.next_action()

    def use_tool(self) -> ToolAnswer:
        return asyncio.run(self.agent.run_tool())

    @property
    def context(self) -> str:
        return self.tokenizer.decode(list(self.agent.context_ids))


# -- what models write -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 42", GiveAnswer("42")),
        ("So\n  **Answer:** 6 * 7 = 42 \n\nThat is all.", GiveAnswer("6 * 7 = 42")),
        ("Answer: 1\nno, wait\nanswer: **2**", GiveAnswer("2")),
        ("Answer:\n42", None),
        ("The Answer: 42", None),
        ("", None),
        ("```python\nprint(1)\n```", RunProgram("print(1)\n")),
        ("```py\r\nprint(1)\r\n```\r\n \n", RunProgram("print(1)\r\n")),
        ("Answer: 1\n```python\nx\n```\n", RunProgram("x\n")),
        ("```python\nx\n```\nAnswer: 1", GiveAnswer("1")),
        ("```python\nx\n```\nWhat do I see?", None),
        ("```python\nfirst\n```\n```python\nsecond\n```", RunProgram("second\n")),
        ("```python\nx\n```\n```\ntext\n```", None),
        ("```\nprint(1)\n```", None),
        ("```python\nprint('Answer: 3')\n", None),
        ("```\nAnswer: 3\n```", None),
        ("```python print(1)```", None),
        ("    ```Python  example\nx\n  ```", RunProgram("x\n")),
        ("Answer: a" + " " * 200_000 + "b", GiveAnswer("a" + " " * 200_000 + "b")),
        ("```" + " " * 200_000 + "`", None),
        ("```python\ns = '''\n```python\n'''\n```", RunProgram("s = '''\n```python\n'''\n")),
        ("```python\n```", RunProgram("\n")),
    ],
)
def test_a_generation_is_a_program_an_answer_or_neither(text, said):
    assert read_generation(text, whole=True) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 4", None),
        ("Answer: 42\n", GiveAnswer("42")),
        ("Answer: 42\nand", GiveAnswer("42")),
        ("```python\nx\n```", RunProgram("x\n")),
        ("```python\nx\n``", None),
    ],
)
def test_a_line_that_was_cut_is_no_answer(text, said):
    assert read_generation(text, whole=False) == said


@given(st.text(alphabet=st.sampled_from("`python \nAnswer:*x\r\t")), st.booleans())
def test_anything_can_be_read(text, whole):
    said = read_generation(text, whole=whole)
    if isinstance(said, GiveAnswer):
        assert said.text.strip() == said.text != ""
        assert said.text in text
    elif isinstance(said, RunProgram):
        assert said.source.rstrip("\n") in text
        assert text.rstrip().endswith("```")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ran(stdout="1\n\n"), "1"),
        (ran(), "[no output]"),
        (ran(stdout="a\n", stderr="b\n"), "a\nb"),
        (ran(status="error", exit_code=3, stdout="a"), "a\n[ended with exit code 3]"),
        (ran(status="signal", exit_code=None, signal="SIGSEGV"), "[ended by SIGSEGV]"),
        (ran(status="time", exit_code=None, stdout="x"), "x\n[cut off after 30 s]"),
        (ran(status="cpu", exit_code=None), "[cut off after 10 s of CPU time]"),
        (
            ran(status="output", exit_code=None, stdout="yy"),
            "yy\n[cut off: more than 65,536 bytes of output]",
        ),
    ],
)
def test_a_model_sees_how_its_program_ended(result, shown):
    assert output_of(result, SandboxLimits()) == shown


def test_a_prompt_is_shown_as_it_is():
    text = opening("  Use {braces} and \0 and 100 %.\n")
    assert "Question:\nUse {braces} and \0 and 100 %.\n\nStep 1:\n" in text
    assert "Answer: 42" in text  # how to answer


# -- the course of a trajectory --------------------------------------------------------------------


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


# -- a whole rollout: driver, agents and programs, only the model is scripted ----------------------


@pytest.fixture(scope="module")
def _sandbox_is_to_be_had() -> None:
    async def enter() -> None:
        async with Sandbox():
            pass

    try:
        asyncio.run(enter())
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


SCRIPT = {
    "sum": ["```python\nprint(sum(range(101)))\n```", "I see.\nAnswer: 5050"],
    "hang": ["```python\nimport time\nprint('x')\ntime.sleep(1000)\n```", "Answer: none"],
    "crash": ["```python\n1 / 0\n```", "Answer: no"],
    "talk": ["Well.", "Well.", "Well."],
}


def model_of(tokenizer: FileTokenizer) -> Callable[..., Sequence[int]]:
    def model(request: StepRequest) -> list[int]:
        text = tokenizer.decode(list(request.prompt_ids))
        begins = text.rindex("Step ")
        number = int(text[begins + 5 : text.index(":", begins)])
        name = text.partition("Question:\n")[2].partition("\n")[0]
        whole = [*tokenizer.encode(SCRIPT[name][number - 1], begins=False), END]
        already = tokenizer.encode(text[text.index("\n", begins) + 1 :], begins=False)
        return whole[len(already) :]

    return model


async def rollout(
    tokenizer: FileTokenizer,
    entries: list[Entry],
    transcripts: list[Transcript],
    *,
    policy: str,
    tool_limit_s: float | None,
    sandbox_limits: SandboxLimits,
    meanwhile: Callable[[RolloutRun], Awaitable[None]] | None = None,
) -> None:
    tasks = [Task(id=name, prompt=name) for name in SCRIPT]
    clock = RunClock(asyncio.get_running_loop())
    controller = Controller(policy_of(policy, Scenario(trajectories=16, faults=())))
    async with Sandbox(sandbox_limits) as sandbox:
        run = RolloutRun(
            live_agents(
                tasks,
                4,
                tokenizer=tokenizer,
                run_python=sandbox.run,
                limits=AgentLimits(steps=3),
                sandbox_limits=sandbox_limits,
                on_end=transcripts.append,
            ),
            RecordedCore(controller, entries.append),
            ScriptedLauncher(model_of(tokenizer)),
            clock,
            tool_limit_s=tool_limit_s,
        )
        other = asyncio.create_task(meanwhile(run)) if meanwhile else None
        await run.run()
        if other is not None:
            await other
        controller.ledger.check()


def events(entries: list[Entry], kind: type[Any]) -> list[Any]:
    return [e.event for e in entries if isinstance(e.event, kind)]


@pytest.mark.usefixtures("_sandbox_is_to_be_had")
@pytest.mark.parametrize("policy", ["verl", "heddle"])
@pytest.mark.parametrize("cut_by", ["sandbox", "driver"])
def test_a_rollout_of_real_agents_runs_to_its_end(tokenizer, policy, cut_by):
    before = descendants()
    entries: list[Entry] = []
    transcripts: list[Transcript] = []
    # The other of the two limits is out of reach.
    tool_limit_s, wall_s = (None, 4.0) if cut_by == "sandbox" else (4.0, 500.0)
    asyncio.run(
        rollout(
            tokenizer,
            entries,
            transcripts,
            policy=policy,
            tool_limit_s=tool_limit_s,
            sandbox_limits=SandboxLimits(wall_s=wall_s),
        )
    )
    assert [p for p in descendants() if p not in before] == []

    ends = {e.trajectory: e.outcome for e in events(entries, TrajectoryFinished)}
    expected = {"sum": "completed", "hang": "completed", "crash": "completed", "talk": "truncated"}
    assert ends == {f"{name}/{i}": expected[name] for name in SCRIPT for i in range(4)}
    by_id = {t.id: t for t in transcripts}
    assert sorted(by_id) == sorted(ends)
    assert {by_id[f"sum/{i}"].answer for i in range(4)} == {"5050"}
    observed = {name: by_id[f"{name}/2"].steps[0].observation for name in SCRIPT}
    assert observed["sum"] == "\n\nOutput:\n5050\n\nStep 2:\n"
    assert "ZeroDivisionError: division by zero\n[ended with exit code 1]" in observed["crash"]
    shown = "x\n[cut off after 4 s]" if cut_by == "sandbox" else "[cut off after 4 s]"
    assert observed["hang"] == f"\n\nOutput:\n{shown}\n\nStep 2:\n"
    assert "Your message held neither" in observed["talk"]

    tools = [e.tool for e in events(entries, ToolStarted)]
    assert (tools.count("python"), tools.count("reminder")) == (12, 8)
    assert [e.ok for e in events(entries, ToolReturned)].count(True) == 4
    made = sum(e.output_tokens for e in events(entries, StepFinished))
    assert made >= sum(s.output_tokens for t in transcripts for s in t.steps) > 0


@pytest.mark.usefixtures("_sandbox_is_to_be_had")
def test_an_interrupted_rollout_leaves_no_program(tokenizer):
    before = descendants()
    entries: list[Entry] = []

    async def interrupt(run: RolloutRun) -> None:
        while len([p for p in descendants() if p not in before]) < 3:
            await asyncio.sleep(0.02)
        await run.interrupt()

    asyncio.run(
        rollout(
            tokenizer,
            entries,
            [],
            policy="verl",
            tool_limit_s=None,
            sandbox_limits=SandboxLimits(wall_s=500.0),
            meanwhile=interrupt,
        )
    )
    assert [p for p in descendants() if p not in before] == []
    ends = {e.trajectory: e.outcome for e in events(entries, TrajectoryFinished)}
    assert len(ends) == 16
    assert {ends[f"hang/{i}"] for i in range(4)} == {"cancelled"}


# -- files -----------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_tasks_are_read_as_they_are_written(tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        {"id": "a", "prompt": "What is 1 + 1?"},
        "",
        {"id": "ä/1", "prompt": "⇒", "group": "g", "task": "math", "answer": " 2"},
        "   ",
    )
    read = read_tasks(path)
    assert read.name == "sums"
    assert len(read.sha256) == 64
    assert read.tasks == (
        Task(id="a", prompt="What is 1 + 1?"),
        Task(id="ä/1", prompt="⇒", group="g", task="math", answer=" 2"),
    )
    assert read_tasks(str(path)) == read


GOOD = {"id": "a", "prompt": "x"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, {"prompt": "x"}], "line 2: id: is missing; give a text of 1 to 1,000 characters"),
        ([{"id": "a"}], "line 1: prompt: is missing"),
        ([{"id": 1, "prompt": "x"}], "line 1: id: found 1; give a text"),
        ([{"id": "", "prompt": "x"}], 'line 1: id: found ""; give a text'),
        ([{"id": "a" * 1001, "prompt": "x"}], "line 1: id: found \"aaa"),
        ([{"id": "a", "prompt": ""}], 'line 1: prompt: found ""; give a text'),
        ([{"id": "a", "prompt": " \n"}], "not all of them space"),
        ([{**GOOD, "answer": 42}], "line 1: answer: found 42; give a text, also for numbers"),
        ([{**GOOD, "group": ["g"]}], 'line 1: group: found ["g"]; give a text'),
        ([{**GOOD, "promt": "x"}], '"promt" is not a field of a task; there are id, prompt'),
        ([GOOD, "", GOOD], "line 3: id: 'a' is taken by line 1 already"),
        ([{**GOOD, "a\nb": 1}], r'"a\nb" is not a field of a task'),
        (["{"], "line 1: malformed JSON at column"),
        (["[1]"], "line 1: found [1]; give a JSON object"),
        (["null"], "line 1: found null; give a JSON object"),
        (["[" * 100_000], "line 1: not readable as JSON"),
        (['{"id": "a", "prompt": NaN}'], "line 1: prompt: found NaN"),
        (['{"id": "\\ud800", "prompt": "x"}'], "line 1: "),
        (["\ufeff{}"], "line 1: starts with a byte-order mark"),
        ([""], "holds no tasks; write one JSON object a line"),
    ],
)  # fmt: skip
def test_a_faulty_task_file_is_reported_by_line_and_field(tmp_path, lines, said):
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(TaskFileError) as raised:
        read_tasks(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_task_file_is_reported(tmp_path):
    with pytest.raises(TaskFileError, match="no such file"):
        read_tasks(tmp_path / "missing.jsonl")
    with pytest.raises(TaskFileError, match="is a folder"):
        read_tasks(tmp_path)
    with pytest.raises(TaskFileError, match="is a pipe or a device"):
        read_tasks("/dev/zero")
    (tmp_path / "x.jsonl").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(TaskFileError, match="is compressed; unpack it first"):
        read_tasks(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b'{"id": "a", "prompt": "x"}\n{"id": "\xff"}')
    with pytest.raises(TaskFileError, match="line 2: not UTF-8 at byte 35"):
        read_tasks(tmp_path / "x.jsonl")
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks("a\0b")


@given(st.binary(max_size=200))
def test_any_bytes_are_tasks_or_one_line_of_complaint(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    path.write_bytes(data)
    try:
        read_tasks(path)
    except TaskFileError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_tokenizer_is_read_from_a_model_folder(tmp_path):
    library().save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    ids = read.encode("hé\n", begins=True)
    assert ids[0] == BEGIN
    assert read.decode([*ids, END]) == "hé\n"
    assert (read.is_special(END), read.is_special(ids[1])) == (True, False)


def test_settings_for_training_shorten_no_prompt(tmp_path):
    made = library()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    assert read.decode(read.encode("longer than four", begins=False)) == "longer than four"
    assert len(read.encode("a", begins=False)) == 1


def test_a_folder_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(TokenizerError, match="is not a model folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(TokenizerError, match="no such file; live agents need it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    library().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install 'heddle\[live\]'"):
        load_tokenizer(tmp_path)


def test_transcripts_are_lines_of_json(tokenizer, tmp_path):
    path = tmp_path / "transcripts.jsonl"
    with transcript_file(path) as write_one:
        for text in ("Answer: 42", "Answer: \x00é"):
            played = Played(tokenizer)
            played.say(text)
            write_one(played.ended[0])
            assert path.read_bytes().endswith(b"}\n")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["answer"] for line in lines] == ["42", "\x00é"]
    assert lines[0]["steps"] == [
        {
            "generation": "Answer: 42",
            "output_tokens": 11,
            "tool": None,
            "observation": "",
            "observation_tokens": 0,
            "status": "",
            "tool_s": 0.0,
        }
    ]
    with pytest.raises(FileExistsError), transcript_file(path):
        pass
