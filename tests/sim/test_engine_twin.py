"""The leaping engine and its slow twin agree on every step of any small, hostile scenario."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heddle_core.ids import EngineId
from heddle_sim.clock import SimEnvironment
from heddle_sim.drafts import Drafting
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable
from tests.sim.reference_engine import ReferenceEngine

Step = tuple[int, int, int, float]
"""new prompt tokens, tokens kept of the context before, output tokens, seconds of the tool after"""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    table: LatencyTable
    max_running: int
    max_batched_tokens: int
    block_size: int
    prefix_caching: bool
    speed: float
    trajectories: list[tuple[float, str, list[Step]]]
    """(arrival_s, group, steps)"""
    disturbances: list[tuple[float, str, int]]
    """(time_s, what, trajectory)"""


def sim_engine(env: SimEnvironment, engine: str, table: LatencyTable, **settings: Any) -> SimEngine:
    return SimEngine(env.calendar, EngineId(engine), table, **settings)


class Player:
    """Runs a scenario on one engine: steps follow their tools, aborted steps are sent again."""

    def __init__(self, make: Callable[..., Any], scenario: Scenario) -> None:
        self.env = SimEnvironment()
        self.plans = scenario.trajectories
        self.at = [0] * len(self.plans)
        self.made = [0] * len(self.plans)
        """Tokens of the current step made in dispatches that were aborted."""
        self.context = [0] * len(self.plans)
        """Tokens at the end of the previous step."""
        self.dead = False
        self.ends: list[tuple[float, Any]] = []
        self.seen: list[tuple[str, object]] = []
        """What was looked up on the way."""
        self.engine = make(
            self.env,
            "e0",
            scenario.table,
            max_running=scenario.max_running,
            max_batched_tokens=scenario.max_batched_tokens,
            block_size=scenario.block_size,
            prefix_caching=scenario.prefix_caching,
            speed=scenario.speed,
            on_end=self.ended,
        )
        for i, (arrival_s, _, _) in enumerate(self.plans):
            self.after(arrival_s, partial(self.send, i))
        for time_s, what, i in scenario.disturbances:
            self.after(time_s, partial(self.disturb, what, i))
        self.env.run()
        self.seen.append(("engine preemptions", self.engine.preemptions))
        assert self.dead or self.at == [len(steps) for _, _, steps in self.plans]

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        callbacks = self.env.timeout(delay_s).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())

    def send(self, i: int) -> None:
        _, group, steps = self.plans[i]
        new, kept, output, _ = steps[self.at[i]]
        kept, made = min(kept, self.context[i]), self.made[i]
        if not self.dead:
            self.engine.start(
                f"t{i}",
                group,
                prompt_tokens=kept + new + made,
                shared_tokens=kept + new + made if made else kept,
                output_tokens=output - made,
            )

    def ended(self, end: Any) -> None:
        self.ends.append((self.env.now, end))
        i = int(end.trajectory[1:])
        new, kept, output, tool_s = self.plans[i][2][self.at[i]]
        self.made[i] += end.tokens
        assert end.finished == (self.made[i] == output)
        if end.finished:
            self.context[i] = min(kept, self.context[i]) + new + output
            self.made[i] = 0
            self.at[i] += 1
            if self.at[i] == len(self.plans[i][2]):
                return
            if tool_s == 0.0:
                self.send(i)
                return
        self.after(tool_s, partial(self.send, i))

    def disturb(self, what: str, i: int) -> None:
        name, engine = f"t{i}", self.engine
        match what:
            case _ if self.dead:
                pass
            case "abort":
                engine.abort(name)
            case "release":
                engine.release(name)
            case "look":
                self.seen.append((what, (engine.kv_used_tokens, engine.kv_cached_tokens)))
                self.seen.append((name, engine.export_kv(name)))
            case "import":
                # What a migration brings: KV of the context that the trajectory has by now.
                self.seen.append((what, engine.import_kv(name, "g0", self.context[i])))
            case "flush":
                engine.flush_kv()
            case "fail":
                self.seen.append((what, engine.fail()))
                self.dead = True


def scenario(
    seed: int, trajectories: int, tight: float, disturbances: int, *, drafts: bool = False
) -> Scenario:
    """A random scenario; its times are continuous, so that nothing coincides by chance."""
    random = Random(seed)
    block_size = random.choice((1, 4, 16))
    max_running = random.randint(1, 8)
    base, slope = random.uniform(0.005, 0.02), random.uniform(0.0, 0.002)
    per_context = random.choice((0.0, random.uniform(1e-7, 1e-4)))
    longest = random.choice((5, 40, 150))
    plans: list[tuple[float, str, list[Step]]] = []
    largest = 0
    prompts = {f"g{g}": random.randint(1, 2 * longest) for g in range(3)}
    horizon_s = base * longest * 3
    for _ in range(trajectories):
        group = f"g{random.randrange(3)}"
        steps: list[Step] = []
        context = 0
        for number in range(random.randint(1, 4)):
            new = prompts[group] if number == 0 else random.randint(1, longest)
            kept = context if random.random() < 0.8 else random.randint(0, context)
            output = random.randint(1, longest)
            context = kept + new + output
            largest = max(largest, context)
            tool_s = 0.0 if random.random() < 0.2 else random.expovariate(4 / horizon_s)
            steps.append((new, kept, output, tool_s))
        arrival_s = 0.0 if random.random() < 0.4 else random.uniform(0, horizon_s)
        plans.append((arrival_s, group, steps))
    blocks = -(-largest // block_size)
    kinds = ("abort",) * 5 + ("look",) * 4 + ("release", "import", "import", "flush")
    disturbed = [
        (random.uniform(0, horizon_s * 4), random.choice(kinds), random.randrange(trajectories))
        for _ in range(disturbances)
    ]
    if disturbances and random.random() < 0.15:
        disturbed.append((random.uniform(0, horizon_s * 6), "fail", 0))
    # In half of the scenarios a prompt makes an iteration longer than a few decoding steps do.
    least = base * (3.0 if trajectories % 2 else 1.0)
    most = 5 if drafts else 0
    base_s = [least, *(base + slope * b for b in range(1, max_running * (most + 1) + 1))]
    return Scenario(
        table=LatencyTable(
            model="m",
            gpu="g",
            tp=1,
            base_s=base_s,
            per_context_s=[per_context * (1 + 0.01 * b) for b in range(max_running + 1)],
            prefill_tokens=[0.0, 16.0, 64.0, 256.0],
            prefill_knots_s=[0.0, base * 0.5, base, base * 3.7],
            prefill_pair_s=random.choice((0.0, 1e-6)),
            host_per_prefill_s=random.choice((0.0, base / 7)),
            kv_capacity_tokens=int(blocks * block_size * (1 + tight * random.random() * 4))
            + block_size,
            kv_bytes_per_token=1,
            drafting=drafting(random, base_s, max_running, most) if drafts else None,
        ),
        max_running=max_running,
        max_batched_tokens=(most + 1) * random.choice((max_running, max_running + 13, 64, 8192)),
        block_size=block_size,
        prefix_caching=random.random() < 0.85,
        speed=random.choice((1.0, 1.37)),
        trajectories=plans,
        disturbances=disturbed,
    )


def drafting(random: Random, base_s: list[float], max_running: int, most: int) -> Drafting:
    """Random drafts by batch size, acceptance that falls, and costs of drafts."""
    by_batch = [random.randint(0, most) for _ in range(max_running + 1)]
    if random.random() < 0.3:
        by_batch = [most] * (max_running + 1)
    accepted = sorted((random.random() for _ in range(most)), reverse=True)
    cost = random.uniform(0.0, 0.003)
    return Drafting(
        drafts=by_batch,
        accepted=accepted,
        base_s={
            k: [base_s[b * (k + 1)] + cost * max(k, 1) for b in range(max_running + 1)]
            for k in range(most + 1)
        },
    )


def agree(case: Scenario) -> Player:
    """Play a scenario on both engines and hold every end and every look together."""
    fast, slow = Player(sim_engine, case), Player(ReferenceEngine, case)
    assert [e.trajectory for _, e in fast.ends] == [e.trajectory for _, e in slow.ends]
    for (fast_s, f), (slow_s, s) in zip(fast.ends, slow.ends, strict=True):
        assert fast_s == pytest.approx(slow_s, rel=1e-6)
        assert (f.tokens, f.finished) == (s.tokens, s.finished)
        assert (f.cached_tokens, f.recomputes) == (s.cached_tokens, s.recomputes)
        parts = (f.queued_s, f.prefill_s, f.decode_s)
        near = 1e-6 * slow_s
        assert parts == pytest.approx((s.queued_s, s.prefill_s, s.decode_s), rel=1e-6, abs=near)
    assert fast.seen == slow.seen
    return fast


# Found by longer runs: a block that an iteration displaces before it has to preempt for another.
@example(seed=12937, trajectories=7, tight=0.3, disturbances=25)
@example(seed=175386814727, trajectories=14, tight=0.0, disturbances=80)
@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    trajectories=st.integers(1, 14),
    tight=st.sampled_from((0.0, 0.3, 3.0)),
    disturbances=st.sampled_from((0, 0, 3, 25)),
)
def test_leaps_and_single_iterations_end_every_step_alike(
    seed: int, trajectories: int, tight: float, disturbances: int
) -> None:
    agree(scenario(seed, trajectories, tight, disturbances))


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    trajectories=st.integers(1, 14),
    tight=st.sampled_from((0.0, 0.3, 3.0)),
    disturbances=st.sampled_from((0, 0, 3, 25)),
)
def test_with_drafts_leaps_and_single_iterations_agree_to_the_token(
    seed: int, trajectories: int, tight: float, disturbances: int
) -> None:
    agree(scenario(seed, trajectories, tight, disturbances, drafts=True))


def test_the_scenarios_reach_what_they_are_meant_to_reach() -> None:
    """The property is empty where nothing is preempted, evicted, aborted, shared or cached."""
    ends, preemptions, looks = [], 0, []
    for seed in range(60):
        fast = agree(scenario(seed, 12, 0.3, 25))
        ends += [end for _, end in fast.ends]
        preemptions += sum(n for what, n in fast.seen if what == "engine preemptions")
        looks += [n for what, n in fast.seen if what == "look"]
    assert preemptions > 100
    assert sum(not end.finished for end in ends) > 50
    assert sum(end.tokens > 0 for end in ends if not end.finished) > 25
    assert sum(end.recomputes > 1 for end in ends) > 10
    assert sum(end.cached_tokens > 0 for end in ends) > 100
    assert sum(used > 0 and cached > 0 for used, cached in looks) > 25


def test_the_scenarios_with_drafts_preempt_accept_and_change_drafts() -> None:
    drafted, accepted, preemptions, schedules = 0, 0, 0, 0
    for seed in range(60):
        case = scenario(seed, 12, 0.3, 25, drafts=True)
        slow = Player(ReferenceEngine, case).engine
        drafted += slow.drafted
        accepted += slow.accepted
        preemptions += slow.preemptions
        assert case.table.drafting is not None
        schedules += len(set(case.table.drafting.drafts[1:])) > 1
    assert preemptions > 100
    assert 0.2 < accepted / drafted < 0.8
    assert schedules > 20
