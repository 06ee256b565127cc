"""The agent of one trajectory: its next prompt, and its tool calls.

The driver uses agents only through this protocol. `ScriptedAgent` follows a recorded script.
`ClientAgent` is the base of those whose steps a client requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import msgspec

from heddle_core.events import ArrivalHints, Outcome, StopReason
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import StepRequest, StepResult


class NextAction(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What follows a finished generation: a tool call, or the end of the trajectory."""

    reason: StopReason
    tool: str | None = None
    """The tool to call; None when the trajectory ends here."""
    tool_follows: bool = False
    """Whether the tool is named later: the call begins by `Driver.begin_tool`."""
    outcome: Outcome = "completed"
    """How it ends; of no meaning when a tool is called."""


class ToolAnswer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Result of a tool call."""

    ok: bool | None
    observation_tokens: int
    """Tokens that the result appended to the context."""
    context_tokens: int
    """Size of the next prompt."""
    outcome: Outcome | None = None
    """Outcome of the trajectory if it ends with this call; None when it goes on."""


class ToolListener(Protocol):
    """Receives the results of tool calls; the driver's tool pool."""

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        """A call has ended, and the agent has gone on to its next step."""

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        """The tool has a defect, which ends the run with this error."""


class Agent(Protocol):
    """One trajectory with its context, which the driver never reads."""

    @property
    def id(self) -> TrajectoryId: ...
    @property
    def group(self) -> GroupId: ...
    @property
    def task(self) -> str: ...
    @property
    def arrival_s(self) -> float:
        """Seconds after its rollout was opened; one that is admitted later arrives at once."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Size of the first prompt."""
        ...

    @property
    def context_ids(self) -> Sequence[int]:
        """The context so far, tokens of the current step included; empty without real tokens."""
        ...

    def request(self) -> StepRequest:
        """Return the request for the rest of the current step."""
        ...

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens of a dispatch, whether it finished the step or not."""

    def next_action(self) -> NextAction:
        """Read the finished step; called once for each step, after `on_step_end`."""
        ...

    def call_tool(self, listener: ToolListener) -> None:
        """Begin the tool call that the step ended in. Ends in one call of `listener`.

        The listener is never called from inside.
        """

    def cancel_tool(self) -> None:
        """End the running call; it may not report a result any more."""

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        """Go on as if the tool had reported a timeout after `limit_s`.

        Follows `cancel_tool`.
        """
        ...


class ClientAgent(ABC):
    """Base of agents whose tool is a client: its call returns with the client's next request."""

    __slots__ = ("_listener", "group", "hints", "id", "prompt_tokens", "task")

    arrival_s = 0.0

    def __init__(self, id_: TrajectoryId, group: GroupId, task: str, prompt_tokens: int) -> None:
        self.id, self.group, self.task = id_, group, task
        self.prompt_tokens = prompt_tokens
        self.hints: ArrivalHints | None = None
        """Set before it arrives."""
        self._listener: ToolListener | None = None

    @property
    @abstractmethod
    def context_tokens(self) -> int:
        """Size of the context so far."""
        ...

    @property
    def waits(self) -> bool:
        """Whether it waits for its client."""
        return self._listener is not None

    def call_tool(self, listener: ToolListener) -> None:
        self._listener = listener

    def cancel_tool(self) -> None:
        """Wait no more: the trajectory is cancelled."""
        self._listener = None

    def on_tool_timeout(self, limit_s: float) -> ToolAnswer:
        return self._ended("cancelled")

    def end(self, outcome: Outcome) -> None:
        """The client sends no more requests; only while `waits`."""
        self._tool_returns(self._ended(outcome))

    def _tool_returns(self, answer: ToolAnswer) -> None:
        listener, self._listener = self._listener, None
        assert listener is not None, f"{self.id} does not wait for its client"
        listener.tool_returned(self.id, answer)

    def _ended(self, outcome: Outcome) -> ToolAnswer:
        tokens = self.context_tokens
        return ToolAnswer(ok=None, observation_tokens=0, context_tokens=tokens, outcome=outcome)
