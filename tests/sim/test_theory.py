"""The engine against queueing theory: what is known in closed form must come out of it."""

from collections.abc import Callable
from math import factorial
from random import Random

import numpy as np
import pytest
from scipy import stats

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_sim.calendar import Calendar
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable

TOKEN_S = 0.001
"""Seconds per token: short against a step, so that waiting for an iteration's end hardly counts."""
REPLICATIONS = 16


def table(base_s: Callable[[int], float], per_prefill_s: float, batch: int) -> LatencyTable:
    return LatencyTable(
        model="m",
        gpu="g",
        tp=1,
        base_s=[base_s(b) for b in range(batch + 1)],
        per_context_s=[0.0] * (batch + 1),
        prefill_tokens=[0.0, 1.0],
        prefill_knots_s=[0.0, 0.0],
        prefill_pair_s=0.0,
        host_per_prefill_s=per_prefill_s,
        kv_capacity_tokens=10**9,
        kv_bytes_per_token=1,
    )


def replicate(
    latency: LatencyTable,
    *,
    servers: int,
    arrivals_per_s: float,
    tokens: Callable[[Random], int],
    steps: int,
    measure: Callable[[StepResult], float],
) -> tuple[float, float]:
    """Mean of `measure` over replications of a Poisson stream, and its 99.9 % half width.

    Each replication is an independent run whose first tenth is left out as warm-up.
    """
    means = []
    for seed in range(REPLICATIONS):
        random, clock = Random(f"theory/{seed}"), Calendar()
        ends: list[StepResult] = []
        engine = SimEngine(
            clock,
            EngineId("e0"),
            latency,
            max_running=servers,
            prefix_caching=False,
            on_end=ends.append,
        )

        def arrive(i: int, engine: SimEngine = engine, random: Random = random) -> None:
            engine.start(
                TrajectoryId(f"t{i}"),
                GroupId("g"),
                prompt_tokens=1,
                shared_tokens=0,
                output_tokens=tokens(random),
            )

        time_s = 0.0
        for i in range(steps):
            time_s += random.expovariate(arrivals_per_s)
            clock.call_at(time_s, arrive, i)
        clock.run()
        assert len(ends) == steps
        order = sorted(ends, key=lambda end: int(end.trajectory[1:]))
        means.append(float(np.mean([measure(end) for end in order[steps // 10 :]])))
    half = float(stats.t.ppf(0.9995, REPLICATIONS - 1) * stats.sem(means))
    return float(np.mean(means)), half


def exponential_tokens(random: Random) -> int:
    """One second of tokens on average."""
    return 1 + int(random.expovariate(TOKEN_S))


def erlang_c_wait_s(servers: int, load: float) -> float:
    """Mean wait of M/M/c at service rate 1 and offered load `load` (Erlang C)."""
    last = load**servers / factorial(servers) * servers / (servers - load)
    waits = last / (sum(load**k / factorial(k) for k in range(servers)) + last)
    return waits / (servers - load)


def test_erlang_c_gives_the_single_server_its_known_wait() -> None:
    assert erlang_c_wait_s(1, 0.8) == pytest.approx(0.8 / (1 - 0.8))


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 2.6)])
def test_slots_at_constant_speed_wait_as_m_m_c(servers: int, load: float) -> None:
    mean_s, half_s = replicate(
        table(lambda _: TOKEN_S, 0.0, servers),
        servers=servers,
        arrivals_per_s=load,
        tokens=exponential_tokens,
        steps=4000,
        measure=lambda end: end.queued_s,
    )
    expected_s = erlang_c_wait_s(servers, load)
    assert half_s < 0.25 * expected_s
    # A step also waits for the end of the iteration that runs when it arrives.
    assert expected_s - half_s < mean_s < expected_s + half_s + TOKEN_S


@pytest.mark.parametrize(
    "tokens",
    [exponential_tokens, lambda random: 100 if random.random() < 0.9 else 9100],
    ids=["exponential", "one in ten is 91 times as long"],
)
def test_an_engine_without_batching_gain_is_processor_sharing(
    tokens: Callable[[Random], int],
) -> None:
    """Iteration time proportional to the batch: M/G/1-PS, whose mean sojourn is 1 / (1 - load)

    whatever the lengths are. That a few long steps do not delay the short ones more than in
    proportion is what continuous batching promises.
    """
    batch, load = 120, 0.5
    mean_s, half_s = replicate(
        table(lambda b: TOKEN_S * b, TOKEN_S, batch),
        servers=batch,
        arrivals_per_s=load,
        tokens=tokens,
        steps=3000,
        measure=lambda end: end.queued_s + end.prefill_s + end.decode_s,
    )
    expected_s = 1 / (1 - load)
    assert half_s < 0.25 * expected_s
    # An arrival finds load / (1 - load) steps on average: the iteration under way is that long.
    iteration_s = TOKEN_S * (1 + load / (1 - load))
    assert expected_s - half_s < mean_s < expected_s + half_s + iteration_s
