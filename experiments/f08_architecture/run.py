"""F8: parts of the policy, events, commands and drivers, read from the packages."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from matplotlib.patches import FancyBboxPatch

from experiments.harness.drawing import COLOURS, page, save
from experiments.harness.experiment import Context, Measured
from heddle.knowledge import SHIPPED, load_predictor_model
from heddle.plugins import load_policy
from heddle_core.commands import Command
from heddle_core.estimate.cost import CostModel
from heddle_core.events import Event
from heddle_core.policy import NoConsolidation, Policy, PolicyContext
from heddle_sim.profile_files import load_profile

ANSWERS = {
    "predictor": "how much is left?",
    "scheduler": "when?",
    "admission": "does it fit?",
    "placement": "where?",
    "migration": "where, from now on?",
    "planner": "how: which engines?",
    "consolidation": "how, late in a rollout?",
}


def measure(context: Context) -> Measured:
    """Parts of one policy by name, and how many events and commands there are."""
    cost: CostModel = load_profile("qwen3-14b", "h100").cost_estimate((1, 2, 4, 8))
    policy_context = PolicyContext(
        pools={"h100": 8},
        shape=min(cost.by_shape),
        shape_choices=tuple(cost.by_shape),
        max_running=100,
        cost=cost,
        learned=load_predictor_model(SHIPPED).factory,
    )
    policy = load_policy(context.config["drawing"]["policy"], policy_context)
    chosen = {f.name: getattr(policy, f.name) for f in fields(Policy)}
    parts = [
        [kind, type(getattr(part, "inner", part)).__name__, ANSWERS[kind]]
        for kind, part in chosen.items()
        if not isinstance(part, NoConsolidation)
    ]
    return Measured(
        values={},
        data={
            "policy": context.config["drawing"]["policy"],
            "parts": parts,
            "events": [kind.__name__ for kind in get_args(Event)],
            "commands": [kind.__name__ for kind in get_args(Command)],
        },
    )


def draw(data: Any, path: Path) -> None:
    """The controller with its parts, above the two worlds that drive it."""
    figure, axes = page(height=4.4)
    axes.set(xlim=(0, 12), ylim=(0, 8))
    axes.axis("off")
    _box(axes, 0.2, 3.6, 11.6, 4.2, "#eef3f8", f"heddle_core: controller with {data['policy']}")
    for index, (kind, name, question) in enumerate(data["parts"]):
        x, y = 0.5 + 3.8 * (index % 3), 5.65 - 1.75 * (index // 3)
        _box(axes, x, y, 3.5, 1.4, "white", kind)
        axes.text(x + 1.75, y + 0.68, name, ha="center", fontsize=9, color=COLOURS[0])
        axes.text(x + 1.75, y + 0.22, question, ha="center", fontsize=8.5, style="italic")
    _box(axes, 0.2, 0.2, 5.4, 1.3, "#f7efe4", "heddle_sim: simulated engines")
    _box(axes, 6.4, 0.2, 5.4, 1.3, "#f7efe4", "heddle_runtime: vLLM engines")
    for x, world in ((2.9, "trace, latency profile"), (9.1, "processes, GPUs, tools")):
        axes.text(x, 0.45, world, ha="center", fontsize=8.5)
        axes.annotate("", (x - 0.4, 3.55), (x - 0.4, 1.75), arrowprops={"arrowstyle": "->"})
        axes.annotate("", (x + 0.4, 1.75), (x + 0.4, 3.55), arrowprops={"arrowstyle": "->"})
    events = f"{len(data['events'])} kinds of events:\n" + ",\n".join(data["events"][2:5])
    commands = f"{len(data['commands'])} kinds of commands:\n" + ",\n".join(data["commands"][:3])
    axes.text(2.3, 2.6, events, ha="right", va="center", fontsize=8)
    axes.text(3.5, 2.6, commands, ha="left", va="center", fontsize=8)
    axes.text(9.7, 2.6, "the same events\nand commands", ha="left", va="center", fontsize=8)
    save(figure, path)


def _box(axes: Any, x: float, y: float, width: float, height: float, shade: str, name: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.02", facecolor=shade, edgecolor="#333333"
        )
    )
    axes.text(
        x + width / 2, y + height - 0.14, name, ha="center", va="top", fontsize=9, weight="bold"
    )
