"""Ledgers with engines and homed trajectories as a test sets them: the real view, no controller."""

from dataclasses import replace

from heddle_core.engine_state import Engine
from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.estimate.history import History
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.policy import PolicyContext
from heddle_core.trajectory import Phase, Trajectory


def step_cost(tp: int = 1) -> StepCost:
    """Twice the GPUs, nearly half the time."""
    return StepCost(
        t0_s=0.02 / tp**0.8,
        t1_s=2e-4 / tp,
        t2_s=4e-8 / tp,
        prefill_s=5e-5 / tp,
        kv_capacity_tokens=60_000 * tp,
    )


def policy_context(
    *,
    gpus: int = 8,
    tps: tuple[int, ...] = (1, 2, 4, 8),
    max_running: int = 16,
    transfer_fixed_s: float = 0.1,
    history: History | None = None,
) -> PolicyContext:
    return PolicyContext(
        pools={"h100": gpus},
        shape=EngineShape("h100", 1),
        shape_choices=tuple(EngineShape("h100", tp) for tp in tps),
        max_running=max_running,
        cost=CostModel(
            by_shape={EngineShape("h100", tp): step_cost(tp) for tp in tps},
            transfer_fixed_s=transfer_fixed_s,
            transfer_s_per_token=1e-6,
        ),
        history=history,
        seed=7,
    )


def ledger_of(*tps: int, max_running: int = 16) -> Ledger:
    """Engines e0, e1, ... of these TP degrees."""
    ledger = Ledger()
    for i, tp in enumerate(tps):
        add_engine(ledger, f"e{i}", tp, max_running=max_running)
    return ledger


def add_engine(ledger: Ledger, name: str, tp: int = 1, *, max_running: int = 16) -> Engine:
    engine = Engine(
        id=EngineId(name),
        shape=EngineShape("h100", tp),
        max_running=max_running,
        kv_capacity_tokens=step_cost(tp).kv_capacity_tokens,
    )
    ledger.add_engine(engine)
    return engine


def add_trajectory(
    ledger: Ledger,
    name: str,
    home: str | None = None,
    *,
    phase: Phase = "tool",
    context_tokens: int = 1_000,
    remaining_tokens: float = 1_000.0,
    output_tokens: int = 0,
    tool_s: float = 0.0,
    step: int = 0,
) -> Trajectory:
    """A trajectory that is in a tool at `home`, unless the arguments differ."""
    t = Trajectory(
        id=TrajectoryId(name),
        rollout=RolloutId("rollout"),
        group=GroupId("g"),
        task="any",
        weights_version=0,
        prompt_tokens=context_tokens,
        arrived_s=0.0,
        context_tokens=context_tokens,
        runnable_s=0.0,
        remaining_tokens=remaining_tokens,
        output_tokens=output_tokens,
        tool_s=tool_s,
        step=step,
    )
    ledger.add_trajectory(t)
    if home is not None:
        ledger.set_home(t, EngineId(home))
        ledger.held.pop(t.id)
        t.phase = phase
    return t


def history(**changes: object) -> History:
    return replace(
        History(
            output_quantiles=(500.0, 1_000.0, 2_000.0, 4_000.0, 8_000.0, 20_000.0),
            appended_per_output=0.5,
            tool_s_per_output=1e-3,
            step_output_tokens=300.0,
        ),
        **changes,  # type: ignore[arg-type]
    )
