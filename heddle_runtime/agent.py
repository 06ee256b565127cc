"""One trajectory's own side: what it asks the model next, and what its tools do meanwhile.

A driver knows agents only by this face. `heddle_runtime.replay` follows a recorded script;
`heddle_runtime.agents.live` is a real agent whose tool calls come out of what the model wrote.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from heddle_core.events import Outcome, StopReason
from heddle_core.ids import GroupId, TrajectoryId
from heddle_runtime.clock import RunClock
from heddle_runtime.engine import StepEnd, StepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What a finished generation came to: a tool call, or the end of the trajectory."""

    reason: StopReason
    tool: str | None = None
    """The tool to call; None when the trajectory ends here."""
    outcome: Outcome = "completed"
    """How it ends; of no meaning when a tool is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool call came to."""

    ok: bool | None
    observation_tokens: int
    """Tokens that the answer appended to the context."""
    context_tokens: int
    """Size of the next prompt."""
    outcome: Outcome | None = None
    """How the trajectory ends, if it ends with this call; None when it goes on."""


class Agent(Protocol):
    """One trajectory. It holds its context; the driver never looks inside."""

    @property
    def id(self) -> TrajectoryId: ...  # noqa: D102
    @property
    def group(self) -> GroupId: ...  # noqa: D102
    @property
    def task(self) -> str: ...  # noqa: D102
    @property
    def arrival_s(self) -> float:
        """Seconds after the first arrival of the rollout."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Size of the first prompt."""
        ...

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far, tokens of the present step included; empty without real tokens."""
        ...

    def request(self) -> StepRequest:
        """Return what is left to generate of the present step."""
        ...

    def take(self, end: StepEnd) -> None:
        """Keep the tokens of a dispatch, whether it finished the step or not."""

    def verdict(self) -> StepVerdict:
        """Read the finished step; asked once for each step, after `take`."""
        ...

    async def call_tool(self) -> ToolAnswer:
        """Run the tool call that the step ended in, and go on to the next step.

        The driver cuts a call that takes too long by cancelling it, and then asks `tool_cut`.
        """
        ...

    def tool_cut(self, limit_s: float) -> ToolAnswer:
        """Go on as if the tool had answered that it was cut off after `limit_s`."""
        ...


async def answer_within(limit_s: float | None, agent: Agent, clock: RunClock) -> ToolAnswer:
    """Have an agent call its tool, and cut it after `limit_s` of the clock; None: never."""
    if limit_s is None:
        return await agent.call_tool()
    try:
        async with asyncio.timeout(limit_s / clock.speed) as limit:
            return await agent.call_tool()
    except TimeoutError:
        if not limit.expired():
            raise  # the tool's own
        return agent.tool_cut(limit_s)
