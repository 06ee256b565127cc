"""A live agent: a model writes Python programs until it answers or reaches a limit.

Token ids go to engines and come back. `heddle_runtime.agents.dialogue` writes and reads the text.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from heddle_core.events import Outcome
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import NextAction, ToolAnswer, ToolListener
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.agents.dialogue import (
    GiveAnswer,
    ModelAction,
    RunProgram,
    next_step,
    opening,
    output_of,
    read_generation,
    reminder,
)
from heddle_runtime.agents.tasks import Task, TaskFileError
from heddle_runtime.agents.tokenizer import Tokenizer
from heddle_runtime.agents.transcripts import OnEnd, Transcript, TranscriptStep
from heddle_runtime.sandbox.runner import SandboxError, SandboxLimits, SandboxResult
from heddle_runtime.tool_tasks import ToolTasks

RunPython: TypeAlias = Callable[[str], Awaitable[SandboxResult]]
"""`Sandbox.run`. Raises SandboxError when a program could not be run."""

_LEFT_OUT: Final = "\n[... the middle is left out ...]\n"
_TOOL, _REMINDER = "python", "reminder"
LIVE_TOOLS = (_TOOL, _REMINDER)
"""Names of a live agent's tools."""


class AgentLimitError(ValueError):
    """A limit that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Limits of a trajectory.

    Raises:
        AgentLimitError: a limit below 1.
    """

    steps: int = 16
    """Generations."""
    step_tokens: int = 2048
    """Tokens of one generation."""
    observation_tokens: int = 2048
    """Tokens of a program's output that the model sees; of longer output the middle is left out."""
    context_tokens: int = 32_768
    """Tokens of prompt, generations and observations together."""

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens", "observation_tokens", "context_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise AgentLimitError(
                    f"agent limit {name}: found {value!r}; give a whole number from 1"
                )


