"""Measurements on one engine: decoding batches, prompts, aborts, and clients in a loop."""

import asyncio
from collections.abc import Iterator
from functools import partial
from random import Random
from statistics import fmean

from heddle_calibrate.measure.cells import (
    SHORTEST,
    SPARE_OUTPUT,
    DecodeCell,
    PrefillCell,
    decode_cells,
    loop_scripts,
    prefill_cells,
)
from heddle_calibrate.measure.probe import StepSample
from heddle_calibrate.measure.session import PlannedTrial, Session
from heddle_calibrate.measure.trials import decode_trial, loop_trial, prefill_trials
from heddle_calibrate.sweeps import AbortTrial, ServedTrial
from heddle_core.ids import GroupId
from heddle_rollout.engines import EngineClient, StepRequest
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_trace.schema import TrajectoryScript

MOST_INPUT, MOST_OUTPUT, WAVES = 1024, 256, 5
"""Tokens of a request of `serve_clients`, and requests of each client."""
LENGTHS = 0.8
"""They are drawn from this part of the most up, as `heddle_calibrate.serving.replay` assumes."""


def trials_on(session: Session, engine: EngineClient) -> list[PlannedTrial]:
    """All measurements on one engine except loops."""
    limits, size = session.limits, session.size
    planned = [
        PlannedTrial(
            f"decode {cell.batch} x {cell.context}", partial(decode, session, engine, cell)
        )
        for cell in decode_cells(size, limits)
    ]
    for cell in prefill_cells(size, limits):
        what = f"prefill {cell.together} x {cell.prompt - cell.cached} + {cell.cached}"
        what += f" beside {cell.batch}" if cell.batch else ""
        planned.append(PlannedTrial(what, partial(prefill, session, engine, cell)))
    longest = limits.longest(1, size.output)
    planned += [
        PlannedTrial(f"abort at {context}", partial(abort, session, engine, context))
        for context in (longest // 8, longest // 2)
        if session.most > 1  # the end of a second step marks the middle of the first
    ]
    return planned


async def warm_up(session: Session, engine: EngineClient) -> None:
    """Run steps whose times are dropped: engines allocate and compile at first use."""
    for batch in (1, session.most):
        longest = session.limits.longest(batch, session.size.output)
        await session.batch(engine, session.warm(0, batch), max(SHORTEST, longest // 32))
    await session.probe.step(engine, session.cold(longest).request(longest, 1))


async def decode(session: Session, engine: EngineClient, cell: DecodeCell) -> None:
    """Time a batch of equal steps."""
    samples = await session.batch(engine, session.warm(0, cell.batch), cell.context)
    trial = decode_trial(samples, cell, order=session.position, tp=session.tp)
    if trial is None:
        session.measured.spoiled += 1
    else:
        session.measured.decode.append(trial)


async def prefill(session: Session, engine: EngineClient, cell: PrefillCell) -> None:
    """Time new prompts, one group after another, alone or beside a decoding batch."""
    groups = range(session.size.joiners if cell.batch else 1)
    if cell.cached:  # all share one prefix, so one trajectory has it cached
        (kept,) = session.warm(cell.batch, cell.batch + 1)
        await session.fill_cache(engine, [kept], cell.cached)
        new = cell.prompt - cell.cached
        joiners = [[kept.branch(cell.cached, session.new_ids(new))] for _ in groups]
    else:
        joiners = [[session.cold(cell.prompt) for _ in range(cell.together)] for _ in groups]
    batch = session.warm(0, cell.batch)
    await session.fill_cache(engine, batch, cell.context)
    space = session.limits.longest(cell.batch + 1, 0) - cell.context
    output = min(space, session.size.output + SPARE_OUTPUT * len(groups))
    load = session.load(engine, batch, cell.context, output)
    joined = []
    for group in joiners:
        steps = [session.probe.begin(engine, each.request(cell.prompt, 1)) for each in group]
        joined.append(await asyncio.gather(*steps))
    beside = await load.end()
    trials = prefill_trials(joined, beside, cell, order=session.position, tp=session.tp)
    session.measured.prefill += trials
    session.measured.spoiled += not trials


async def abort(session: Session, engine: EngineClient, context: int) -> None:
    """Abort a step in its middle, then continue from its prompt and its tokens so far."""
    sequence, loop = session.cold(context), asyncio.get_running_loop()
    half = session.size.output // 2
    output = min(session.size.output * 4, session.limits.longest(1, context))
    step = session.load(engine, [sequence], context, output)
    await session.probe.step(engine, session.warm(0, 1)[0].request(SHORTEST, half))
    sent_s = loop.time()
    (first,) = await step.end()
    if first.end.finished or not first.end.tokens:
        session.measured.spoiled += 1
        return
    prompt = context + first.end.tokens
    request = StepRequest(
        trajectory=sequence.trajectory,
        group=GroupId(sequence.trajectory),
        prompt_tokens=prompt,
        shared_tokens=prompt,
        max_tokens=1,
        exact=True,
        prompt_ids=(*sequence.ids, *first.end.output_ids) if sequence.ids else (),
    )
    second = await session.probe.step(engine, request)
    session.measured.aborts.append(
        AbortTrial(
            order=session.position,
            tp=session.tp,
            prompt=prompt,
            cached=second.end.cached_tokens,
            abort_s=first.reported_s - sent_s,
            resume_s=second.end.queued_s + second.end.prefill_s,
        )
    )


async def loops(session: Session, engine: EngineClient) -> None:
    """Run clients with growing contexts: one for each slot, then half as many, and so on."""
    session.expect(session.size.loops)
    for halvings in range(session.size.loops):
        clients = max(1, session.most >> halvings)
        session.begin(f"loop of {clients}")
        scripts = loop_scripts(session.spec.seed, clients, session.limits)
        samples = await asyncio.gather(*(_client(session, engine, each) for each in scripts))
        session.measured.loops.append(
            loop_trial(scripts, samples, order=session.position, tp=session.tp)
        )


async def _client(
    session: Session, engine: EngineClient, script: TrajectoryScript
) -> list[StepSample]:
    """One agent whose tools take no time."""
    agent, samples = ScriptedAgent(script, session.clock, tokens=session.tokens), []
    while True:
        sample = await session.probe.step(engine, agent.request())
        samples.append(sample)
        agent.on_step_end(sample.end)
        if agent.next_action().tool is None:
            engine.forget(agent.id)
            return samples
        agent.on_tool_timeout(0.0)


async def serve_clients(session: Session, engine: EngineClient) -> None:
    """Run closed loops of one client, a quarter of the slots, and all of them, on new prompts."""
    counts = sorted({1, max(1, session.most // 4), session.most})
    session.expect(len(counts))
    for clients in counts:
        session.begin(f"{clients} clients")
        longest = session.limits.longest(clients, 0)
        most_in = min(MOST_INPUT, longest * 4 // 5)
        most_out = min(MOST_OUTPUT, longest - most_in)
        rng, samples = Random(f"{session.spec.seed}/served/{clients}"), list[StepSample]()
        sizes = iter(
            [
                [rng.randint(max(1, round(LENGTHS * most)), most) for most in (most_in, most_out)]
                for _ in range(WAVES * clients)
            ]
        )

        async def client(
            sizes: Iterator[list[int]] = sizes, samples: list[StepSample] = samples
        ) -> None:
            for prompt, output in sizes:
                sequence = session.cold(prompt)
                samples.append(await session.probe.step(engine, sequence.request(prompt, output)))
                engine.forget(sequence.trajectory)

        await asyncio.gather(*(client() for _ in range(clients)))
        if any(each.end.recomputes for each in samples):
            session.measured.spoiled += 1
            continue
        session.measured.served.append(
            ServedTrial(
                order=session.position,
                tp=session.tp,
                input_tokens=most_in,
                output_tokens=most_out,
                concurrency=clients,
                requests=len(samples),
                ttft_s=fmean(each.end.queued_s + each.end.prefill_s for each in samples),
                tpot_s=fmean(each.end.decode_s / max(1, each.end.tokens - 1) for each in samples),
            )
        )
