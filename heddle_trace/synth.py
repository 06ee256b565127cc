"""Makes synthetic trajectories: seeded, hierarchical, with lengths that can be learnt in part.

A group has a difficulty, a trajectory a random part; together they are its *demand*. A trajectory
needs a number of successful tool calls that grows with demand. A failed call is made again, and
hard prompts fail more often, so what happens in tools decides the length as well. The first
generation is a plan, whose length is independent of demand. The first tool's payload depends on
demand a little.

Every quantity has a random stream of its own, drawn in order: changing one does not move another,
and a shorter trace is a prefix of a longer one with the same seed, but with a drift.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from heddle_trace.columns import NONE, Bools, Codes, Floats, Ints, Kind, TraceColumn, constant
from heddle_trace.errors import TraceError
from heddle_trace.table import Records
from heddle_trace.workloads import OUTPUT_LIMIT_TOKENS, WORKLOADS, WorkloadSpec

# Raised whenever equal arguments begin to give other trajectories. Stands in each record's source.
GENERATOR: Final = "heddle-synth/1"

_MAX_TRAJECTORIES: Final = 1_000_000
# No tool and no network answers faster than this; it also keeps rounding away from 0.
_MIN_TOOL_S: Final = 0.001

Stream: TypeAlias = Callable[[str], np.random.Generator]


def synth(
    workload: str, trajectories: int, seed: int, samples_per_group: int = 16, drift: float = 1.0
) -> Records:
    """`trajectories` records of one workload of `workloads.WORKLOADS`, group after group.

    Equal arguments give equal records. With `drift`, outputs grow evenly from the first prompt to
    the last, which makes so many times the tokens, as in training. Raises TraceError for an unknown
    workload or a number that is out of range.
    """
    numbers = _checked(workload, trajectories, seed, samples_per_group, drift)

    def stream(part: str) -> np.random.Generator:
        return np.random.default_rng([seed, crc32(f"{workload}/{part}".encode())])

    group = np.arange(trajectories) // samples_per_group
    groups = int(group[-1]) + 1
    difficulty = stream("difficulty").standard_normal(groups)
    luck = stream("luck").standard_normal(trajectories)
    own = numbers.own_share
    demand = math.sqrt(1 - own) * difficulty[group] + math.sqrt(own) * luck
    prompt = _lognormal(stream("prompt"), groups, numbers.prompt_tokens, numbers.prompt_sigma)

    growth = np.linspace(1.0, drift, groups)[group]
    calls, ok = _calls(numbers, demand, stream)
    start = np.concatenate(([0], np.cumsum(steps := calls + 1)))
    outputs = _outputs(numbers, demand, growth, steps, start, stream)
    tools, tool_s, payload = _tools(numbers, demand, calls, stream)
    ok &= tool_s < numbers.tool_limit_s  # killed at the limit

    left, kept, count, cut = _within_limit(outputs, start)
    # A step without a tool call is the last of its trajectory.
    called = np.ones(len(outputs), np.bool_)
    called[start[1:] - 1] = False
    call = np.cumsum(called) - 1
    answered = called[kept] & (outputs < left)[kept]
    at = call[kept]
    source = f"{GENERATOR} {workload} seed {seed} samples {samples_per_group}" + (
        f" drift {drift:g}" if drift != 1.0 else ""
    )
    stop = np.cumsum(count)
    names = [f"{workload}-{number:05d}" for number in range(groups)]

    def of_call(kind: Kind, values: npt.NDArray[Any], words: Sequence[str] = ()) -> TraceColumn:
        none = np.nan if kind == "real" else NONE
        return TraceColumn(kind, np.where(answered, values[at], none).astype(values.dtype), words)

    return Records(
        [
            f"{names[index // samples_per_group]}/{index % samples_per_group:02d}"
            for index in range(trajectories)
        ],
        stop - count,
        stop,
        {
            "group_id": TraceColumn("word", group.astype(np.int32), names),
            "workload": TraceColumn("word", constant(0, trajectories, np.int32), [workload]),
            "prompt_tokens": TraceColumn("number", prompt[group]),
            "source": TraceColumn("word", constant(0, trajectories, np.int32), [source]),
            "truncated": TraceColumn("flag", np.where(cut, 1, NONE).astype(np.int8)),
        },
        {
            "output_tokens": TraceColumn(
                "number", np.minimum(outputs, left)[kept].astype(np.int32)
            ),
            "tool": of_call("word", tools, [name for name, _ in numbers.tools]),
            "tool_s": of_call("real", tool_s),
            "tool_tokens": of_call("number", payload.astype(np.int32)),
            "tool_ok": of_call("flag", ok.astype(np.int8)),
        },
    )


def _checked(
    workload: str, trajectories: int, seed: int, samples_per_group: int, drift: float
) -> WorkloadSpec:
    if workload not in WORKLOADS:
        near = difflib.get_close_matches(workload, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TraceError(f"workload {workload!r} is not one of {', '.join(WORKLOADS)}{hint}")
    if not 1 <= trajectories <= _MAX_TRAJECTORIES:
        raise TraceError(f"trajectories is {trajectories}; give 1 to {_MAX_TRAJECTORIES:,}")
    if not 1 <= samples_per_group <= _MAX_TRAJECTORIES:
        raise TraceError(f"samples per group is {samples_per_group}; give 1 or more")
    if seed < 0:
        raise TraceError(f"seed is {seed}; give a whole number of 0 or more")
    if not 0.01 <= drift <= 100.0:
        raise TraceError(f"drift is {drift:g}; give 0.01 to 100, 1 for none")
    return WORKLOADS[workload]


def _calls(w: WorkloadSpec, demand: Floats, stream: Stream) -> tuple[Ints, Bools]:
    """Tool calls per trajectory, and whether each of them succeeded, one after another.

    The last call of a trajectory succeeds; before each success come failures, geometric in number.
    """
    needed = 1 + stream("needed").poisson(
        (w.needed_calls - 1) * np.exp(w.needed_calls_pull * demand)
    )
    odds = w.fail_rate / (1 - w.fail_rate) * np.exp(w.fail_pull * demand)
    succeed = np.repeat(1 / (1 + odds), needed)
    tries = stream("tries").geometric(succeed)
    ok = np.zeros(int(tries.sum()), dtype=np.bool_)
    ok[np.cumsum(tries) - 1] = True
    return np.add.reduceat(tries, np.cumsum(needed) - needed), ok


def _outputs(
    w: WorkloadSpec, demand: Floats, growth: Floats, steps: Ints, start: Ints, stream: Stream
) -> Ints:
    """Output tokens of every step, trajectories one after another, each `growth` times as many."""
    pulled = w.step_output_tokens * np.exp(w.step_output_pull * demand)
    outputs = _lognormal(
        stream("output"), int(steps.sum()), np.repeat(pulled, steps), w.step_output_sigma
    )
    outputs[start[:-1]] = _lognormal(
        stream("first"), steps.size, w.first_output_tokens, w.first_output_sigma
    )
    return np.maximum(1, np.rint(outputs * np.repeat(growth, steps))).astype(np.int64)


def _tools(
    w: WorkloadSpec, demand: Floats, calls: Ints, stream: Stream
) -> tuple[Codes, Floats, Ints]:
    """Tool, seconds and appended tokens of every call; tools as numbers in `w.tools`."""
    total = int(calls.sum())
    bounds = np.cumsum([share for _, share in w.tools])[:-1]
    chosen = np.searchsorted(bounds, stream("tool").random(total), side="right")
    mu = _mu_of_capped_mean(w.tool_mean_s, w.tool_sigma, w.tool_limit_s)
    seconds = np.exp(mu + w.tool_sigma * stream("seconds").standard_normal(total))
    pull = np.zeros(total)
    pull[np.cumsum(calls) - calls] = w.first_payload_pull * demand
    payload = _lognormal(stream("payload"), total, w.payload_tokens * np.exp(pull), w.payload_sigma)
    return (
        chosen.astype(np.int32),
        np.round(np.clip(seconds, _MIN_TOOL_S, w.tool_limit_s), 4),
        np.minimum(payload, w.payload_limit_tokens),
    )


def _within_limit(outputs: Ints, start: Ints) -> tuple[Ints, Bools, Ints, Bools]:
    """Cut trajectories at the output limit.

    Of each step: the tokens that were left, and whether it was begun. Of each trajectory: its
    steps, and whether it was cut.
    """
    before = np.cumsum(outputs) - outputs
    left = OUTPUT_LIMIT_TOKENS - (before - np.repeat(before[start[:-1]], np.diff(start)))
    kept = left > 0
    count = np.add.reduceat(kept, start[:-1], dtype=np.int64)
    last = start[:-1] + count - 1
    return left, kept, count, (outputs[last] > left[last]) | (count < np.diff(start))


def _lognormal(rng: np.random.Generator, size: int, median: float | Floats, sigma: float) -> Ints:
    drawn = median * np.exp(sigma * rng.standard_normal(size))
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _mu_of_capped_mean(mean: float, sigma: float, cap: float) -> float:
    """The mu for which E[min(X, cap)] = mean, X lognormal(mu, sigma); by bisection.

    Without it the cap would take a part of the mean away, the more the longer the tail.
    """

    def normal_cdf(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    def capped_mean(mu: float) -> float:
        z = (math.log(cap) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * normal_cdf(z - sigma) + cap * normal_cdf(-z)

    low, high = math.log(mean) - sigma**2 - 1, math.log(cap)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if capped_mean(middle) < mean else (low, middle)
    return low
