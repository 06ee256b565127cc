"""The order in which groups are cut, and the cost of each, by the cost's name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    IntArray,
    SegmentCost,
    Work,
    context_costs,
    longest_first,
)
from heddle_core.estimate.paper_cost import paper_costs, simulated_paper_costs
from heddle_core.ids import EngineShape

Cost: TypeAlias = Literal["paper", "paper-simulated", "context"]
"""`paper`: ``F(g)`` by the group's size. `paper-simulated`: of the group's simulation. `context`:
our own, with contexts, KV, prefill and tools."""


def longest_to(
    shapes: Iterable[EngineShape], by_shape: Mapping[EngineShape, StepCost]
) -> Callable[[EngineShape], float]:
    """Return the key of shapes by which engines take the longest trajectories first.

    The widest first; of several GPU classes those that take the least time for a token alone.
    """
    if len({shape.gpu for shape in shapes}) == 1:
        return lambda shape: -shape.gpus
    return lambda shape: by_shape[shape].t0_s


def ordered_costs(
    work: Work, by_shape: Mapping[EngineShape, StepCost], cost: Cost, *, max_running: int
) -> tuple[IntArray, Mapping[EngineShape, SegmentCost]]:
    """Return the order in which groups are cut, longest first, and their cost on each shape.

    The published costs sort by output tokens, `context` by estimated solo time.
    """
    if cost == "context":
        order = longest_first(work, by_shape[min(by_shape)])
        return order, context_costs(work.take(order), by_shape, max_running=max_running)
    order = np.argsort(-work.output_tokens, kind="stable")
    costs = paper_costs if cost == "paper" else simulated_paper_costs
    return order, costs(work.take(order), by_shape, max_running=max_running)
