"""Why a prediction differs from what was measured, as far as the differences tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WITHIN: Final = 0.02
"""Share of the measured time below which nothing is explained."""
MOST: Final = 0.6
"""Share of all differences that the cause of them has at least."""
PLAINLY: Final = 0.5
"""What is left with one cause over what is left with the other, at most, to name the one."""
HITS: Final = 0.03
NEAR: Final = 1.1
"""What engines slow each other by over what their profile says, at most."""
ENGINE: Final = ("prefill", "prefill_moved", "prefill_again", "decode", "llm", "lost")
UNKNOWN: Final = "undetermined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Measured less simulated."""

    makespan: float
    """Share of the measured one."""
    seconds: Mapping[str, float]
    """Of all requests by part, as shares of the time of all trajectories."""
    hits: float | None
    """Of the share of context that was cached."""
    engines: tuple[int, int]
    """That had requests, measured and simulated; 0 where they are not recorded."""
    left: float
    """Squares of the differences of requests on engines, summed."""
    left_by_host: float
    """The same once each iteration takes so many seconds more as fit best."""
    left_by_kernels: float
    """The same with a factor on all times of engines."""
    kernel: float = 1.0
    """That factor."""
    beside: float | None = None
    """The factor beside another engine of the same machine, by the profile."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The likely cause, and what it is read from."""

    name: str
    why: str


def cause_of(found: Differences) -> Cause:
    """Name a cause only where one part has most of the differences, in their direction."""
    seconds = dict(found.seconds)
    every = sum(map(abs, seconds.values()))
    if abs(found.makespan) <= WITHIN and every <= WITHIN:
        return Cause("none", f"all within {WITHIN * 100:.0f} % of what was measured")
    mine, theirs = found.engines
    if mine and mine != theirs:
        return Cause("deployment", f"{mine} engines had requests, and {theirs} in simulation")
    queue = seconds.pop("queue", 0.0)
    engine = sum(seconds.get(part, 0.0) for part in ENGINE)
    direct = {
        "engine": engine,
        "tool": seconds.get("tool", 0.0),
        "rest": seconds.get("unaccounted", 0.0),
    }
    total = sum(map(abs, direct.values()))
    if abs(queue) > MOST * every and total <= WITHIN:
        why = "of requests only queues differ: slots, engines or policy are not as stated"
        return Cause("queueing", why)
    part = max(direct, key=lambda name: abs(direct[name]))
    if abs(direct[part]) < MOST * total or direct[part] * found.makespan < 0.0:
        return Cause(UNKNOWN, "no part has most of the difference")
    if part == "tool":
        return Cause("tool clock", "tools took another time than the trace gives them")
    if part == "rest":
        return Cause("client", "time that is neither an engine's nor a tool's is not simulated")
    return _of_engines(found, seconds)


def _of_engines(found: Differences, seconds: Mapping[str, float]) -> Cause:
    engine = sum(abs(seconds.get(part, 0.0)) for part in ENGINE)
    prefill = sum(seconds.get(part, 0.0) for part in ENGINE[:3])
    if found.hits is not None and abs(found.hits) >= HITS and prefill * found.hits < 0.0:
        if abs(prefill) >= MOST * engine:
            return Cause("prefix hits", f"{found.hits * 100.0:+.0f} points, with prefill to match")
        return Cause(UNKNOWN, "prefix hits differ, and not only prefill")
    best = min(found.left_by_host, found.left_by_kernels)
    most = NEAR * (found.beside or 1.0) if found.engines[0] > 1 else 1.0
    if found.left_by_kernels <= PLAINLY * found.left and 1.0 + WITHIN < found.kernel <= most:
        return Cause(
            "shared cores",
            f"requests took {found.kernel:.2f} times as long as on an engine alone, which has "
            f"{found.beside:.2f} in the profile beside another at work",
        )
    if best > PLAINLY * found.left:
        return Cause(UNKNOWN, "neither host time nor a kernel factor explains the requests")
    if found.left_by_host <= PLAINLY * found.left_by_kernels:
        return Cause("host time", "requests differ by the same time for each iteration")
    if found.left_by_kernels <= PLAINLY * found.left_by_host:
        return Cause("kernel factor", "requests differ by the same share of their time")
    return Cause(UNKNOWN, "host time and a kernel factor explain the requests alike")