class LiveAgent:
    """One sample of a task; implements `Agent`."""

    def __init__(
        self,
        task: Task,
        sample: int,
        *,
        tokenizer: Tokenizer,
        run_python: RunPython,
        limits: AgentLimits,
        sandbox_limits: SandboxLimits,
        tool_tasks: ToolTasks | None = None,
        on_end: OnEnd = lambda transcript: None,
    ) -> None:
        """`sandbox_limits`: the limits of `run_python`, which the prompt states. `tool_tasks` runs
        the programs of several agents; without it, this one's alone.

        Raises:
            TaskFileError: the prompt fills the context limit.
        """
        self._task, self._id = task, TrajectoryId(f"{task.id}/{sample}")
        self._group = GroupId(task.group or task.id)
        self._tokenizer, self._run_python, self._limits = tokenizer, run_python, limits
        self._tool_tasks = tool_tasks or ToolTasks()
        self._sandbox_limits, self._on_end = sandbox_limits, on_end
        self._opening = opening(task.prompt)
        self._ids = tokenizer.encode(self._opening, begins=True)
        self._prompt_tokens = len(self._ids)
        if self._prompt_tokens >= limits.context_tokens:
            raise TaskFileError(
                f"task {task.id!r}: its prompt is {self._prompt_tokens:,} tokens with the "
                f"instructions, and the context limit {limits.context_tokens:,}: raise the limit "
                "if the model allows it, or shorten the prompt"
            )
        self._shared = 0
        """Length of the context when the last dispatch ended."""
        self._begins = self._prompt_tokens
        """Start of the current step in the context."""
        self._action: ModelAction = None
        self._steps: list[TranscriptStep] = []
        self._outcome: Outcome | None = None

    @property
    def id(self) -> TrajectoryId:
        """The task's id and the number of the sample."""
        return self._id

    @property
    def group(self) -> GroupId:
        """The task's group, shared by its samples."""
        return self._group

    @property
    def task(self) -> str:
        """What kind of task it is."""
        return self._task.task

    @property
    def arrival_s(self) -> float:
        """All trajectories arrive at the start."""
        return 0.0

    @property
    def prompt_tokens(self) -> int:
        """Size of the first prompt."""
        return self._prompt_tokens

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far."""
        return self._ids

    @property
    def transcript(self) -> Transcript:
        """The text so far; `on_end` gets it when the trajectory ends by itself."""
        answer = self._action.text if isinstance(self._action, GiveAnswer) else None
        expected = self._task.answer
        known = expected is not None and self._outcome is not None
        return Transcript(
            id=self._id,
            group=self._group,
            task=self._task.task,
            opening=self._opening,
            steps=tuple(self._steps),
            outcome=self._outcome,
            answer=answer,
            expected=expected,
            correct=(answer or "").strip() == (expected or "").strip() if known else None,
        )

    def request(self) -> StepRequest:
        """Request as many tokens as the limits permit."""
        return StepRequest(
            trajectory=self._id,
            group=self._group,
            prompt_tokens=len(self._ids),
            shared_tokens=self._shared,
            # At least 1: a step runs again if its engine died before it reported the last token.
            max_tokens=max(1, self._left()),
            exact=False,
            prompt_ids=self._ids,
        )

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens of a dispatch."""
        self._ids = [*self._ids, *result.output_ids]
        self._shared = len(self._ids)

    def next_action(self) -> NextAction:
        """Read what the model wrote in this step."""
        made = self._ids[self._begins :]
        whole = self._left() > 0 or (bool(made) and self._tokenizer.is_special(made[-1]))
        text = self._tokenizer.decode(made)
        self._steps.append(TranscriptStep(generation=text, output_tokens=len(made)))
        self._action = read_generation(text, whole=whole)
        match self._action:
            case GiveAnswer():
                self._end("completed")
                return NextAction(reason="answer", outcome="completed")
            case None if not whole:
                pass
            case _ if len(self._steps) < self._limits.steps:
                called = isinstance(self._action, RunProgram)
                return NextAction(reason="tool_call", tool=_TOOL if called else _REMINDER)
        self._end("truncated")
        return NextAction(reason="length_limit", outcome="truncated")

    def call_tool(self, listener: ToolListener) -> None:
        """Begin what `run_tool` does."""
        self._tool_tasks.begin(self._id, self.run_tool(), listener)

    def cancel_tool(self) -> None:
        """Cancel it."""
        self._tool_tasks.cancel(self._id)

    async def run_tool(self) -> ToolAnswer:
        """Run the program that the model wrote, or return a reminder if there is none."""
        number = len(self._steps) + 1
        if not isinstance(self._action, RunProgram):
            return self._observe(reminder(number), ok=False, tool=_REMINDER)
        try:
            result = await self._run_python(self._action.source)
        except SandboxError as error:
            self._note_tool(_TOOL, observation=f"{error}", status="failed")
            self._end("failed")
            return self._answer(False, 0)
        shown = output_of(result, self._sandbox_limits)
        return self._observe(
            next_step(shown, number), ok=result.ok, status=result.status, tool_s=result.wall_s
        )

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        """Return an observation that the program exceeded the time limit."""
        shown = f"[cut off after {limit_s:g} s]"
        return self._observe(
            next_step(shown, len(self._steps) + 1), ok=False, status="cut", tool_s=limit_s
        )

    def _left(self) -> int:
        """Tokens that the current step may still generate."""
        of_step = self._limits.step_tokens - (len(self._ids) - self._begins)
        return min(of_step, self._limits.context_tokens - len(self._ids))

    def _observe(
        self,
        parts: tuple[str, str, str],
        *,
        ok: bool,
        tool: str = _TOOL,
        status: str = "",
        tool_s: float = 0.0,
    ) -> ToolAnswer:
        """Append a tool's answer, and begin the next step if the context limit permits."""
        encode = self._tokenizer.encode
        before, body, after = (encode(part, begins=False) for part in parts)
        added = [*before, *self._shortened(body), *after]
        # An end-of-text token inside the context would make the model ignore the text before it.
        while len(self._ids) > self._begins and self._tokenizer.is_special(self._ids[-1]):
            self._ids = self._ids[:-1]
        self._shared = len(self._ids)
        self._note_tool(
            tool,
            observation=self._tokenizer.decode(added),
            observation_tokens=len(added),
            status=status,
            tool_s=tool_s,
        )
        if len(self._ids) + len(added) >= self._limits.context_tokens:
            self._end("truncated")
            return self._answer(ok, len(added))
        self._ids = [*self._ids, *added]
        self._begins = len(self._ids)
        return self._answer(ok, len(added))

    def _shortened(self, ids: list[int]) -> list[int]:
        if len(ids) <= self._limits.observation_tokens:
            return ids
        marker = self._tokenizer.encode(_LEFT_OUT, begins=False)
        kept = max(0, self._limits.observation_tokens - len(marker))
        return [*ids[: kept - kept // 2], *marker, *ids[len(ids) - kept // 2 :]]

    def _note_tool(
        self,
        tool: str,
        *,
        observation: str,
        observation_tokens: int = 0,
        status: str,
        tool_s: float = 0.0,
    ) -> None:
        self._steps[-1] = msgspec.structs.replace(
            self._steps[-1],
            tool=tool,
            observation=observation,
            observation_tokens=observation_tokens,
            status=status,
            tool_s=tool_s,
        )

    def _answer(self, ok: bool, observation_tokens: int) -> ToolAnswer:
        return ToolAnswer(
            ok=ok,
            observation_tokens=observation_tokens,
            context_tokens=len(self._ids),
            outcome=self._outcome,
        )

    def _end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._on_end(self.transcript)


def live_agents(
    tasks: Sequence[Task],
    samples: int,
    *,
    tokenizer: Tokenizer,
    run_python: RunPython,
    limits: AgentLimits,
    sandbox_limits: SandboxLimits,
    tool_tasks: ToolTasks | None = None,
    on_end: OnEnd = lambda transcript: None,
) -> list[LiveAgent]:
    """Return an agent for each sample of each task, in order.

    Raises:
        TaskFileError: a prompt fills the context limit.
        AgentLimitError: `samples` below 1.
    """
    if samples < 1:
        raise AgentLimitError(f"samples of a task: found {samples}; give at least 1")
    return [
        LiveAgent(
            task,
            sample,
            tokenizer=tokenizer,
            run_python=run_python,
            limits=limits,
            sandbox_limits=sandbox_limits,
            tool_tasks=tool_tasks,
            on_end=on_end,
        )
        for task in tasks
        for sample in range(samples)
    ]
