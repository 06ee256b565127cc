"""Clients that do anything, on engines that die: every step ends, nothing is left, it replays."""

import asyncio
import random

import pytest

from heddle_core.events import StepFinished, TrajectoryArrived, TrajectoryFinished
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.sessions import SessionLimits
from tests.gateway.bench import Bench, in_virtual_time, prompt, set_up


async def client(bench: Bench, n: int, draw: random.Random, seen: list[ClientStep]) -> None:
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


async def disturb(bench: Bench, draw: random.Random) -> None:
    gateway = bench.gateway
    for _ in range(12):
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


@pytest.mark.parametrize("seed", range(12))
def test_every_step_ends_nothing_is_left_and_the_journal_replays(seed: int):
    async def scene() -> None:
        draw = random.Random(seed)
        policy = draw.choice(("heddle", "verl", "seer", "thunderagent"))
        limits = SessionLimits(idle_s=120.0, keep_answer_s=20.0)
        bench = Bench(set_up(policy, slots=3), limits=limits, mean_tokens=60)
        seen: list[ClientStep] = []
        async with bench.running():
            clients = (client(bench, n, random.Random(f"{seed} {n}"), seen) for n in range(40))
            await asyncio.gather(disturb(bench, draw), *clients)
            await asyncio.sleep(500.0)
            sessions = bench.gateway.sessions
            assert (len(sessions), sessions.trajectories, sessions.idle) == (0, 0, 0)
            for held in ("_groups", "_answers", "_steps", "_agents"):
                assert not getattr(sessions, held), held
            assert not bench.gateway.driver.computes
        assert bench.replays()
        check(bench, seen)

    in_virtual_time(scene())


def check(bench: Bench, seen: list[ClientStep]) -> None:
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
