"""F8: the parts of a policy, events, commands and the driver, read from the packages."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from matplotlib.patches import FancyBboxPatch

from experiments.harness.drawing import COLOURS, page, save
from experiments.harness.experiment import Context, Measured
from heddle.policies.plugins import load_policy
from heddle.policy_inputs import SHIPPED, load_predictor_model
from heddle_core.commands import Command
from heddle_core.estimate.cost import CostModel
from heddle_core.events import Event
from heddle_core.policy import Policy, PolicyContext
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
    """The controller with its parts, the driver below it, and the two clocks and their engines."""
    figure, axes = page(height=5.4)
    axes.set(xlim=(0, 12), ylim=(0, 10))
    axes.axis("off")
    _box(axes, 0.2, 5.7, 11.6, 4.1, "#eef3f8", f"heddle_core: controller with {data['policy']}")
    for index, (kind, name, question) in enumerate(data["parts"]):
        row, column = divmod(index, 4)
        x, y = 0.4 + (2.83 * column if row == 0 else 1.41 + 2.83 * column), 7.65 - 1.75 * row
        _box(axes, x, y, 2.7, 1.45, "white", kind)
        axes.text(x + 1.35, y + 0.68, name, ha="center", fontsize=8.5, color=COLOURS[0])
        axes.text(x + 1.35, y + 0.22, question, ha="center", fontsize=8, style="italic")
    _box(axes, 0.2, 3.0, 11.6, 1.0, "#edf4ec", "heddle_rollout: one driver")
    axes.text(6.0, 3.2, "agents, tool calls, migrations; reads one clock", ha="center", fontsize=8)
    for x, world, clock in (
        (0.2, "heddle_sim", "SimPy clock, simulated engines"),
        (6.3, "heddle_runtime", "asyncio clock, vLLM engines"),
    ):
        _box(axes, x, 0.2, 5.5, 1.2, "#f7efe4", world)
        axes.text(x + 2.75, 0.45, clock, ha="center", fontsize=8.5)
        _arrows(axes, x + 2.75, 2.95, 1.45, "step\nresults", "step\nrequests")
    events = f"{len(data['events'])} kinds of events:\n" + ",\n".join(data["events"][2:5])
    commands = f"{len(data['commands'])} kinds of commands:\n" + ",\n".join(data["commands"][:3])
    _arrows(axes, 6.0, 5.65, 4.05, events, commands)
    save(figure, path)


def _arrows(axes: Any, x: float, above: float, below: float, up: str, down: str) -> None:
    """An arrow up with its text on the left, one down with its text on the right."""
    axes.annotate("", (x - 0.25, above), (x - 0.25, below), arrowprops={"arrowstyle": "->"})
    axes.annotate("", (x + 0.25, below), (x + 0.25, above), arrowprops={"arrowstyle": "->"})
    middle = (above + below) / 2
    axes.text(x - 0.45, middle, up, ha="right", va="center", fontsize=8)
    axes.text(x + 0.45, middle, down, ha="left", va="center", fontsize=8)


def _box(axes: Any, x: float, y: float, width: float, height: float, shade: str, name: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.02", facecolor=shade, edgecolor="#333333"
        )
    )
    axes.text(
        x + width / 2, y + height - 0.14, name, ha="center", va="top", fontsize=9, weight="bold"
    )
