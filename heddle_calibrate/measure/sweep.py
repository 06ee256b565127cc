"""A sweep: every measurement of every TP degree, in shuffled order, so that drift is visible.

One engine runs at a time; a second one starts only for moves of a context and for colocation. The
prompts of a timed batch are in the prefix cache before, so that its steps begin together.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from heddle_calibrate.measure.one_engine import loops, serve_clients, trials_on, warm_up
from heddle_calibrate.measure.probe import EngineProbe, MeasureError
from heddle_calibrate.measure.session import Measurements, OnProgress, Session, SweepSpec
from heddle_calibrate.measure.two_engines import trials_between
from heddle_calibrate.sweeps import SleepTrial, StartStopTrial
from heddle_rollout.engines import EngineClient, EngineRefusedError, Launcher
from heddle_rollout.scripted_agent import TokenSource


@runtime_checkable
class _CanSleep(Protocol):
    """An engine that can release its memory and take it again."""

    async def sleep(self, level: int = 1) -> float: ...
    async def wake(self) -> float: ...


async def measure(
    launcher: Launcher,
    spec: SweepSpec,
    *,
    tokens: TokenSource | None,
    on_progress: OnProgress,
    measured: Measurements | None = None,
    ready: Callable[[EngineClient], None] = lambda _: None,
) -> Measurements:
    """Measure everything, then close the launcher; `ready` is called with each ready engine.

    `tokens` is None for engines that make none. `measured` is filled in place, so that a failure
    keeps the trials before it.

    Raises:
        MeasureError: an engine failed, did not answer, or refused a request within its limits.
    """
    probe = EngineProbe(launcher, gpu=spec.gpu, max_running=spec.max_running)
    measured = Measurements() if measured is None else measured
    try:
        for tp in spec.tps:
            session = Session(probe, spec, tp, tokens, measured, on_progress)
            await _measure_at(session, ready)
        return measured
    except EngineRefusedError as error:
        raise MeasureError(
            f"{error}; ask for less with profile.max_context or --max-running"
        ) from None
    finally:
        await launcher.close()


async def _measure_at(session: Session, ready: Callable[[EngineClient], None]) -> None:
    """Measure starts and stops at one TP degree, then one engine, then two."""
    session.expect(session.size.starts)
    for _ in range(session.size.starts - 1):
        engine, start_s = await _start(session, session.tp)
        await _stop(session, engine, start_s, others=0)
    engine, start_s = await _start(session, session.tp)
    ready(engine)
    session.measured.kv_capacity_tokens[session.tp] = engine.kv_capacity_tokens
    session.set_limits(engine)
    if session.most < 1:
        raise MeasureError(
            f"at TP {session.tp} an engine holds {engine.kv_capacity_tokens} tokens of KV and "
            f"profile.max_context is {session.spec.max_context}: "
            f"measuring takes {session.size.least_tokens} or more of both"
        )
    await warm_up(session, engine)
    await session.shuffled(trials_on(session, engine))
    await loops(session, engine)
    if session.spec.served:
        await serve_clients(session, engine)
    await _with_two(session, engine)
    await _sleep(session, engine)
    await _stop(session, engine, start_s, others=0)


async def _start(session: Session, tp: int) -> tuple[EngineClient, float]:
    session.begin(f"start at TP {tp}")
    return await session.probe.start(tp)


async def _stop(session: Session, engine: EngineClient, start_s: float, *, others: int) -> None:
    stop_s = await session.probe.stop(engine)
    session.measured.lives.append(
        StartStopTrial(
            order=session.position,
            tp=engine.spec.shape.tp,
            others=others,
            start_s=start_s,
            stop_s=stop_s,
        )
    )


async def _with_two(session: Session, engine: EngineClient) -> None:
    """Measure with a second engine, of the first TP degree, if another engine fits."""
    session.expect(1)
    try:
        other, start_s = await _start(session, session.spec.tps[0])
    except MeasureError as error:
        session.measured.notes[f"TP {session.tp}: no second engine, so no moves: {error}"] = None
        return
    await session.shuffled(trials_between(session, engine, other))
    await _stop(session, other, start_s, others=1)


async def _sleep(session: Session, engine: EngineClient) -> None:
    if not isinstance(engine, _CanSleep):
        session.measured.notes["sleep and wake-up: these engines cannot"] = None
        return
    for level in (1, 2):
        try:
            sleep_s, wake_s = await engine.sleep(level), await engine.wake()
        except EngineRefusedError as error:
            session.measured.notes[f"sleep and wake-up: {error}"] = None
            return
        session.measured.naps.append(
            SleepTrial(
                order=session.position, tp=session.tp, level=level, sleep_s=sleep_s, wake_s=wake_s
            )
        )
