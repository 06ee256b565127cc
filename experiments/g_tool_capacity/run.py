"""G: when tools are not elastic, they decide the makespan whatever the policy."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import colour, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import estimate, exactly

CAPACITY = (1.0, 2.0, 4.0, 8.0, 0.0)


def measure(context: Context) -> Measured:
    """Makespans by calls that run at once for each GPU; gain at both ends."""
    found = context.results
    gain = {c: found.gain("heddle", "verl", tool_capacity_per_gpu=c) for c in CAPACITY}
    cells = {
        str(c): {
            p: found.estimate("makespan_s", policy=p, tool_capacity_per_gpu=c).plain()
            for p in ("verl", "heddle")
        }
        | {
            "bound": estimate(
                [r["bound_s"] for r in found.rows(policy="verl", tool_capacity_per_gpu=c)]
            ).plain()
        }
        for c in CAPACITY
    }
    return Measured(
        values={
            "gain_at_one": gain[1.0],
            "gain_without_limit": gain[0.0],
            "what_is_left": exactly((gain[1.0].mean - 1.0) / (gain[0.0].mean - 1.0)),
        },
        data=cells,
    )


def draw(data: Any, path: Path) -> None:
    """Makespan by capacity; without limit on the right."""
    figure, axes = page(height=3.0)
    x = range(len(CAPACITY))
    for policy in ("verl", "heddle", "bound"):
        y = [data[str(c)][policy]["mean"] for c in CAPACITY]
        axes.plot(x, y, "--" if policy == "bound" else "-o", color=colour(policy), label=policy)
    axes.set_xticks(x, [f"{c:g}" if c else "no limit" for c in CAPACITY])
    axes.set(
        title="Search, Qwen3-14B: web searches that run at once",
        xlabel="calls at once for each GPU",
        ylabel="makespan (s)",
        ylim=(0, None),
    )
    axes.legend()
    save(figure, path)
