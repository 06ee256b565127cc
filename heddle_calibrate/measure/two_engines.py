"""Measurements on two engines: moves of a context, and the slowdown of engines on one machine."""

from functools import partial

from heddle_calibrate.measure.cells import SHORTEST, DecodeCell
from heddle_calibrate.measure.session import PlannedTrial, Session
from heddle_calibrate.measure.trials import decode_trial
from heddle_calibrate.sweeps import ColocationTrial, MoveTrial
from heddle_rollout.engines import EngineClient

MOVE_BATCH = 4
"""Sequences that decode on each engine while a context moves, in every second measurement."""
NO_KV = "these engines hand out no KV: contexts are prefilled"
LEAST_MOVED = 64
"""Tokens of a context: less than a block of KV would not move."""
LONGER = 4
"""Factor by which the other engine decodes longer, so that it covers the whole measurement."""


def trials_between(session: Session, one: EngineClient, other: EngineClient) -> list[PlannedTrial]:
    longest = session.limits.longest(2 * MOVE_BATCH, session.size.output)
    planned = []
    for part in (8, 3, 1):
        context = max(LEAST_MOVED, longest // part)
        for batch in (0, min(MOVE_BATCH, session.most - 1)):
            for by_kv in (True, False):
                what = f"move {context} {'by KV' if by_kv else 'by prefill'}, {batch} beside"
                planned.append(
                    PlannedTrial(what, partial(move, session, one, other, context, batch, by_kv))
                )
    halves = dict.fromkeys((1, max(1, session.most // 2)))
    planned += [
        PlannedTrial(f"{n} beside {n}", partial(colocate, session, one, other, n)) for n in halves
    ]
    return planned


async def move(
    session: Session,
    source: EngineClient,
    target: EngineClient,
    context: int,
    batch: int,
    by_kv: bool,
) -> None:
    """Move a context that ran on one engine to the other."""
    if by_kv and NO_KV in session.measured.notes:
        return  # the same as by prefill
    probe, moving = session.probe, session.cold(context)
    ran = await probe.step(source, moving.request(context, 1))
    ids = (*moving.ids, *ran.end.output_ids) if moving.ids else ()
    loads = []
    for engine in (source, target):
        sequences = [session.cold(SHORTEST) for _ in range(batch)]
        await session.fill_cache(engine, sequences, SHORTEST)
        space = session.limits.longest(2 * MOVE_BATCH, 0) - SHORTEST
        loads.append(session.load(engine, sequences, SHORTEST, space))
    kv, export_s = None, 0.0
    if by_kv:
        kv, export_s = await probe.export(source, moving.trajectory, ids)
        if kv is None:
            session.measured.notes[NO_KV] = None
    placed, place_s = await probe.place(target, moving.trajectory, ids, kv)
    for load in loads:
        await load.end()
    for engine in (source, target):
        engine.forget(moving.trajectory)
    session.measured.moves.append(
        MoveTrial(
            order=session.position,
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


async def colocate(session: Session, engine: EngineClient, other: EngineClient, batch: int) -> None:
    """Decode on one engine alone, then again while the other decodes."""
    output = min(LONGER * session.size.output, session.limits.longest(batch, SHORTEST))
    context = max(SHORTEST, session.limits.longest(batch, output) // 4)
    cell = DecodeCell(batch, context, True)
    warm = session.warm(0, batch)
    position, tp = session.position, session.tp
    alone = decode_trial(await session.batch(engine, warm, context), cell, order=position, tp=tp)
    others = [session.cold(context) for _ in range(batch)]
    await session.fill_cache(other, others, context)
    await session.fill_cache(engine, warm, context)
    load = session.load(other, others, context, output)
    both = decode_trial(await session.batch(engine, warm, context), cell, order=position, tp=tp)
    await load.end()
    if alone is None or both is None:
        session.measured.spoiled += 1
        return
    session.measured.beside.append(
        ColocationTrial(
            order=position,
            tp=tp,
            batch=batch,
            context=context,
            alone_s=alone.step_s,
            beside_s=both.step_s,
        )
    )
