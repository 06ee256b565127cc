"""Loops of a sweep, replayed on the simulated engine: the test of all parts of a fit together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from heddle_calibrate.sweeps import LoopStep, LoopTrial, Sweep
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_sim.calendar import Calendar
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable


class SimulatedLoop(NamedTuple):
    makespan_s: float
    ttft_s: float
    tpot_s: float


def replay_loop(
    table: LatencyTable,
    clients: Sequence[Sequence[LoopStep]],
    *,
    max_running: int,
    max_batched_tokens: int,
    block_tokens: int,
    dispatch_s: float,
) -> SimulatedLoop:
    """Run clients that each send their next step when the last one ends.

    Raises:
        EngineRefusedError: a step does not fit on the engine.
    """
    clock = Calendar()
    ended: list[tuple[float, float]] = []
    left = {TrajectoryId(str(i)): list(reversed(steps)) for i, steps in enumerate(clients)}
    context: dict[TrajectoryId, int] = {}

    def send(name: TrajectoryId) -> None:
        step = left[name].pop()
        engine.start(
            name,
            GroupId(name),
            prompt_tokens=step.prompt,
            shared_tokens=min(context.get(name, 0), step.prompt),
            output_tokens=step.output,
        )
        context[name] = step.prompt + step.output

    def on_end(result: StepResult) -> None:
        tpot_s = result.decode_s / max(1, result.tokens - 1)
        ended.append((result.queued_s + result.prefill_s, tpot_s))
        if left[result.trajectory]:
            send(result.trajectory)

    engine = SimEngine(
        clock,
        EngineId("e0"),
        table,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        block_size=block_tokens,
        on_end=on_end,
        arrival_s=dispatch_s,
    )
    for name in left:
        send(name)
    clock.run()
    return SimulatedLoop(
        makespan_s=clock.now_s,
        ttft_s=sum(ttft_s for ttft_s, _ in ended) / len(ended),
        tpot_s=sum(tpot_s for _, tpot_s in ended) / len(ended),
    )


def loop_errors(
    sweep: Sweep, tables: Mapping[int, LatencyTable], dispatch_s: float
) -> dict[str, Any]:
    """Signed relative errors of every loop, and their means and worst, in percent."""
    rows = [_error(sweep, loop, tables[loop.tp], dispatch_s) for loop in sweep.loops]
    if not rows:
        return {"runs": 0, "note": "the sweep has no loops"}
    report: dict[str, Any] = {"runs": len(rows)}
    for name in ("makespan", "tpot", "ttft"):
        size = [abs(row[f"{name}_pct"]) for row in rows]
        report[f"{name}_mean_abs_pct"] = round(sum(size) / len(size), 2)
        report[f"{name}_worst_pct"] = round(max(size), 2)
    return {"unseen": report, "loops": rows}


def _error(
    sweep: Sweep, loop: LoopTrial, table: LatencyTable, dispatch_s: float
) -> dict[str, float]:
    simulated = replay_loop(
        table,
        loop.clients,
        max_running=sweep.max_running,
        max_batched_tokens=sweep.max_batched_tokens,
        block_tokens=sweep.block_tokens,
        dispatch_s=dispatch_s,
    )
    return {
        "tp": loop.tp,
        "clients": len(loop.clients),
        "makespan_pct": _pct(simulated.makespan_s, loop.makespan_s),
        "tpot_pct": _pct(simulated.tpot_s, loop.tpot_s),
        "ttft_pct": _pct(simulated.ttft_s, loop.ttft_s),
    }


def _pct(simulated: float, measured: float) -> float:
    # NumPy's round differs from Python's, and only the interpreted engine yields NumPy's floats.
    return round(float(simulated / measured - 1) * 100, 2) if measured > 0 else 0.0
