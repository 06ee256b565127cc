"""The interface of an engine: calls of the driver, and reports of the engine.

An engine is simulated (`heddle_sim.engine_client`), a vLLM process (`heddle_runtime.vllm.engine`)
or a foreign server. All of them pass the same tests (`tests/rollout/contract.py`).
`EngineCapabilities` lists what an engine can do besides running steps.

Reports are calls of an `EngineListener`, never from inside the call that caused them. They are no
futures: the driver's reaction to the end of a step, such as the next dispatch, must take effect
before anything else happens at that time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from heddle_core.events import MoveWay
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec


class EngineRefusedError(ValueError):
    """An engine cannot execute a request; the message states which one and why."""


class EngineCapabilities(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What an engine can do besides running steps."""

    export_kv: bool = True
    """Hand KV to another engine. Without it, a move is a prefill on the target."""
    import_kv: bool = True
    """Pull KV from another engine. Without it, a move is a prefill here and needs no link."""
    preempt: bool = True
    """End a step early and keep its tokens. Without it, a step runs to its end."""
    update_weights: bool = True
    """Load other weights on demand. Without it, the owner of the engine updates it."""


class StepRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One dispatch: the generation of a step, or of what an earlier dispatch left of it."""

    trajectory: TrajectoryId
    group: GroupId
    prompt_tokens: int
    """The whole context of this generation, tokens kept from an earlier dispatch included."""
    shared_tokens: int
    """Length of the prefix that was the context at the end of the last dispatch."""
    rewritten: bool = False
    """Whether the agent compacted its history since: KV of it on other engines is useless."""
    max_tokens: int
    """Tokens to make at most."""
    exact: bool
    """Whether to make exactly `max_tokens`, as a replay does, or to stop at the model's end."""
    keep_kv: bool = False
    """Whether its KV stays on the engine after its end, until `forget`: another engine will copy
    it. An engine that cannot keep it leaves it in its prefix cache."""
    prompt_ids: Sequence[int] = ()
    """The prompt itself; empty for an engine that makes no tokens."""
    resumable: bool = True
    """Whether the rest of it may be a dispatch of its own. Otherwise it is preempted by no command:
    it ends by itself, by its trajectory's end or by its engine's."""
    payload: Any = None
    """Data of the agent for the engine, such as sampling parameters; opaque here."""


class StepResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Result of a dispatch. Times are seconds and add up to the time inside the engine."""

    trajectory: TrajectoryId
    tokens: int
    """Tokens made in this dispatch."""
    finished: bool
    """False when an abort or the engine's failure ended it."""
    queued_s: float = 0.0
    """In the engine before the first prefill."""
    prefill_s: float = 0.0
    """From there to the first token."""
    decode_s: float = 0.0
    """From the first token on, the cost of the engine's own preemptions included."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache or pulled from another engine."""
    recomputes: int = 0
    """The engine's own preemptions of it, each of which prefills again."""
    output_ids: tuple[int, ...] = ()
    """The tokens, where the engine makes them."""
    output_logprobs: tuple[float, ...] = ()
    """Their log-probs under the weights that made them, where the engine was set to report them."""
    extras: Any = None
    """Data of the engine for the agent that sent a `payload`; opaque here."""
    error: str = ""
    """Why the engine could not execute the dispatch; `finished` is then True."""


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that an engine keeps ready to be pulled by another."""

    source: EngineId
    trajectory: TrajectoryId
    kv_tokens: int
    """Tokens of KV that it holds; whole blocks."""
    kv_bytes: int
    expires_s: float
    """On the event loop's clock. A later pull may give another trajectory's KV without an error:
    none may begin after that."""
    params: dict[str, Any] = {}
    """Data of the engine's own connector; opaque here."""


class KvPlaced(NamedTuple):
    """The state of a context on the engine that it was moved to."""

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
    """Receives the reports of engines; the driver's cluster."""

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        """A requested engine can take steps."""

    def step_ended(self, engine: EngineId, result: StepResult) -> None:
        """A dispatch has ended; reported exactly once for each, unless the engine fails first."""

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        """Answer of `export_kv`; None when the engine has nothing of the trajectory any more."""

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        """Answer of `import_kv`."""

    def weights_updated(self, engine: EngineId, version: int) -> None:
        """Answer of `update_weights`: what is generated from now on is of this version."""

    def engine_stopped(self, engine: EngineId) -> None:
        """A requested stop is done; its resources are free."""

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        """An engine died, in any state.

        `salvaged` has every dispatch whose end was not reported, with the tokens that had come in.
        """


class EngineClient(Protocol):
    """One engine, from the request for it on. No call blocks; each takes effect at once."""

    @property
    def spec(self) -> EngineSpec:
        """The requested engine."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; constant. The driver never calls what it cannot do."""
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
        """Hint: the trajectory's KV here is of no more use, or need not be kept any more."""

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        """Keep a trajectory's KV ready for a pull. Ends in `kv_exported`.

        Returns False, and no answer follows, when nothing of the trajectory is here. `prompt_ids`
        is its context so far; empty for an engine that makes no tokens. `move` comes back with the
        answer, which may be late: by then the trajectory may be on another move.
        """
        ...

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> KvPlaced | None:
        """Bring a context into the prefix cache. Ends in `kv_placed`, which has `move` again.

        The engine pulls `kv`. Without a valid handle, after a failed pull, or if it imports no KV,
        it prefills where it can do so, else it does nothing (`way` "none"). When there is nothing
        to do, it returns what is here, and no report follows.
        """

    def sample(self) -> EngineSample:
        """Return the newest counters."""
        ...

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        """Load the weights at `path`, with every step kept and all KV void.

        With `keep_kv`, steps go on with the KV that they have, and later ones find it too. Ends in
        `weights_updated`; an engine that cannot load them fails.
        """

    def stop(self) -> None:
        """End the engine, which has no step any more. Ends in `engine_stopped`."""

    def kill(self) -> None:
        """End the engine now, in any state, without a report; nothing of it is left behind."""


class Launcher(Protocol):
    """Starts engines on this machine or simulator."""

    def start(self, spec: EngineSpec, listener: EngineListener) -> EngineClient:
        """Begin to start an engine. Ends in `engine_ready` or `engine_failed`."""
        ...

    async def close(self) -> None:
        """End every engine that still runs; afterwards none of their processes is left."""
