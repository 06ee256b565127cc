"""An agent that follows a recorded script: exact lengths, recorded tool calls, random tokens."""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import NextAction, ToolAnswer, ToolListener
from heddle_rollout.clock import Clock
from heddle_rollout.engines import StepRequest, StepResult
from heddle_trace.columns import OK
from heddle_trace.schema import TrajectoryScript
from heddle_trace.step_table import ScriptSteps

FIRST_ID: Final = 3
"""Past the special tokens of most models."""


class TokenSource:
    """Token ids for a trace that has only counts: drawn by seed and name, the same in every run.

    Samples of one group share their prompt, as in the original, so that prefix caching behaves as
    with real agents.
    """

    def __init__(self, vocabulary: int, *, seed: int = 0, text: Sequence[int] = ()) -> None:
        """Ids are from `FIRST_ID` on; or stretches of the ids of a `text`, which drafts by n-grams
        need.

        Raises:
            ValueError: a vocabulary without ordinary tokens.
        """
        if vocabulary <= FIRST_ID:
            raise ValueError(
                f"a vocabulary of {vocabulary} tokens has none from {FIRST_ID} on to draw from"
            )
        self._vocabulary, self._seed, self._text = vocabulary, seed, text

    def ids(self, name: str, count: int) -> list[int]:
        """Return `count` ids; a longer answer for the same name begins with the shorter one."""
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        text = self._text
        if text:
            start = int.from_bytes(digest[:8], "little") % len(text)
            return [text[(start + i) % len(text)] for i in range(count)]
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        drawn: list[int] = rng.integers(FIRST_ID, self._vocabulary, size=count).tolist()
        return drawn


@mypyc_attr(allow_interpreted_subclasses=True)
class ScriptedAgent:
    """One recorded trajectory; implements `Agent`.

    Many live at once: each keeps its place in a common table of steps, and what is in the row of
    its current step.
    """

    __slots__ = (
        "_calls_tool",
        "_clock",
        "_context",
        "_first",
        "_index",
        "_last",
        "_made",
        "_observation",
        "_ok",
        "_output",
        "_prompt",
        "_rewritten",
        "_shared",
        "_started",
        "_table",
        "_tokens",
        "_tool",
        "_tool_s",
        "_tool_scale",
        "_truncated",
        "arrival_s",
        "group",
        "id",
        "task",
    )

    def __init__(
        self,
        script: TrajectoryScript,
        clock: Clock,
        *,
        first_arrival_s: float = 0.0,
        tokens: TokenSource | None = None,
        tool_scale: float = 1.0,
        id_: TrajectoryId | None = None,
        group: GroupId | None = None,
    ) -> None:
        """`tokens` None: for engines that make none. Tool calls take `tool_scale` of their time.

        `id_` and `group` replace the script's, for a script that runs more than once.
        """
        self.id = TrajectoryId(script.id) if id_ is None else id_
        self.group = GroupId(script.group) if group is None else group
        self.task, self._truncated = script.task, script.truncated
        self.arrival_s = script.arrival_s - first_arrival_s
        self._clock, self._tokens, self._tool_scale = clock, tokens, tool_scale
        steps = ScriptSteps.of(script.steps)
        self._table = steps.table
        self._first = steps.start
        """Row of its first step."""
        self._last = len(steps) - 1
        self._index = 0
        """The current step."""
        self._read()
        self._made = 0
        """Tokens of it made in dispatches that did not finish it."""
        self._started = False
        """Whether it was dispatched before: then its whole prompt is its own context."""
        self._rewritten = False
        """Whether the agent compacted its history since the last dispatch."""
        self._calls_tool = False
        self._context: list[int] | None = None
        """Tokens so far; None without a token source."""
        if tokens is not None:
            self._context = tokens.ids(f"prompt {script.group}", self.prompt_tokens)

    def _read(self) -> None:
        row = self._table.row(self._first + self._index)
        self._prompt, self._shared, self._output = row[0], row[1], row[2]
        self._observation, self._tool, self._ok, self._tool_s = row[3], row[4], row[5], row[6]

    @property
    def prompt_tokens(self) -> int:
        return self._table.row(self._first)[0]

    @property
    def last_context_tokens(self) -> int:
        """Size of its context at the end of the script, output included."""
        row = self._table.row(self._first + self._last)
        return row[0] + row[2]

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far; empty without a token source."""
        return self._context or ()

    def request(self) -> StepRequest:
        """Request exactly the rest of the step."""
        prompt, made = self._prompt, self._made
        started, rewritten = self._started, self._rewritten
        self._started, self._rewritten = True, False
        return StepRequest(
            trajectory=self.id,
            group=self.group,
            prompt_tokens=prompt + made,
            shared_tokens=prompt + made if started else self._shared,
            rewritten=rewritten,
            max_tokens=self._output - made,
            exact=True,
            prompt_ids=self._context or (),
        )

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens of a dispatch."""
        self._made += result.tokens
        if self._context is not None:
            self._context.extend(result.output_ids)

    def next_action(self) -> NextAction:
        """Do what the script did after this step."""
        tool = self._table.tools[self._tool]
        if self._index < self._last:
            return NextAction(reason="tool_call", tool=tool or "")
        return NextAction(
            reason="length_limit" if self._truncated else "answer",
            tool=tool,
            outcome="truncated" if self._truncated else "completed",
        )

    def call_tool(self, listener: ToolListener) -> None:
        """Wait for the recorded tool time, then go on with the recorded result.

        Raises:
            ValueError: a tool that takes negative or not-a-number seconds.
        """
        seconds = self._tool_s * self._tool_scale
        if not seconds >= 0.0:
            raise ValueError(f"a tool call of {self.id} cannot take {seconds} s")
        self._calls_tool = True
        self._clock.call_after(seconds, self._tool_ended, self._index, listener)

    def cancel_tool(self) -> None:
        self._calls_tool = False

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        """Go on with the recorded result; only the wait is cut short."""
        return self._next_step(False)

    def _tool_ended(self, index: int, listener: ToolListener) -> None:
        if self._calls_tool and index == self._index:
            self._calls_tool = False
            listener.tool_returned(self.id, self._next_step(OK[self._ok]))

    def _next_step(self, ok: bool | None) -> ToolAnswer:
        observation_tokens = self._observation
        end = self._prompt + self._output
        index = self._index = self._index + 1
        if index > self._last:
            return ToolAnswer(
                ok=ok,
                observation_tokens=observation_tokens,
                context_tokens=end + observation_tokens,
                outcome="truncated" if self._truncated else "completed",
            )
        self._read()
        prompt, shared = self._prompt, self._shared
        self._made, self._started = 0, False
        self._rewritten = shared < end
        if self._tokens is not None and self._context is not None:
            kept = self._context[:shared]
            name = f"step {index} of {self.id}"
            self._context = [*kept, *self._tokens.ids(name, prompt - len(kept))]
        return ToolAnswer(ok=ok, observation_tokens=observation_tokens, context_tokens=prompt)
