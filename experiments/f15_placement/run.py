"""F15: placement by length against least load and cache-aware routing."""

from pathlib import Path
from typing import Any

from experiments.harness.drawing import bars, colour, page, save, scaled
from experiments.harness.experiment import Context, Measured
from experiments.harness.values import across

WORKLOADS = ("coding", "search", "math")
EVEN = {
    "heddle+fixed+keep_engines": "presorted, migrating",
    "heddle+fixed+keep_engines+least_loaded+never": "least load",
    "heddle+fixed+keep_engines+cache_aware+never": "cache-aware",
}
PAPER = "heddle-paper+paper_quality"
PAPER_LOAD = "heddle-paper+paper_quality+least_loaded+never"


def measure(context: Context) -> Measured:
    """Ratios on engines of one TP degree; then on those of `heddle` and of the paper's plan."""
    found = context.results

    def gain(ours: str, theirs: str) -> Any:
        return across([found.gain(ours, theirs, workload=w) for w in WORKLOADS])

    return Measured(
        values={
            "over_least_load": gain(
                "heddle+fixed+keep_engines", "heddle+fixed+keep_engines+least_loaded+never"
            ),
            "over_cache_aware": gain(
                "heddle+fixed+keep_engines", "heddle+fixed+keep_engines+cache_aware+never"
            ),
            "over_pinned_on_planned": gain("heddle", "heddle+sticky+never"),
            "paper_over_least_load": gain(PAPER, PAPER_LOAD),
        },
        data={
            w: {
                p: found.estimate("throughput_tok_s", policy=p, workload=w).plain()
                for p in (*EVEN, "heddle", "heddle+sticky+never", PAPER, PAPER_LOAD)
            }
            for w in WORKLOADS
        },
    )


def draw(data: Any, path: Path) -> None:
    """Throughput by task."""
    figure, axes = page(2, width=8.0, sharey=True)
    panels = (
        ("Engines of one TP degree", EVEN),
        ("Engines of heddle", {"heddle": "heddle", "heddle+sticky+never": "pinned by load"}),
    )
    for ax, (title, shown) in zip(axes, panels, strict=True):
        series = [
            (label, [scaled(data[w][p], 1e-3) for w in WORKLOADS], colour(p))
            for p, label in shown.items()
        ]
        bars(ax, WORKLOADS, series)
        ax.set_title(title)
        ax.legend()
    axes[0].set_ylabel("output tokens per second (thousands)")
    axes[0].set_ylim(0, 1.25 * axes[0].get_ylim()[1])
    save(figure, path)
