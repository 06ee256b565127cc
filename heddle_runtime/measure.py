"""Sweeps real engines: what takes how long, in shuffled order, so that drift can be told apart.

One engine is measured at a time; only what concerns two, the move of a context and their sharing of
a machine, has two alive. Before a batch is timed its prompts are brought into the prefix cache, so
that its steps begin together.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from heddle_rollout.engines import EngineClient, EngineRefusedError, Launcher
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.bench import Bench, MeasureError
from heddle_runtime.measure_one import loops, trials_on, warm_up
from heddle_runtime.measure_session import Found, Order, Report, Session
from heddle_runtime.measure_two import trials_between
from heddle_trace.sweep_files import LifeTrial, NapTrial

__all__ = ["Found", "MeasureError", "Order", "measure"]


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory back; few can."""

    async def sleep(self, level: int = 1) -> float: ...
    async def wake(self) -> float: ...


async def measure(
    launcher: Launcher,
    order: Order,
    *,
    tokens: TokenSource | None,
    report: Report,
    found: Found | None = None,
    ready: Callable[[EngineClient], None] = lambda _: None,
) -> Found:
    """Measure everything, then close the launcher; `ready` is shown each engine once it is.

    `tokens` is None for engines that make none. `found` is filled, so that what was measured
    outlasts a failure.

    Raises:
        MeasureError: an engine failed, did not answer, or refused what it should be able to do.
    """
    bench = Bench(launcher, gpu=order.gpu, max_running=order.max_running)
    found = Found() if found is None else found
    try:
        for tp in order.tps:
            session = Session(bench, order, tp, tokens, found, report)
            await _measure_at(session, ready)
        return found
    except EngineRefusedError as error:
        raise MeasureError(f"{error}; ask for less with --max-context or --max-running") from None
    finally:
        await launcher.close()


async def _measure_at(session: Session, ready: Callable[[EngineClient], None]) -> None:
    """Measure lives at one TP degree, then what one engine does, then what two do."""
    session.expect(session.size.lives)
    for _ in range(session.size.lives - 1):
        engine, start_s = await _start(session, session.tp)
        await _stop(session, engine, start_s, others=0)
    engine, start_s = await _start(session, session.tp)
    ready(engine)
    session.found.kv_capacity_tokens[session.tp] = engine.kv_capacity_tokens
    session.settle(engine)
    if session.most < 1:
        raise MeasureError(
            f"at TP {session.tp} an engine holds {engine.kv_capacity_tokens} tokens of KV and "
            f"--max-context is {session.order.max_context}: "
            f"measuring takes {session.size.least_tokens} or more of both"
        )
    await warm_up(session, engine)
    await session.shuffled(trials_on(session, engine))
    await loops(session, engine)
    await _with_two(session, engine)
    await _nap(session, engine)
    await _stop(session, engine, start_s, others=0)


async def _start(session: Session, tp: int) -> tuple[EngineClient, float]:
    session.tell(f"start at TP {tp}")
    return await session.bench.start(tp)


async def _stop(session: Session, engine: EngineClient, start_s: float, *, others: int) -> None:
    stop_s = await session.bench.stop(engine)
    session.found.lives.append(
        LifeTrial(
            order=session.place,
            tp=engine.spec.shape.tp,
            others=others,
            start_s=start_s,
            stop_s=stop_s,
        )
    )


async def _with_two(session: Session, engine: EngineClient) -> None:
    """Measure with a second engine, of the first TP degree, if there is room for one."""
    session.expect(1)
    try:
        other, start_s = await _start(session, session.order.tps[0])
    except MeasureError as error:
        session.found.notes[f"TP {session.tp}: no second engine, so no moves: {error}"] = None
        return
    await session.shuffled(trials_between(session, engine, other))
    await _stop(session, other, start_s, others=1)


async def _nap(session: Session, engine: EngineClient) -> None:
    if not isinstance(engine, Sleeper):
        session.found.notes["sleep and wake-up: these engines cannot"] = None
        return
    for level in (1, 2):
        try:
            sleep_s, wake_s = await engine.sleep(level), await engine.wake()
        except EngineRefusedError as error:
            session.found.notes[f"sleep and wake-up: {error}"] = None
            return
        session.found.naps.append(
            NapTrial(
                order=session.place, tp=session.tp, level=level, sleep_s=sleep_s, wake_s=wake_s
            )
        )
