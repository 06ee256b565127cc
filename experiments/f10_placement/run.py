"""F10: presorted placement of twelve trajectories on three engines, worked out."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, HATCHES, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import exactly
from heddle_core.estimate.group_cost import SegmentCost, work_of
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.solve.presorted import every_cut, presorted_dp
from heddle_sim.profile_files import load_profile


def measure(context: Context) -> Measured:
    """The recurrence's groups, and the best of every way to share trajectories out."""
    example = context.config["example"]
    lengths, engines = example["output_tokens"], example["engines"]
    estimate = load_profile(example["model"], example["gpu"]).cost_estimate((1,))
    (cost,) = paper_costs(
        work_of(lengths), estimate.by_shape, max_running=example["max_running"]
    ).values()
    found = presorted_dp([cost] * engines, every_cut(len(lengths)))
    bounds = np.concatenate(([0], np.cumsum(found.sizes))).tolist()
    ends = [float(cost.end_s(np.array(a), np.array(b))) for a, b in pairwise(bounds)]
    return Measured(
        values={"over_every_assignment": exactly(found.makespan_s / _best(cost, lengths, engines))},
        data={"lengths": lengths, "sizes": list(found.sizes), "ends_s": ends},
    )


def _best(cost: SegmentCost, lengths: list[int], engines: int) -> float:
    """Least makespan over all assignments; a group ends by its longest member and its size."""
    count = len(lengths)
    owner = np.arange(engines**count)[:, None] // engines ** np.arange(count) % engines
    worst = np.zeros(len(owner))
    for engine in range(engines):
        mine = owner == engine
        size, first = mine.sum(axis=1), mine.argmax(axis=1)
        # `end_s` of a segment that begins at the longest member and has as many members.
        worst = np.maximum(worst, np.where(size, _end_s(cost, first, size), 0.0))
    return float(worst.min())


def _end_s(cost: SegmentCost, first: Any, size: Any) -> Any:
    return cost.end_s(first, first + size)


def draw(data: Any, path: Path) -> None:
    """Trajectories in order, their groups, and when each group ends."""
    figure, axes = page(2, width=7.4, width_ratios=(2.2, 1))
    start = 0
    for index, size in enumerate(data["sizes"]):
        at = range(start, start + size)
        kept = [data["lengths"][i] / 1e3 for i in at]
        axes[0].bar(at, kept, color=COLOURS[index], hatch=HATCHES[index], edgecolor="white")
        axes[1].bar(
            [index],
            [data["ends_s"][index]],
            color=COLOURS[index],
            hatch=HATCHES[index],
            edgecolor="white",
        )
        start += size
    axes[0].set(
        title="Longest first, cut into three groups; two run at once",
        xlabel="trajectory",
        ylabel="output tokens (thousands)",
        xticks=range(len(data["lengths"])),
    )
    axes[1].set(title="End of each group", ylabel="estimated seconds")
    axes[1].set_xticks(range(len(data["sizes"])), [f"engine {i}" for i in range(3)], fontsize=8)
    for ax in axes:
        ax.grid(axis="x", visible=False)
    save(figure, path)
