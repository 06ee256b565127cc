"""A trajectory of a client: its tool is the client, which sends the next request."""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from heddle_core.ids import GroupId, TrajectoryId
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, of_engine
from heddle_rollout.agents import ClientAgent, NextAction, ToolAnswer, ToolListener
from heddle_rollout.engines import StepRequest, StepResult
from heddle_runtime.generation import Generation, GenerationEnd, Refusal


class StepListener(Protocol):
    """Learns that a trajectory waits for its client."""

    def step_done(self, agent: "GatewayAgent") -> None:
        """The step has its whole answer, which no client has yet."""

    def step_over(self, agent: "GatewayAgent") -> None:
        """The step has ended, and the tool call has begun."""

    def step_aborted(self, agent: "GatewayAgent") -> None:
        """The engine has handed over the tokens of a step that is to end."""


def common_prefix(a: "array[int]", b: "array[int]") -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _context_of(step: ClientStep) -> "array[int]":
    return step.prompt_ids + step.output_ids if step.output_ids else step.prompt_ids


class _Dispatch:
    """Receives the tokens of one dispatch while it runs; late ones of an earlier are dropped."""

    __slots__ = ("reported", "step")

    def __init__(self, step: ClientStep) -> None:
        self.step: ClientStep | None = step
        self.reported = 0

    def take(self, ids: Sequence[int]) -> None:
        if self.step is not None:
            self.reported += len(ids)
            self.step.take(ids)

    def take_logprobs(self, logprobs: Sequence[Any]) -> None:
        """Pass on the log-probs of the tokens that come next."""
        if self.step is not None:
            self.step.live_logprobs.extend(logprobs)


class GatewayAgent(ClientAgent):
    """One trajectory; implements `Agent`."""

    __slots__ = (
        "_context",
        "_dispatch",
        "_end",
        "_kept",
        "_on_step",
        "_rewritten",
        "_shared",
        "last_prompt_tokens",
        "step",
    )

    def __init__(
        self,
        id_: TrajectoryId,
        group: GroupId,
        task: str,
        step: ClientStep,
        on_step: StepListener,
    ) -> None:
        """`step` may have tokens already, of a generation that was cancelled."""
        super().__init__(id_, group, task, len(step.prompt_ids) + len(step.output_ids))
        self._on_step = on_step
        self._shared = 0
        """Length of the prefix of the context that an engine had at the end of a dispatch."""
        self._rewritten = False
        self._dispatch: _Dispatch | None = None
        self._end: GenerationEnd | None = None
        self.step = step
        """The step under way, or the last one."""
        self._take_in(step)

    def _take_in(self, step: ClientStep) -> None:
        self.step = step
        self._context = _context_of(step)
        self._kept = len(step.output_ids)
        """Output tokens that are in the context."""
        self.last_prompt_tokens = len(step.prompt_ids)
        self._end = None

    @property
    def context_ids(self) -> "array[int]":
        """The context so far; never changed in place."""
        return self._context

    @property
    def context_tokens(self) -> int:
        return len(self._context)

    @property
    def runs(self) -> bool:
        """Whether an engine has its step."""
        return self._dispatch is not None and self._dispatch.step is not None

    # -- calls of the driver -----------------------------------------------------------------------

    def request(self) -> StepRequest:
        """Request the rest of the step."""
        step = self.step
        if self._dispatch is not None:
            self._dispatch.step = None
        step.revoke(self._kept)
        dispatch = self._dispatch = _Dispatch(step)
        step.dispatches += 1
        rewritten, self._rewritten = self._rewritten, False
        return StepRequest(
            trajectory=self.id,
            group=self.group,
            prompt_tokens=len(self._context),
            shared_tokens=self._shared,
            rewritten=rewritten,
            # At least 1: a step runs again if its engine died before it reported the last token.
            max_tokens=max(1, step.max_tokens - self._kept),
            exact=False,
            prompt_ids=self._context,
            resumable=step.resumable,
            payload=Generation(
                sampling=step.sampling,
                cache_salt=step.cache_salt,
                on_tokens=dispatch.take,
                on_logprobs=dispatch.take_logprobs,
                features=step.features,
                streams=step.streams,
                relay=None if self._kept else step.relay,
                attempts=step.attempts,
                adapter=step.adapter,
                name=step.name,
                trace=step.trace,
                prompt_json=b"" if self._kept else step.prompt_json,
            ),
        )

    def on_step_end(self, result: StepResult) -> None:
        """Keep the tokens of a dispatch."""
        step, dispatch = self.step, self._dispatch
        reported = 0
        if dispatch is not None:
            reported, dispatch.step = dispatch.reported, None
        ids = result.output_ids[: step.max_tokens - self._kept]
        self._context = self._context + array("I", ids)
        self._kept += len(ids)
        self._shared = len(self._context)
        extras = result.extras
        if isinstance(extras, GenerationEnd):
            step.logprobs.extend(extras.logprobs)
            step.weight_versions.extend(extras.weight_versions)
        step.take(ids[reported:])
        step.uncounted = 0 if ids else result.tokens
        if isinstance(extras, Refusal):
            step.fail(of_engine(extras))
        elif result.error:
            step.fail(ApiError(400, f"the engine refused it: {result.error}"))
        elif result.finished:
            self._end = extras if isinstance(extras, GenerationEnd) else self._plain_end()
        elif step.abort_reason:
            self._on_step.step_aborted(self)

    def _plain_end(self) -> GenerationEnd:
        full = self._kept >= self.step.max_tokens
        return GenerationEnd(finish_reason="length" if full else "stop")

    def next_action(self) -> NextAction:
        """Hand the tokens to the client, whose next request ends the tool call."""
        end = self._end or self._plain_end()
        self.step.finish(end)
        self._on_step.step_done(self)
        cut = end.finish_reason == "length"
        return NextAction(
            reason="length_limit" if cut else "tool_call",
            tool="",
            # A client that waits has the text made, which may name the tool.
            tool_follows=self.step.has_text and self.step.clients > 0,
        )

    def call_tool(self, listener: ToolListener) -> None:
        super().call_tool(listener)
        self._on_step.step_over(self)

    # -- calls of the gateway ----------------------------------------------------------------------

    def begin(self, step: ClientStep) -> None:
        """The client has sent its next request; only while `waits`."""
        before, prompt = self._context, _context_of(step)
        shared = common_prefix(before, prompt)
        # A template may write the last reply a little differently: that is no rewritten history.
        self._rewritten = shared < self.last_prompt_tokens or len(prompt) < len(before)
        self._shared = min(shared, self._shared)
        added = len(prompt) - (shared if self._rewritten else len(before))
        self._take_in(step)
        self._tool_returns(
            ToolAnswer(ok=None, observation_tokens=added, context_tokens=len(prompt))
        )
