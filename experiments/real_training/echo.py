"""A task to learn within minutes: repeat the letter that a tool has shown, step after step.

Everything is token ids; no tokenizer is needed. The prompt shows a letter. The model generates up
to `step_tokens`, or ends the step early; then a tool shows the next letter after a while. The
reward is the share of all the tokens it could have generated that are the letter shown last.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import NextAction, ToolAnswer, ToolListener
from heddle_rollout.clock import Clock
from heddle_rollout.engines import StepRequest, StepResult

END_OF_STEP: Final = 0
"""The token that ends a generation: the model's end of text."""
SHOW: Final = 3
"""Stands before a letter; ids below are special."""
_TOOL: Final = "show"


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoTask:
    """How the task is made.

    Raises:
        ValueError: a value out of range, with its name.
    """

    letters: int = 8
    steps: int = 3
    """Of the longest trajectories; every prompt has one to so many."""
    step_tokens: int = 16
    """Of a generation, at most."""
    tool_s: float = 0.2
    """Mean of a tool call, which is exponentially distributed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("letters", "steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not 0.0 <= self.tool_s < 1e6:
            raise ValueError(f"tool_s is {self.tool_s}: it must be from 0 to below 1e6 seconds")

    @property
    def vocabulary(self) -> int:
        """Tokens that a model needs to have."""
        return SHOW + 1 + self.letters

    @property
    def most_tokens(self) -> int:
        """Of the largest context."""
        return self.steps * (2 + self.step_tokens)

    def prompt(self, number: int) -> "EchoPrompt":
        """Make prompt `number`; equal numbers give equal prompts."""
        rng = random.Random(f"{self.seed}/{number}")
        steps = rng.randint(1, self.steps)
        return EchoPrompt(
            letters=tuple(SHOW + 1 + rng.randrange(self.letters) for _ in range(steps)),
            tool_s=tuple(rng.expovariate(1.0) * self.tool_s for _ in range(steps - 1)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPrompt:
    """What all samples of a group are shown, and how long the tools take."""

    letters: tuple[int, ...]
    """One for each step, as token ids."""
    tool_s: tuple[float, ...]
    """One less."""


class EchoAgent:
    """One sample; implements `experiments.real_training.trainer.TrainedAgent`."""

    def __init__(
        self, id_: TrajectoryId, group: GroupId, task: EchoTask, prompt: EchoPrompt, clock: Clock
    ) -> None:
        self._id, self._group, self._task, self._prompt = id_, group, task, prompt
        self._clock = clock
        self._ids = [SHOW, prompt.letters[0]]
        self._shared = 0
        """Length of the context when the last dispatch ended."""
        self._begin = len(self._ids)
        """Of the current step's generation."""
        self._step = 0
        self._calls_tool = False
        self.spans: list[tuple[int, int]] = []
        """See `TrainedAgent`."""
        self.logprobs: list[float] = []
        """See `TrainedAgent`."""

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's name."""
        return self._id

    @property
    def group(self) -> GroupId:
        """Its prompt."""
        return self._group

    @property
    def task(self) -> str:
        """What kind of task it is."""
        return "echo"

    @property
    def arrival_s(self) -> float:
        """It arrives when it is admitted."""
        return 0.0

    @property
    def prompt_tokens(self) -> int:
        """The first letter and the token before it."""
        return 2

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far."""
        return self._ids

    @property
    def reward(self) -> float:
        """Share of right tokens, from 0 to 1."""
        right = sum(
            min(self._ids[begin:end].count(letter), self._task.step_tokens)
            for (begin, end), letter in zip(self.spans, self._prompt.letters, strict=False)
        )
        return right / (self._task.step_tokens * len(self._prompt.letters))

    def request(self) -> StepRequest:
        """Request the rest of the step."""
        left = self._task.step_tokens - (len(self._ids) - self._begin)
        return StepRequest(
            trajectory=self._id,
            group=self._group,
            prompt_tokens=len(self._ids),
            shared_tokens=self._shared,
            # At least 1: a step runs again if its engine died before it reported the last token.
            max_tokens=max(1, left),
            exact=False,
            prompt_ids=self._ids,
        )

    def on_step_end(self, result: StepResult) -> None:
        """Keep tokens and log-probs of a dispatch.

        Raises:
            ValueError: the engine reports no log-probs.
        """
        if len(result.output_logprobs) != len(result.output_ids):
            raise ValueError(
                f"{self._id}: {len(result.output_ids)} tokens came with "
                f"{len(result.output_logprobs)} log-probs; set the engines' logprobs"
            )
        self._ids = [*self._ids, *result.output_ids]
        self.logprobs += result.output_logprobs
        self._shared = len(self._ids)

    def next_action(self) -> NextAction:
        """Call the tool for the next letter, or end after the last one."""
        self.spans.append((self._begin, len(self._ids)))
        if self._step + 1 < len(self._prompt.letters):
            return NextAction(reason="tool_call", tool=_TOOL)
        return NextAction(reason="answer", outcome="completed")

    def call_tool(self, listener: ToolListener) -> None:
        """Wait for the tool."""
        self._calls_tool = True
        self._clock.call_after(
            self._prompt.tool_s[self._step], self._tool_ended, self._step, listener
        )

    def cancel_tool(self) -> None:
        """Stop waiting."""
        self._calls_tool = False

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        """Go on with the next letter all the same."""
        return self._observe(ok=False)

    def _tool_ended(self, step: int, listener: ToolListener) -> None:
        if self._calls_tool and step == self._step:
            self._calls_tool = False
            listener.tool_returned(self._id, self._observe(ok=True))

    def _observe(self, *, ok: bool) -> ToolAnswer:
        self._step += 1
        self._ids = [*self._ids, SHOW, self._prompt.letters[self._step]]
        self._begin = len(self._ids)
        return ToolAnswer(ok=ok, observation_tokens=2, context_tokens=len(self._ids))
