"""Measurements on one engine: decoding batches, prompts, aborts, and a load of everything."""

import asyncio
from functools import partial

from heddle_core.ids import GroupId
from heddle_rollout.engines import EngineClient, StepRequest
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_runtime.bench import Heard
from heddle_runtime.measure_plan import (
    OUTLAST,
    SHORTEST,
    DecodeCell,
    PrefillCell,
    decode_cells,
    loop_scripts,
    prefill_cells,
)
from heddle_runtime.measure_session import Session, Trial
from heddle_runtime.measure_windows import decode_trial, loop_trial, prefill_trials
from heddle_trace.schema import TrajectoryScript
from heddle_trace.sweep_files import AbortTrial


def trials_on(session: Session, engine: EngineClient) -> list[Trial]:
    """Everything that one engine is measured by, but loops."""
    limits, size = session.limits, session.size
    found = [
        Trial(f"decode {cell.batch} x {cell.context}", partial(decode, session, engine, cell))
        for cell in decode_cells(size, limits)
    ]
    for cell in prefill_cells(size, limits):
        what = f"prefill {cell.together} x {cell.prompt - cell.cached} + {cell.cached}"
        what += f" beside {cell.batch}" if cell.batch else ""
        found.append(Trial(what, partial(prefill, session, engine, cell)))
    longest = limits.longest(1, size.output)
    found += [
        Trial(f"abort at {context}", partial(abort, session, engine, context))
        for context in (longest // 8, longest // 2)
        if session.most > 1  # the middle of a step is told by another beside it
    ]
    return found


async def warm_up(session: Session, engine: EngineClient) -> None:
    """Let the engine make what it makes at first use: memory, kernels, graphs."""
    for batch in (1, session.most):
        longest = session.limits.longest(batch, session.size.output)
        await session.batch(engine, session.seats(0, batch), max(SHORTEST, longest // 32))
    await session.bench.step(engine, session.fresh(longest).request(longest, 1))


async def decode(session: Session, engine: EngineClient, cell: DecodeCell) -> None:
    """Time a batch of equal steps."""
    heard = await session.batch(engine, session.seats(0, cell.batch), cell.context)
    trial = decode_trial(heard, cell, order=session.place, tp=session.tp)
    if trial is None:
        session.found.spoiled += 1
    else:
        session.found.decode.append(trial)


async def prefill(session: Session, engine: EngineClient, cell: PrefillCell) -> None:
    """Time prompts, a few after each other, each with a context of its own, alone or beside."""
    turns = range(session.size.joiners if cell.batch else 1)
    if cell.cached:  # each on the same prefix: one is enough to be computed
        (kept,) = session.seats(cell.batch, cell.batch + 1)
        await session.lay(engine, [kept], cell.cached)
        new = cell.prompt - cell.cached
        joiners = [[kept.branch(cell.cached, session.fresh_ids(new))] for _ in turns]
    else:
        joiners = [[session.fresh(cell.prompt) for _ in range(cell.together)] for _ in turns]
    seats = session.seats(0, cell.batch)
    await session.lay(engine, seats, cell.context)
    room = session.limits.longest(cell.batch + 1, 0) - cell.context
    output = min(room, session.size.output + OUTLAST * len(turns))
    load = session.load(engine, seats, cell.context, output)
    joined = []
    for turn in joiners:
        steps = [session.bench.begin(engine, seat.request(cell.prompt, 1)) for seat in turn]
        joined.append(await asyncio.gather(*steps))
    beside = await load.end()
    trials = prefill_trials(joined, beside, cell, order=session.place, tp=session.tp)
    session.found.prefill += trials
    session.found.spoiled += not trials


async def abort(session: Session, engine: EngineClient, context: int) -> None:
    """Abort a step in the middle, then go on with its prompt and tokens so far."""
    seat, loop = session.fresh(context), asyncio.get_running_loop()
    half = session.size.output // 2
    output = min(session.size.output * 4, session.limits.longest(1, context))
    step = session.load(engine, [seat], context, output)
    await session.bench.step(engine, session.seats(0, 1)[0].request(SHORTEST, half))
    asked_s = loop.time()
    (first,) = await step.end()
    if first.end.finished or not first.end.tokens:
        session.found.spoiled += 1
        return
    prompt = context + first.end.tokens
    request = StepRequest(
        trajectory=seat.trajectory,
        group=GroupId(seat.trajectory),
        prompt_tokens=prompt,
        shared_tokens=prompt,
        max_tokens=1,
        exact=True,
        prompt_ids=(*seat.ids, *first.end.output_ids) if seat.ids else (),
    )
    second = await session.bench.step(engine, request)
    session.found.aborts.append(
        AbortTrial(
            order=session.place,
            tp=session.tp,
            prompt=prompt,
            cached=second.end.cached_tokens,
            abort_s=first.heard_s - asked_s,
            resume_s=second.end.queued_s + second.end.prefill_s,
        )
    )


async def loops(session: Session, engine: EngineClient) -> None:
    """Run clients with growing contexts: as many as there are slots, half of them, and so on."""
    session.expect(session.size.loops)
    for halvings in range(session.size.loops):
        clients = max(1, session.most >> halvings)
        session.tell(f"loop of {clients}")
        scripts = loop_scripts(session.order.seed, clients, session.limits)
        heard = await asyncio.gather(*(_client(session, engine, each) for each in scripts))
        session.found.loops.append(loop_trial(scripts, heard, order=session.place, tp=session.tp))


async def _client(session: Session, engine: EngineClient, script: TrajectoryScript) -> list[Heard]:
    """One agent whose tools take no time."""
    agent, heard = ScriptedAgent(script, session.clock, tokens=session.tokens), []
    while True:
        step = await session.bench.step(engine, agent.request())
        heard.append(step)
        agent.on_step_end(step.end)
        if agent.next_action().tool is None:
            engine.forget(agent.id)
            return heard
        agent.on_tool_timeout(0.0)
