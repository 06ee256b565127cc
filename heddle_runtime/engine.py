"""What the driver asks of an engine and what an engine tells it, whatever the engine is made of.

Two kinds of engine implement this: `heddle_runtime.fake_engine`, which makes no tokens and keeps
time only, and `heddle_runtime.vllm.engine`. Both pass the same tests (`tests/runtime/contract.py`).

Answers come as calls of an `EngineListener`, made from the event loop and never from inside the
call that caused them. Not as futures: what a driver does about an end, such as the next dispatch,
must take effect before anything else happens at that instant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from heddle_core.events import MoveWay
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec


class EngineRefusedError(ValueError):
    """An engine was asked for something that it can never do; the message says what and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """One dispatch: the generation of a step, or of what an earlier dispatch left of it."""

    trajectory: TrajectoryId
    group: GroupId
    prompt_tokens: int
    """The whole context of this generation, tokens kept from an earlier dispatch included."""
    shared_tokens: int
    """How many of them, from the first on, were context at the end of the last dispatch."""
    rewritten: bool = False
    """Whether the agent compacted its history since: KV of it on other engines is of no use."""
    max_tokens: int
    """Tokens to make at most."""
    exact: bool
    """Whether to make exactly `max_tokens`, as a replay does, or to stop where the model does."""
    prompt_ids: Sequence[int] = ()
    """The prompt itself; empty for an engine that makes no tokens."""


class StepEnd(NamedTuple):
    """How a dispatch ended. Times are seconds, and add up to the time inside the engine."""

    trajectory: TrajectoryId
    tokens: int
    """Tokens made in this dispatch."""
    finished: bool
    """False when an abort ended it."""
    queued_s: float
    """In the engine before the first prefill."""
    prefill_s: float
    """From there to the first token."""
    decode_s: float
    """From the first token on."""
    cached_tokens: int
    """Tokens of the prompt that the engine found in its prefix cache, or pulled from another."""
    recomputes: int
    """How often the engine itself took the KV away and had to prefill again."""
    output_ids: tuple[int, ...] = ()
    """The tokens, where the engine makes them."""
    error: str = ""
    """Why the engine could not carry the dispatch out; `finished` is then True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHandle:
    """A prefix that an engine keeps ready to be pulled by another."""

    source: EngineId
    trajectory: TrajectoryId
    kv_tokens: int
    """Tokens of KV that it holds; whole blocks."""
    kv_bytes: int
    expires_s: float
    """On the event loop's clock. A pull after that may give another trajectory's KV without an
    error, so that nobody may begin one."""
    params: dict[str, Any] = field(default_factory=dict)
    """What the engine's own connector needs to know; opaque here."""


class KvPlaced(NamedTuple):
    """What became of a context on the engine that it was moved to."""

    way: MoveWay
    tokens: int
    """Tokens of KV that are there now."""


class EngineSample(NamedTuple):
    """An engine's own counters at one moment."""

    running: int
    waiting: int
    kv_used_tokens: int
    preemptions: int
    """Since its start."""


class EngineListener(Protocol):
    """Who wants to know; the driver."""

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        """An engine that was asked for can take steps."""

    def step_ended(self, engine: EngineId, end: StepEnd) -> None:
        """A dispatch has ended; told exactly once for each, unless the engine fails first."""

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        """Answer of `export_kv`; None when the engine has nothing of the trajectory."""

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        """Answer of `import_kv`."""

    def weights_updated(self, engine: EngineId, version: int) -> None:
        """Answer of `update_weights`: what is generated from now on is of this version."""

    def engine_stopped(self, engine: EngineId) -> None:
        """A stop that was asked for is done; its resources are free."""

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepEnd]]
    ) -> None:
        """An engine died, at whatever point of its life.

        `salvaged` has every dispatch whose end was not told, with the tokens that had come in.
        """


class EngineClient(Protocol):
    """One engine, from the moment it is asked for. No call blocks; each takes effect at once."""

    @property
    def spec(self) -> EngineSpec:
        """What was asked for."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that it holds; a step's prompt and output must fit. 0 until it is ready."""
        ...

    def start(self, request: StepRequest) -> None:
        """Run a step. Ends in `step_ended`.

        Raises:
            EngineRefusedError: it can never fit, or the trajectory has a step here already.
        """

    def abort(self, trajectory: TrajectoryId) -> None:
        """End a step early, its tokens kept and its KV left in the prefix cache.

        Ends in the dispatch's one `step_ended`, finished if it won the race. Nothing happens when
        no step of the trajectory is here.
        """

    def forget(self, trajectory: TrajectoryId) -> None:
        """Hint: the trajectory's KV here is of no more use."""

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> None:
        """Keep a trajectory's KV ready for a pull. Ends in `kv_exported`.

        `prompt_ids` is its context so far; empty for an engine that makes no tokens. `move` comes
        back with the answer, which may be late: by then the trajectory may be on another move.
        """

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> None:
        """Bring a context into the prefix cache. Ends in `kv_placed`, which has `move` again.

        By pulling `kv`; when there is no handle, it has expired, or the pull fails, by prefilling
        where the engine can do so, else not at all (`way` "none").
        """

    def sample(self) -> EngineSample:
        """Return the newest counters."""
        ...

    def update_weights(self, version: int, path: str) -> None:
        """Load the weights at `path`, with every step kept and all KV void.

        Ends in `weights_updated`; an engine that cannot load them fails.
        """

    def stop(self) -> None:
        """End the engine, which has no step any more. Ends in `engine_stopped`."""

    def kill(self) -> None:
        """End the engine now, whatever it does, telling nobody; nothing of it is left behind."""


class Launcher(Protocol):
    """Starts engines; knows the machine."""

    def start(self, spec: EngineSpec, listener: EngineListener) -> EngineClient:
        """Begin to start an engine. Ends in `engine_ready` or `engine_failed`."""
        ...

    async def close(self) -> None:
        """End every engine that is still there; afterwards no process of theirs is left."""
