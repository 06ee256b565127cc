"""One dispatched step inside a simulated engine, and the context that it is part of."""

from typing import Final

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import StepResult

COMING: Final = 0
"""It has not reached the engine."""
WAITING: Final = 1
"""It is in the engine's queue."""
RUNNING: Final = 2
"""It is in the batch."""
ENDED: Final = 3
LOADING: Final = 4
"""Its context is on the way from host memory."""


class Context:
    """What one engine has of one trajectory: cached KV, and its step.

    Samples of a group are siblings: each knows the first that was here, and those that held its
    prompt are a ring with it.
    """

    __slots__ = (
        "blocks",
        "first_sibling",
        "group_prompt_tokens",
        "holds_group_prompt",
        "kept",
        "newer",
        "next_sibling",
        "older",
        "request",
        "trajectory",
    )

    def __init__(self, trajectory: TrajectoryId) -> None:
        self.trajectory = trajectory
        self.blocks = 0
        """Whole blocks in the prefix cache."""
        self.kept = 0
        """Whole blocks that stay for another engine to copy: in use, and no cache."""
        self.older: Context | None = None
        """The one with cached blocks that was used before it."""
        self.newer: Context | None = None
        """The one with cached blocks that was used after it."""
        self.first_sibling: Context | None = None
        """Itself, or another; None until a step of it was looked up."""
        self.next_sibling: Context | None = None
        """The next of the ring."""
        self.group_prompt_tokens = 0
        """Of the first sibling: the prompt that the samples begin with."""
        self.holds_group_prompt = False
        """Whether it may hold that prompt."""
        self.request: Request | None = None
        """Its step, from dispatch to end."""


class Request:
    """One dispatched step inside an engine.

    `made_tokens` is exact while the request is not decoding; a decoding one makes a token in every
    iteration, so its context is ``offset_tokens + iterations of the engine`` and nothing is written
    per token. `drafts` says what `offset_tokens` is where it makes more.
    """

    # Set as it begins to decode, where steps have drafts.
    draw: float
    """How lucky this one is, of the normal distribution."""
    held: int
    """Its blocks, when the engine had done `held_at` iterations."""
    held_at: int
    samples: int
    """Other samples of its prompt that had ended a step when it began."""
    joined_tokens: int
    """Tokens that it had made when it began to decode."""
    rate: int
    """By how much it advances in an iteration, as `offset_tokens`."""

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "computed_tokens",
        "context",
        "draw",
        "epoch",
        "finish",
        "first_token_s",
        "group",
        "held",
        "held_at",
        "joined_tokens",
        "keep_kv",
        "loaded",
        "made_tokens",
        "offset_tokens",
        "order",
        "output_tokens",
        "prompt_tokens",
        "rate",
        "recomputes",
        "samples",
        "shared_tokens",
        "started_s",
        "state",
    )

    def __init__(
        self,
        context: Context,
        group: GroupId,
        prompt_tokens: int,
        shared_tokens: int,
        output_tokens: int,
        started_s: float,
        keep_kv: bool = False,
    ) -> None:
        self.context = context
        self.state = COMING
        self.group = group
        self.prompt_tokens = prompt_tokens
        self.shared_tokens = shared_tokens
        self.output_tokens = output_tokens
        self.started_s = started_s
        self.admitted_s = -1.0
        self.first_token_s = -1.0
        self.made_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.recomputes = 0
        self.finish = -1
        self.offset_tokens = 0
        self.order = 0
        self.epoch = 0
        self.keep_kv = keep_kv
        """Whether its KV stays after its end, for another engine."""
        self.loaded = False
        """Whether its context has come from host memory since it last ran."""

    def result(self, now_s: float, *, finished: bool) -> StepResult:
        """The result of a step that ends at `now_s`, in any state."""
        admitted_s, first_token_s = self.admitted_s, self.first_token_s
        if admitted_s < 0.0:
            admitted_s = now_s
        if first_token_s < 0.0:
            first_token_s = now_s
        return StepResult(
            trajectory=self.context.trajectory,
            tokens=self.made_tokens,
            finished=finished,
            queued_s=admitted_s - self.started_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
            cached_tokens=self.cached_tokens,
            recomputes=self.recomputes,
        )
