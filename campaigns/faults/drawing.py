"""Draws what disturbs a run, and makes smaller what did."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from campaigns.faults.engines import Disturbances, EngineFault, ReportFault

ENGINES = tuple(f"e{i}" for i in range(8))
LIVES = ("", "", "", "+1", "+2")


def any_disturbances(rng: Random, *, span_s: float, reports: int = 400) -> Disturbances:
    """Draw faults within `span_s` seconds, and among the first so many reports."""
    number = rng.choice((0, 1, 2, 4, 10))
    return Disturbances(
        engines=tuple(
            EngineFault(
                kind=rng.choice(("death", "death", "hang", "stall")),
                engine=rng.choice(ENGINES) + rng.choice(LIVES),
                at_s=round(rng.uniform(0.0, span_s), 2),
                seconds=rng.choice((0.0, 0.5, 20.0, 90.0)),
            )
            for _ in range(number)
        ),
        reports=tuple(
            ReportFault(
                kind=rng.choice(("late", "twice", "lost", "failed_move")),
                number=rng.randint(1, reports),
                seconds=rng.choice((0.0, 0.0, 0.01, 0.7, 15.0)),
            )
            for _ in range(rng.choice((0, 0, 2, 8)))
        ),
        speeds={e: rng.choice((0.05, 0.5, 0.99, 3.0)) for e in ENGINES if rng.random() < 0.15},
    )


def without_parts(value: Any, *names: str) -> Iterator[Any]:
    """The same struct with one of its sequences shorter: halves first, then single elements."""
    for name in names:
        items = getattr(value, name)
        kind = type(items)
        elements = list(items.items()) if kind is dict else list(items)
        half = len(elements) // 2
        for rest in (elements[:half], elements[half:]) if half else ():
            yield msgspec.structs.replace(value, **{name: kind(rest)})
        for i in range(len(elements)):
            rest = elements[:i] + elements[i + 1 :]
            yield msgspec.structs.replace(value, **{name: kind(rest)})


def with_less(case: Any, **least: Any) -> Iterator[Any]:
    """The same struct with one of its fields at a simple value, or a number halved."""
    for name, simple in least.items():
        value = getattr(case, name)
        if value == simple:
            continue
        yield msgspec.structs.replace(case, **{name: simple})
        if type(value) is int and type(simple) is int and value // 2 > simple:
            yield msgspec.structs.replace(case, **{name: value // 2})


def smaller_disturbances(case: Any) -> Iterator[Any]:
    """The same case with fewer disturbances."""
    for fewer in without_parts(case.disturbances, "engines", "reports", "speeds"):
        yield msgspec.structs.replace(case, disturbances=fewer)
