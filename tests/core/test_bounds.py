"""Bounds that are declared on fields, and what breaks them by its place."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Annotated

import pytest

from heddle_core.bounds import Bounds, bound_faults


@dataclass(frozen=True, kw_only=True)
class Part:
    wait_s: Annotated[float, Bounds(0, 60)] = 0.0
    rate_per_s: Annotated[float | None, Bounds(above=0, none="no limit")] = None
    free: float = -1.0


@dataclass(frozen=True, kw_only=True)
class Whole:
    sizes: Annotated[tuple[int, ...], Bounds(1)] = ()
    shares: Annotated[dict[str, float], Bounds(0, below=1)] = field(default_factory=dict)
    part: Part = field(default_factory=Part)
    parts: dict[str, Part] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("whole", "faults"),
    [
        (Whole(sizes=(1, 2), shares={"a": 0.0}, parts={"x": Part(rate_per_s=1.0)}), []),
        (Whole(sizes=(1, 0)), ["sizes[1] must be 1 or more, not 0"]),
        (Whole(shares={"a": 1.0}), ["shares.a must be from 0 to below 1, not 1.0"]),
        (Whole(part=Part(wait_s=61)), ["part.wait_s must be from 0 to 60 seconds, not 61"]),
        (Whole(part=Part(wait_s=nan)), ["part.wait_s must be from 0 to 60 seconds, not nan"]),
        (
            Whole(parts={"x": Part(rate_per_s=inf)}),
            ["parts.x.rate_per_s must be more than 0, not inf; leave it out for no limit"],
        ),
        (Whole(sizes=(-(10**60),)), [f"sizes[0] must be 1 or more, not -1{'0' * 38}"]),
    ],
)
def test_what_breaks_a_bound_is_named_by_its_place(whole: Whole, faults: list[str]) -> None:
    assert list(bound_faults(whole)) == faults
