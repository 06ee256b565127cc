"""A request's steps as an agent of the driver, whose tool is the client.

A trajectory is a request id of verl. Each of its `generate` calls is a step; between two of them
runs its tool. No engine and no Ray here.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from heddle_core.events import Outcome
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import ClientAgent, NextAction, ToolAnswer, ToolListener
from heddle_rollout.engines import StepRequest, StepResult

NO_LIMIT = 1 << 20
"""Tokens of a step whose limit the client did not name."""


class SampleIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent loop manager knows of a request, and the request itself does not say."""

    group: str = ""
    """The prompt that it samples; verl's `uid`."""
    prompt: str = ""
    """The prompt's name in an epoch file; "": none."""
    task: str = ""
    """verl's `data_source`."""
    rollout: str = ""
    """The announced rollout that it belongs to; "": none."""


class StepPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a step."""

    tokens: int
    group: str
    """Group of a trajectory that begins with this prompt, unless its identity has one."""
    max_tokens: int = NO_LIMIT
    resumable: bool = True
    """Whether the rest of it may be a request of its own."""


class Grant(NamedTuple):
    """The dispatch of a step: the client may call this engine now."""

    address: str
    """verl's name of the engine."""
    handle: Any
    request_id: str
    """For the engine; each dispatch has its own."""
    priority: int
    """vLLM's: lower first."""
    kept_tokens: int
    """Tokens of earlier dispatches that the step keeps."""


class EngineCall:
    """One `generate` call of a client: a step from its request to its release."""

    __slots__ = ("engine", "granted", "prompt", "released", "session", "waiter")

    def __init__(self, session: "RequestAgent", prompt: StepPrompt) -> None:
        self.session, self.prompt = session, prompt
        self.waiter: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self.granted: Grant | None = None
        """Its dispatch under way."""
        self.engine: Any = None
        """The `FrameworkEngine` that it has a slot of."""
        self.released = False
        """Whether the client has ended it, though the driver does not know it yet."""

    def grant(self, grant: Grant) -> None:
        """Let the client go on."""
        self.granted = grant
        if not self.waiter.done():
            self.waiter.set_result(grant)

    def withdraw(self) -> None:
        """Its dispatch has ended before the step: the client waits for another."""
        self.granted = None
        if self.waiter.done():
            self.waiter = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(error)
            self.waiter.exception()  # the client may have gone: then nobody would retrieve it


class RequestAgent(ClientAgent):
    """A trajectory; implements `Agent`."""

    context_ids: Sequence[int] = ()
    context_tokens = 0
    """Its context at the end of the last step."""

    def __init__(
        self,
        id_: TrajectoryId,
        prompt: StepPrompt,
        identity: SampleIdentity,
        *,
        task: str,
        on_idle: "Callable[[RequestAgent], None]",
    ) -> None:
        """`on_idle` is called when a step has ended and no other is there."""
        group = GroupId(identity.group or prompt.group)
        super().__init__(id_, group, identity.task or task, prompt.tokens)
        self.call: EngineCall | None = EngineCall(self, prompt)
        """The step that waits or runs."""
        self.kept_tokens = 0
        """Tokens of earlier dispatches of the step."""
        self._next: EngineCall | None = None
        """A step that was requested before the end of the last was known."""
        self._outcome: Outcome | None = None
        self._on_idle = on_idle

    @property
    def ending(self) -> bool:
        """Whether it ends with its step."""
        return self._outcome is not None

    def free(self, *, late_releases: bool) -> bool:
        """Whether a step may be requested.

        With `late_releases` also while a step runs: its release may come after the next request.
        """
        if self._next is not None or self._outcome is not None:
            return False
        call = self.call
        return call is None or call.released or (late_releases and call.granted is not None)

    def begin(self, prompt: StepPrompt) -> EngineCall:
        call = EngineCall(self, prompt)
        if self.waits:
            self._return(call)
        else:
            self._next = call
        return call

    def end(self, outcome: Outcome) -> None:
        """End the trajectory, now or with its step."""
        self._outcome = outcome
        if self.waits:
            super().end(outcome)

    def _return(self, call: EngineCall) -> None:
        if not self.waits:
            return
        self.call, self.kept_tokens = call, 0
        tokens = call.prompt.tokens
        appended = max(0, tokens - self.context_tokens)
        self._tool_returns(ToolAnswer(ok=None, observation_tokens=appended, context_tokens=tokens))

    # -- Agent ------------------------------------------------------------------------------------

    def request(self) -> StepRequest:
        """The rest of the step."""
        assert self.call is not None
        prompt = self.call.prompt
        return StepRequest(
            trajectory=self.id,
            group=self.group,
            prompt_tokens=prompt.tokens + self.kept_tokens,
            shared_tokens=min(self.context_tokens, prompt.tokens) + self.kept_tokens,
            max_tokens=max(1, prompt.max_tokens - self.kept_tokens),
            exact=False,
            resumable=prompt.resumable,
            payload=self.call,
        )

    def on_step_end(self, result: StepResult) -> None:
        """Count the tokens of a dispatch."""
        self.kept_tokens += result.tokens
        if result.finished and self.call is not None:
            self.context_tokens = self.call.prompt.tokens + self.kept_tokens

    def next_action(self) -> NextAction:
        """The client goes on: its tool has no name here."""
        if self._outcome is not None and self._next is None:
            return NextAction(reason="answer", outcome=self._outcome)
        return NextAction(reason="tool_call", tool="")

    def call_tool(self, listener: ToolListener) -> None:
        """Wait for the client's next request."""
        super().call_tool(listener)
        self.call = None
        if self._next is not None:
            following, self._next = self._next, None
            asyncio.get_running_loop().call_soon(self._return, following)
        else:
            self._on_idle(self)
