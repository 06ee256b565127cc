"""An agent that follows a recorded script: exact lengths, recorded tool calls, random tokens."""

import hashlib
from collections.abc import Sequence

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import NextAction, ToolAnswer, ToolListener
from heddle_rollout.clock import Clock
from heddle_rollout.engines import StepRequest, StepResult
from heddle_trace.schema import TrajectoryScript


class TokenSource:
    """Token ids for a trace that has only counts: drawn by seed and name, the same in every run.

    Samples of one group share their prompt, as in the original, so that prefix caching behaves as
    with real agents.
    """

    def __init__(self, vocabulary: int, *, seed: int = 0, first_id: int = 3) -> None:
        """Ids are from `first_id` on, past the special tokens of most models.

        Raises:
            ValueError: a vocabulary without ordinary tokens.
        """
        if vocabulary <= first_id:
            raise ValueError(
                f"a vocabulary of {vocabulary} tokens has none from {first_id} on to draw from"
            )
        self._vocabulary, self._seed, self._first_id = vocabulary, seed, first_id

    def ids(self, name: str, count: int) -> list[int]:
        """Return `count` ids; a longer answer for the same name begins with the shorter one."""
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        drawn: list[int] = rng.integers(self._first_id, self._vocabulary, size=count).tolist()
        return drawn


@mypyc_attr(allow_interpreted_subclasses=True)
class ScriptedAgent:
    """One recorded trajectory; implements `Agent`."""

    def __init__(
        self,
        script: TrajectoryScript,
        clock: Clock,
        *,
        first_arrival_s: float = 0.0,
        tokens: TokenSource | None = None,
        tool_scale: float = 1.0,
    ) -> None:
        """`tokens` None: for engines that make none. Tool calls take `tool_scale` of their time."""
        self._id, self._group = TrajectoryId(script.id), GroupId(script.group)
        self._arrival_s = script.arrival_s - first_arrival_s
        self._script, self._clock, self._tokens = script, clock, tokens
        self._tool_scale = tool_scale
        self._index = 0
        """The current step."""
        self._made = 0
        """Tokens of it made in dispatches that did not finish it."""
        self._started = False
        """Whether it was dispatched before: then its whole prompt is its own context."""
        self._rewritten = False
        """Whether the agent compacted its history since the last dispatch."""
        self._calls_tool = False
        self._context: list[int] = []
        if tokens is not None:
            self._context = tokens.ids(f"prompt {script.group}", script.steps[0].prompt_tokens)

    @property
    def id(self) -> TrajectoryId:
        """Its name in the trace."""
        return self._id

    @property
    def group(self) -> GroupId:
        """The prompt that it is a sample of."""
        return self._group

    @property
    def task(self) -> str:
        """Its workload."""
        return self._script.task

    @property
    def arrival_s(self) -> float:
        """Seconds after the first arrival of the rollout."""
        return self._arrival_s

    @property
    def prompt_tokens(self) -> int:
        """Size of the first prompt."""
        return self._script.steps[0].prompt_tokens

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far; empty without a token source."""
        return self._context

    def request(self) -> StepRequest:
        """Request exactly the rest of the step."""
        step = self._script.steps[self._index]
        prompt_tokens = step.prompt_tokens + self._made
        request = StepRequest(
            trajectory=self._id,
            group=self._group,
            prompt_tokens=prompt_tokens,
            shared_tokens=prompt_tokens if self._started else step.shared_tokens,
            rewritten=self._rewritten,
            max_tokens=step.output_tokens - self._made,
            exact=True,
            prompt_ids=self._context,
        )
        self._started, self._rewritten = True, False
        return request

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens of a dispatch."""
        self._made += result.tokens
        if self._tokens is not None:
            self._context.extend(result.output_ids)

    def next_action(self) -> NextAction:
        """Do what the script did after this step."""
        script = self._script
        step = script.steps[self._index]
        if self._index < len(script.steps) - 1:
            return NextAction(reason="tool_call", tool=step.tool or "")
        return NextAction(
            reason="length_limit" if script.truncated else "answer",
            tool=step.tool,
            outcome="truncated" if script.truncated else "completed",
        )

    def call_tool(self, listener: ToolListener) -> None:
        """Wait for the recorded tool time, then go on with the recorded result.

        Raises:
            ValueError: a tool that takes negative or not-a-number seconds.
        """
        seconds = self._script.steps[self._index].tool_s * self._tool_scale
        if not seconds >= 0.0:
            raise ValueError(f"a tool call of {self._id} cannot take {seconds} s")
        self._calls_tool = True
        self._clock.call_after(seconds, self._tool_ended, self._index, listener)

    def cancel_tool(self) -> None:
        """Stop waiting."""
        self._calls_tool = False

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        """Go on with the recorded result; only the wait is cut short."""
        return self._next_step(False, self._script.steps[self._index].tool_tokens)

    def _tool_ended(self, index: int, listener: ToolListener) -> None:
        if self._calls_tool and index == self._index:
            self._calls_tool = False
            step = self._script.steps[index]
            listener.tool_returned(self._id, self._next_step(step.tool_ok, step.tool_tokens))

    def _next_step(self, ok: bool | None, observation_tokens: int) -> ToolAnswer:
        script = self._script
        step = script.steps[self._index]
        self._index += 1
        if self._index == len(script.steps):
            return ToolAnswer(
                ok=ok,
                observation_tokens=observation_tokens,
                context_tokens=step.prompt_tokens + step.output_tokens + observation_tokens,
                outcome="truncated" if script.truncated else "completed",
            )
        following = script.steps[self._index]
        self._made, self._started = 0, False
        self._rewritten = following.shared_tokens < step.prompt_tokens + step.output_tokens
        if self._tokens is not None:
            kept = self._context[: following.shared_tokens]
            new = following.prompt_tokens - len(kept)
            name = f"step {self._index} of {self._id}"
            self._context = [*kept, *self._tokens.ids(name, new)]
        return ToolAnswer(
            ok=ok,
            observation_tokens=observation_tokens,
            context_tokens=following.prompt_tokens,
        )
