"""Clients that do anything to a gateway, on engines that die: every step ends, nothing is left."""

import asyncio
from collections.abc import Iterator
from random import Random

import msgspec

from campaigns.faults.drawing import with_less
from campaigns.faults.gateway_bench import Bench, in_virtual_time, prompt, set_up
from heddle_core.events import StepFinished, TrajectoryArrived, TrajectoryFinished
from heddle_core.presets import PRESETS
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.sessions import SessionLimits


class GatewayCase(msgspec.Struct, frozen=True, kw_only=True, tag="gateway"):
    """A policy, clients and disturbances, all drawn by one seed."""

    policy: str
    seed: int
    clients: int
    disturbances: int
    slots: int = 3
    engines: int = 2


def draw(rng: Random) -> GatewayCase:
    return GatewayCase(
        policy=rng.choice(list(PRESETS)),
        seed=rng.randrange(1_000_000),
        clients=rng.choice((4, 12, 40)),
        disturbances=rng.choice((3, 12)),
        slots=rng.choice((1, 3, 8)),
        engines=rng.choice((1, 2, 3)),
    )


def smaller(case: GatewayCase) -> Iterator[GatewayCase]:
    """Cases with less of everything."""
    yield from with_less(case, clients=1, disturbances=0, engines=1, policy="verl")


async def _client(bench: Bench, n: int, draw: Random, seen: list[ClientStep]) -> None:
    """Some requests of one agent: with or without an id, patient or not, repeated or parallel."""
    session = "" if n % 3 == 0 else f"g{n // 4}_{n % 4}"
    context = prompt(n // 4, 40 + n % 5)
    for _ in range(draw.randrange(1, 6)):
        await asyncio.sleep(draw.choice((0.0, 0.1, 3.0, 30.0)))
        tokens = draw.choice((1, 8, 200))
        sampling = draw.choice(({}, {}, {"seed": 1}, {"logprobs": 0}))
        steps = [
            bench.submit(session, context, tokens, sampling=sampling)
            for _ in range(draw.choice((1, 1, 1, 2)))
        ]
        seen += steps
        patience_s = draw.choice((0.05, 2.0, 1e6))
        answers = asyncio.gather(*(s.answer() for s in steps), return_exceptions=True)
        try:
            async with asyncio.timeout(patience_s):
                await answers
        except TimeoutError:
            for step in steps:
                bench.gateway.sessions.release(step, delivered=False)
            continue
        for step in steps:
            bench.gateway.sessions.release(step, delivered=True)
        context = [*context, *steps[0].output_ids, *prompt(draw.randrange(9), 20)]
    if session and draw.random() < 0.7:
        bench.gateway.sessions.finish(session)


async def _disturb(bench: Bench, draw: Random, times: int) -> None:
    gateway = bench.gateway
    for _ in range(times):
        await asyncio.sleep(draw.uniform(0.5, 15.0))
        match draw.randrange(4):
            case 0 if gateway.engines:
                bench.launcher.fail(draw.choice(list(gateway.engines)))
            case 1 if gateway.engines:
                gateway.driver.abort_running(draw.choice(list(gateway.engines)))
            case 2:
                gateway.pause()
                await asyncio.sleep(draw.uniform(0.0, 5.0))
                gateway.resume(weights_version=draw.choice((None, draw.randrange(9))))
            case 3:
                steps = list(gateway.sessions.under_way)
                if steps:
                    gateway.sessions.abort(draw.choice(steps), "aborted")


def run(case: GatewayCase) -> int:
    """Run a case, and return the number of events.

    Raises:
        AssertionError: a step or session is left, a trajectory ends twice, or a replay diverges.
        Exception: whatever the gateway or the core raise.
    """
    events = 0

    async def scene() -> None:
        nonlocal events
        limits = SessionLimits(idle_s=120.0, keep_answer_s=20.0)
        setup = set_up(case.policy, engines=case.engines, slots=case.slots)
        bench = Bench(setup, limits=limits, mean_tokens=60)
        moments, seen = Random(case.seed), list[ClientStep]()
        async with bench.running():
            clients = (
                _client(bench, n, Random(f"{case.seed} {n}"), seen) for n in range(case.clients)
            )
            await asyncio.gather(_disturb(bench, moments, case.disturbances), *clients)
            await asyncio.sleep(500.0)
            sessions = bench.gateway.sessions
            assert (len(sessions), sessions.trajectories, sessions.idle) == (0, 0, 0)
            for held in ("_groups", "_answers", "_steps", "_agents"):
                assert not getattr(sessions, held), held
            assert not bench.gateway.driver.computes
        assert bench.replays(), "replay diverges"
        _judge(bench, seen)
        events = len(bench.entries)

    in_virtual_time(scene())
    return events


def _judge(bench: Bench, seen: list[ClientStep]) -> None:
    arrived = [e.trajectory for e in bench.events(TrajectoryArrived)]
    assert len(set(arrived)) == len(arrived)
    assert sorted(e.trajectory for e in bench.events(TrajectoryFinished)) == sorted(arrived)
    answered = 0
    for step in dict.fromkeys(seen):
        assert step.over
        assert len(step.output_ids) <= step.max_tokens
        assert step.error is None or isinstance(step.error, ApiError)
        if step.end is not None and not step.aborted:
            answered += 1
            full = len(step.output_ids) == step.max_tokens
            assert full or step.end.finish_reason == "stop"
    # One generation for each answer, however often it was sent.
    finished = bench.events(StepFinished)
    assert answered == len([e for e in finished if e.reason != "error"])
