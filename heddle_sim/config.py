"""What a simulated cluster is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from heddle_core.defaults import ENGINE_START_S, REPORT_DELAY_S, REPORT_INTERVAL_S
from heddle_core.ids import EngineId, EngineShape
from heddle_rollout.clock import Clock
from heddle_rollout.engines import EngineRefusedError
from heddle_rollout.tools import ToolPools
from heddle_sim.latency import LatencyTable
from heddle_sim.services import ToolServices


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKvConfig:
    """KV in host memory: how much, how fast, and who shares it."""

    scope: Literal["engine", "cluster"]
    """`engine`: each engine has its own, which ends with it. `cluster`: one store for all."""
    gpu_bytes: float
    """Room for each GPU of the engine, or of the cluster."""
    gpus: int
    """GPUs of the cluster."""
    gpu_bytes_per_s: float
    """Speed of a load, for each GPU of the engine."""
    fixed_s: float
    """Seconds of a load, whatever its size."""

    def blocks(self, engine_gpus: int, block_bytes: int) -> int:
        """Blocks that the store of an engine of so many GPUs, or of the cluster, has room for."""
        gpus = self.gpus if self.scope == "cluster" else engine_gpus
        return int(gpus * self.gpu_bytes // block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What the simulated cluster does; every time in seconds.

    Raises:
        ValueError: a negative fixed time of transfers, or no bandwidth.
    """

    table: Callable[[EngineShape], LatencyTable]
    """True iteration times of engines of a shape."""
    transfer_fixed_s: float
    transfer_bytes_per_s: float
    handover_fixed_s: float | None = None
    """Instead of `transfer_fixed_s` from and to engines that only prefill; None: the same."""
    moves_by: Literal["kv", "prefill"] = "kv"
    """How a context gets to its new engine: its KV is moved, or it is prefilled there, beside what
    that engine is doing, in one of its spare slots."""
    max_batched_tokens: int = 8192
    block_size: int = 16
    prefix_caching: bool = True
    prefill_first: bool = False
    """SGLang's scheduler: prompts are computed while decoding waits."""
    host_kv: HostKvConfig | None = None
    tool_capacity: int | None = None
    """Tool calls that run at once; None: any number, as on a serverless platform."""
    tools: ToolServices | None = None
    """Services that tools run on, instead of `tool_capacity`."""
    tool_scale: float = 1.0
    """Their seconds count so many times, as those of tools do in a run on real engines."""
    seed: int = 0
    """Of their draws."""
    engine_start_s: float = ENGINE_START_S
    """From StartEngine to EngineReady once the rollout is under way; before its first dispatch the
    engines of a plan count as ready, as frameworks keep them between rollouts."""
    engine_start_s_at: Mapping[EngineShape, float] = field(default_factory=dict)
    """The same for shapes where it is known."""
    dispatch_s: float = 0.0
    """From a dispatch until its engine sees it."""
    prediction_s: float = 0.0
    """Latency of the prediction service."""
    planning_s: float | None = None
    """Seconds that a search for a plan takes; None: what the problem charges."""
    report_interval_s: float = REPORT_INTERVAL_S
    """Between samples of an engine's counters; 0 switches them off."""
    report_delay_s: float = REPORT_DELAY_S
    """Age of a sample when it is delivered: no router sees counters of this very instant."""
    faults: tuple[tuple[float, EngineId], ...] = ()
    """(time_s, engine): this engine dies then, if it lives."""
    speed: Callable[[EngineId], float] = lambda _: 1.0
    """Relative speed of an engine; a tiny spread breaks ties in conformance scenarios."""

    def __post_init__(self) -> None:
        if not (self.transfer_fixed_s >= 0.0 and self.transfer_bytes_per_s > 0.0):
            raise ValueError(
                f"a KV transfer needs transfer_fixed_s >= 0 and transfer_bytes_per_s > 0, "
                f"not {self.transfer_fixed_s} and {self.transfer_bytes_per_s}"
            )

    def tool_pools(self, clock: Clock) -> ToolPools | None:
        """Make the pools of tools on a clock; None where `tool_capacity` limits all of them."""
        tools = self.tools
        return None if tools is None else tools.made(clock, self.seed, scale=self.tool_scale)

    def start_s(self, shape: EngineShape) -> float:
        return self.engine_start_s_at.get(shape.as_role("both"), self.engine_start_s)

    def transfer_s(self, kv_bytes: float) -> float:
        """Seconds that `kv_bytes` take from one engine to another, once both are free."""
        return self.transfer_fixed_s + kv_bytes / self.transfer_bytes_per_s

    def handover_s(self, kv_bytes: float) -> float:
        """The same from or to an engine that only prefills."""
        fixed_s = self.handover_fixed_s
        if fixed_s is None:
            fixed_s = self.transfer_fixed_s
        return fixed_s + kv_bytes / self.transfer_bytes_per_s


def check_settings(
    engine: EngineId,
    table: LatencyTable,
    max_running: int,
    max_batched_tokens: int,
    block_size: int,
    speed: float,
) -> None:
    """Refuse what no engine can be set to.

    Raises:
        EngineRefusedError: names the engine, the setting and its range.
    """
    sizes = min(len(table.base_s), len(table.per_context_s)) - 1
    wrong = ""
    if not 1 <= max_running <= sizes:
        wrong = (
            f"max_running must be 1 to {sizes}, the largest batch of its table, not {max_running}"
        )
    elif max_batched_tokens < max_running:
        wrong = f"max_batched_tokens={max_batched_tokens} cannot carry max_running={max_running}"
    elif (verified := _most_verified(table, max_running)) > max_batched_tokens:
        wrong = (
            f"max_running={max_running} and its drafts (cluster.speculation) are {verified} tokens "
            f"of one iteration, more than max_batched_tokens={max_batched_tokens}: take fewer"
        )
    elif not 1 <= block_size <= table.kv_capacity_tokens:
        wrong = f"block_size={block_size} must be 1 to {table.kv_capacity_tokens}, its KV capacity"
    elif not speed > 0.0:
        wrong = f"speed must be above 0, not {speed}"
    elif min(table.base_s[1:]) <= 0.0 or min(table.per_context_s) < 0.0:
        wrong = "its table has an iteration that takes no time"
    if wrong:
        raise EngineRefusedError(f"engine {engine}: {wrong}")


def _most_verified(table: LatencyTable, max_running: int) -> int:
    """Tokens that the largest iteration of sequences with drafts verifies; 0 without drafts."""
    drafting = table.drafting
    if drafting is None:
        return 0
    return max(batch * (k + 1) for batch, k in enumerate(drafting.drafts[: max_running + 1]))
