"""A whole rollout: driver, agents and programs are real, only the model is scripted."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from campaigns.faults.scenario import Scenario, policy_of
from campaigns.processes import descendants
from heddle_core import Controller, Entry, collecting
from heddle_core.events import StepFinished, ToolReturned, ToolStarted, TrajectoryFinished
from heddle_rollout.core import RecordedCore
from heddle_rollout.engines import StepRequest
from heddle_runtime.agents.live import AgentLimits, live_agents
from heddle_runtime.agents.tasks import Task
from heddle_runtime.agents.tokenizer import FileTokenizer
from heddle_runtime.agents.transcripts import Transcript
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.sandbox.runner import (
    Sandbox,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
)
from heddle_runtime.tool_tasks import ToolTasks
from tests.runtime.live.played import END
from tests.runtime.scripted import ScriptedLauncher


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
    tool_tasks = ToolTasks()
    async with Sandbox(sandbox_limits) as sandbox:
        run = RolloutRun(
            live_agents(
                tasks,
                4,
                tokenizer=tokenizer,
                run_python=sandbox.run,
                limits=AgentLimits(steps=3),
                sandbox_limits=sandbox_limits,
                tool_tasks=tool_tasks,
                on_end=transcripts.append,
            ),
            RecordedCore(controller, collecting(entries)),
            ScriptedLauncher(model_of(tokenizer)),
            clock,
            tool_limit_s=tool_limit_s,
            tool_tasks=tool_tasks,
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
    assert descendants(besides=before) == []

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
        while len(descendants(besides=before)) < 3:
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
    assert descendants(besides=before) == []
    ends = {e.trajectory: e.outcome for e in events(entries, TrajectoryFinished)}
    assert len(ends) == 16
    assert {ends[f"hang/{i}"] for i in range(4)} == {"cancelled"}


def test_an_interrupted_rollout_ends_after_its_tool_calls_have_cleaned_up(tokenizer):
    cleaned_up: list[bool] = []

    async def main() -> None:
        called = asyncio.Event()

        async def run_python(source: str) -> SandboxResult:
            called.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                for _ in range(100):
                    await asyncio.sleep(0)
                cleaned_up.append(True)
            raise AssertionError("it is cancelled")

        tool_tasks = ToolTasks()
        agents = live_agents(
            [Task(id="hang", prompt="hang")],
            1,
            tokenizer=tokenizer,
            run_python=run_python,
            limits=AgentLimits(),
            sandbox_limits=SandboxLimits(),
            tool_tasks=tool_tasks,
        )
        run = RolloutRun(
            agents,
            Controller(policy_of("verl", Scenario(trajectories=16, faults=()))),
            ScriptedLauncher(model_of(tokenizer)),
            RunClock(asyncio.get_running_loop()),
            tool_tasks=tool_tasks,
        )
        running = asyncio.create_task(run.run())
        await called.wait()
        await run.interrupt()
        await running
        assert cleaned_up == [True]

    asyncio.run(main())
