"""Measurements on two engines: moves of a context, and what one engine costs the other."""

from functools import partial

from heddle_rollout.engines import EngineClient
from heddle_runtime.measure_plan import SHORTEST, DecodeCell
from heddle_runtime.measure_session import Session, Trial
from heddle_runtime.measure_windows import decode_trial
from heddle_trace.sweep_files import BesideTrial, MoveTrial

MOVE_BATCH = 4
"""Sequences that decode on each engine while a context moves, in every second measurement."""
NO_KV = "these engines hand out no KV: contexts are prefilled"
LEAST_MOVED = 64
"""Tokens of a context: less than a block of KV would not move."""
LONGER = 4
"""How much longer the other engine decodes, so that it does all the while."""


def trials_between(session: Session, one: EngineClient, other: EngineClient) -> list[Trial]:
    """Everything that two engines are measured by."""
    longest = session.limits.longest(2 * MOVE_BATCH, session.size.output)
    found = []
    for part in (8, 3, 1):
        context = max(LEAST_MOVED, longest // part)
        for batch in (0, min(MOVE_BATCH, session.most - 1)):
            for by_kv in (True, False):
                what = f"move {context} {'by KV' if by_kv else 'by prefill'}, {batch} beside"
                found.append(Trial(what, partial(move, session, one, other, context, batch, by_kv)))
    halves = dict.fromkeys((1, max(1, session.most // 2)))
    found += [Trial(f"{n} beside {n}", partial(beside, session, one, other, n)) for n in halves]
    return found


async def move(
    session: Session,
    source: EngineClient,
    target: EngineClient,
    context: int,
    batch: int,
    by_kv: bool,
) -> None:
    """Bring a context that ran on one engine to the other."""
    if by_kv and NO_KV in session.found.notes:
        return  # it would be the same as by prefill
    bench, moving = session.bench, session.fresh(context)
    ran = await bench.step(source, moving.request(context, 1))
    ids = (*moving.ids, *ran.end.output_ids) if moving.ids else ()
    loads = []
    for engine in (source, target):
        seats = [session.fresh(SHORTEST) for _ in range(batch)]
        await session.lay(engine, seats, SHORTEST)
        room = session.limits.longest(2 * MOVE_BATCH, 0) - SHORTEST
        loads.append(session.load(engine, seats, SHORTEST, room))
    kv, export_s = None, 0.0
    if by_kv:
        kv, export_s = await bench.export(source, moving.trajectory, ids)
        if kv is None:
            session.found.notes[NO_KV] = None
    placed, place_s = await bench.place(target, moving.trajectory, ids, kv)
    for load in loads:
        await load.end()
    for engine in (source, target):
        engine.forget(moving.trajectory)
    session.found.moves.append(
        MoveTrial(
            order=session.place,
            tp=source.spec.shape.tp,
            target_tp=target.spec.shape.tp,
            batch=batch,
            context=context,
            way=placed.way,
            kv_tokens=placed.tokens,
            kv_bytes=kv.kv_bytes if kv is not None else 0,
            export_s=export_s,
            place_s=place_s,
        )
    )


async def beside(session: Session, engine: EngineClient, other: EngineClient, batch: int) -> None:
    """Decode on one engine, then again while the other does the same for longer."""
    output = min(LONGER * session.size.output, session.limits.longest(batch, SHORTEST))
    context = max(SHORTEST, session.limits.longest(batch, output) // 4)
    cell = DecodeCell(batch, context, True)
    seats = session.seats(0, batch)
    place, tp = session.place, session.tp
    alone = decode_trial(await session.batch(engine, seats, context), cell, order=place, tp=tp)
    others = [session.fresh(context) for _ in range(batch)]
    await session.lay(other, others, context)
    await session.lay(engine, seats, context)
    load = session.load(other, others, context, output)
    both = decode_trial(await session.batch(engine, seats, context), cell, order=place, tp=tp)
    await load.end()
    if alone is None or both is None:
        session.found.spoiled += 1
        return
    session.found.beside.append(
        BesideTrial(
            order=place,
            tp=tp,
            batch=batch,
            context=context,
            alone_s=alone.step_s,
            beside_s=both.step_s,
        )
    )
