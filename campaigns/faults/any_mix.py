"""Any mix of parts in any scenario, drawn at random.

Beyond one storm of failures: staggered arrivals, compacted histories, tools that take no
time, contexts that no engine holds, engines with one slot, transfers and predictions that are late.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from campaigns.faults.scenario import Scenario, scripts_of
from heddle_core.ids import EngineId
from heddle_core.parts.table import KINDS, PARTS
from heddle_core.presets import PRESETS
from heddle_trace import StepScript, TrajectoryScript

BLOCK_TOKENS = 16


def any_policy(rng: Random) -> str:
    """A preset with some of its parts exchanged."""
    kinds = rng.sample(list(KINDS), rng.randint(0, 4))
    # `given` starts no engines, and nobody else does here.
    parts = [[part for part in PARTS.of(kind) if part != "given"] for kind in kinds]
    return "+".join([rng.choice(list(PRESETS)), *map(rng.choice, parts)])


def any_scenario(rng: Random) -> Scenario:
    """Draw a world; engines may die in it at any time."""
    lives = ["", "", "+1", "+2"]
    faults = [
        (round(rng.uniform(0.0, 200.0), 1), EngineId(f"e{rng.randrange(8)}{rng.choice(lives)}"))
        for _ in range(rng.choice([0, 1, 4, 10]))
    ]
    return Scenario(
        workload=rng.choice(["coding", "search", "math"]),
        trajectories=rng.choice([1, 2, 9, 32]),
        seed=rng.randrange(50),
        faults=tuple(sorted(faults)),
        tool_capacity=rng.choice([None, 1, 5]),
        prediction_s=rng.choice([0.0, 0.6, 30.0]),
        with_history=rng.random() < 0.5,
        slots=rng.choice([1, 2, 6, 16]),
        kv_per_gpu_tokens=rng.choice([6_000, 12_000, 20_000, 48_000]),
        transfer_fixed_s=rng.choice([0.0, 0.02, 3.0]),
    )


def _disturbed(
    script: TrajectoryScript, rng: Random, scenario: Scenario, span_s: float
) -> TrajectoryScript:
    """The same trajectory, now and then compacted, without tool time, or larger than any engine."""
    capacity = scenario.kv_per_gpu_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    steps: list[StepScript] = []
    for i, step in enumerate(script.steps):
        now = step
        if i and rng.random() < 0.1:
            shared = int(now.shared_tokens * rng.random())
            now = replace(now, shared_tokens=shared, prompt_tokens=shared + rng.randint(1, 200))
        if rng.random() < 0.1:
            now = replace(now, tool_s=0.0)
        if now.prompt_tokens >= capacity:
            if steps and rng.random() < 0.8:
                break
            now = replace(now, output_tokens=min(now.output_tokens, BLOCK_TOKENS))
        else:
            now = replace(now, output_tokens=min(now.output_tokens, capacity - now.prompt_tokens))
        steps.append(now)
    return replace(script, steps=tuple(steps), arrival_s=rng.uniform(0.0, span_s))


def any_scripts(rng: Random, scenario: Scenario) -> Sequence[TrajectoryScript]:
    """Return the scripts of a scenario, disturbed and at any time."""
    span_s = rng.choice([0.0, 20.0, 90.0])
    scripts = scripts_of(scenario.workload, scenario.trajectories, scenario.seed)
    return [_disturbed(s, rng, scenario, span_s) for s in scripts]
