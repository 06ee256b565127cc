"""V: what speculation brings, and what a policy adds on top: nine cells, every shipped policy.

Acceptance is that which SkyRL publishes, assumed for every model: the cells compare policies with
drafts and without, and say nothing of a head's own acceptance.
"""

import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import FIRST_SEED, Computation, Size
from experiments.harness.values import Value, exactly
from heddle.cluster.config import NO_SPECULATION, ClusterConfig
from heddle.comparison.compare import compare
from heddle.comparison.result import PolicyResult
from heddle.config import RunConfig
from heddle_core.presets import PRESETS
from heddle_rollout.speculation import SCHEDULE
from heddle_trace import synth, write_trace

KINDS = ("off", "static", "schedule")
"""Without drafts, at the best number of drafts, and with a schedule by batch size."""


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One comparison for each workload and model."""
    return {
        f"{workload} {model}": Computation(
            question={"cell": dict(config), "workload": workload, "model": model, "version": 1},
            make=partial(_cell, dict(config), workload, model),
        )
        for workload, model in product(config["workloads"], config["models"])
    }


def measure(context: Context) -> Measured:
    """Makespans by cell, policy and kind; what drafts bring `verl`, and `heddle` beside it."""
    data = {
        name: dict(context.store.get(made.key))["makespan_s"]
        for name, made in computations(context.size, context.config).items()
    }
    cells = list(data.values())
    brings = [cell["verl"]["off"] / min(cell["verl"].values()) for cell in cells]
    over_static = [cell["verl"]["static"] / cell["verl"]["schedule"] for cell in cells]
    best = [
        min(min(kinds.values()) for name, kinds in cell.items() if not name.startswith("heddle"))
        for cell in cells
    ]
    adds = [others / min(cell["heddle"].values()) for others, cell in zip(best, cells, strict=True)]
    beside = [min(cell["verl"].values()) / min(cell["heddle"].values()) for cell in cells]
    values = {
        "brings": _over(brings),
        "schedule_over_static": _over(over_static),
        "heddle_over_verl": _over(beside),
        "heddle_over_best": _over(adds),
        "heddle_over_verl_least": exactly(min(beside)),
    }
    return Measured(values=values, data=data)


def draw(data: Any, path: Path) -> None:
    """Makespans of `verl` and `heddle` over those of `verl` without drafts."""
    figure, axes = page(2, width=9.0, height=3.4, sharey=True)
    for ax, policy in zip(axes, ("verl", "heddle"), strict=True):
        for shift, kind in enumerate(KINDS):
            ratios = [cell[policy][kind] / cell["verl"]["off"] for cell in data.values()]
            ax.bar([i + 0.27 * (shift - 1) for i in range(len(ratios))], ratios, 0.25, label=kind)
        ax.set(title=policy)
        ax.set_xticks(range(len(data)), list(data), rotation=60, ha="right", fontsize=7)
    axes[0].set_ylabel("makespan over verl without drafts")
    axes[0].set_ylim(0.0, 1.25)
    axes[0].legend(fontsize=7, loc="upper center", ncol=3)
    save(figure, path)


def _over(values: list[float]) -> Value:
    """The mean of the cells, and the least and the greatest."""
    mean = sum(values) / len(values)
    return Value(mean=mean, low=min(values), high=max(values), n=len(values), spread="range")


def _cell(config: dict[str, Any], workload: str, model: str) -> Mapping[str, Any]:
    """Every shipped policy at its best TP degree, without drafts and with its best."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollout.jsonl.gz"
        records = synth(workload, config["trajectories"], FIRST_SEED, config["samples"])
        write_trace(path, records)
        cluster = ClusterConfig(model=model, gpus=config["gpus"])
        found = compare(
            RunConfig(trace=str(path), cluster=cluster),
            sorted(PRESETS),
            tps="best",
            speculation=config["speculation"],
            out=Path(folder),
            jobs=1,
        )
    rows: dict[str, dict[str, PolicyResult]] = {}
    for row in found.policies:
        kinds = rows.setdefault(row.variant.policy, {})
        kind = _kind(row.variant.cluster.speculation)
        if kind not in kinds or row.makespan_s.mean < kinds[kind].makespan_s.mean:
            kinds[kind] = row
    return {
        "makespan_s": {
            policy: {kind: kinds[kind].makespan_s.mean for kind in KINDS}
            for policy, kinds in rows.items()
        },
        "setting": {
            policy: {kind: kinds[kind].policy for kind in KINDS} for policy, kinds in rows.items()
        },
    }


def _kind(speculation: str) -> str:
    if speculation == NO_SPECULATION:
        return "off"
    return "schedule" if SCHEDULE in speculation else "static"
