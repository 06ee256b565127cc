"""S: `heddle serve` beside sticky routing, for a burst and for arrivals at any time.

    python -m experiments serve_arrivals --full
    python -m experiments.serve_arrivals.run > experiments/serve_arrivals/RESULTS.md

The second command writes the table of what the first has measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import bars, colour, page, save
from experiments.harness.experiment import MEASURED, Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.running import Skipped
from experiments.harness.store import ROOT
from experiments.harness.values import Value, across, estimate, exactly
from heddle.cluster.config import ClusterConfig
from heddle.config import MissingConfig, PolicyConfig, RunConfig
from heddle.gateway.arrivals import PARTS_BY_ARRIVALS, POLICY
from heddle.setup import RunSetup, prepare
from heddle_core.commands import Command
from heddle_core.events import Event, TrajectoryArrived, TrajectoryFinished
from heddle_core.ids import TrajectoryId
from heddle_core.journal import recorded
from heddle_rollout.driver import ROLLOUT
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation
from heddle_trace.schema import TrajectoryScript

KINDS = ("burst", "light", "heavy")
"""Arrivals: all within `burst_s`; or at the first of the `rates` of a trace, or the second."""
OBJECTIVE = {"burst": "makespan_s", "light": "mean_s", "heavy": "mean_s"}
SHOWN = ("verl", "slime", "sticky_least_loaded", "batch", "open", "auto")
FIRST_SEED = 301


class _TrajectoryTimes:
    """Sees the events of a run; has the seconds of each trajectory from its arrival to its end."""

    def __init__(self) -> None:
        self._arrived_s: dict[TrajectoryId, float] = {}
        self.seconds: list[float] = []
        self.last_s = 0.0

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case TrajectoryArrived():
                self._arrived_s[event.trajectory] = event.time_s
            case TrajectoryFinished():
                self.seconds.append(event.time_s - self._arrived_s[event.trajectory])
                self.last_s = event.time_s


class _Core:
    """The core, whose events something sees."""

    def __init__(self, setup: RunSetup, sink: _TrajectoryTimes) -> None:
        self._controller = setup.controller()
        self.handle = recorded(self._controller.handle, sink)

    @property
    def deadline_s(self) -> float | None:
        return self._controller.deadline_s


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each trace, kind of arrivals and policy; the same at any size.

    Raises:
        Skipped: a recorded trace is not there.
    """
    made = {}
    for trace in config["traces"]:
        if not (ROOT / trace["path"]).exists():
            raise Skipped(
                f"{trace['path']} is not there; recorded traces are no part of the source"
            )
        for kind in KINDS:
            for policy in SHOWN:
                question = {
                    "serve_arrivals": 1,
                    "trace": trace,
                    "cluster": config["cluster"],
                    "kind": kind,
                    "burst_s": config["burst_s"],
                    "policy": preset_of(policy),
                    "seeds": config["seeds"],
                }
                name = f"{trace['name']} {kind} {policy}"
                made[name] = Computation(question=question, make=partial(simulated, question))
    return made


def preset_of(shown: str) -> str:
    """The policy on engines that are there already."""
    parts = PARTS_BY_ARRIVALS.get(shown)
    return shown if parts is None else f"{POLICY}{parts}+fixed+keep_engines"


def simulated(question: Mapping[str, Any]) -> Mapping[str, Any]:
    """Seconds of trajectories and of the whole under one policy, a list of one item per seed."""
    runs = [_run(question, FIRST_SEED + number) for number in range(question["seeds"])]
    return {name: [run[name] for run in runs] for name in runs[0]}


def _run(question: Mapping[str, Any], seed: int) -> Mapping[str, float]:
    """One run as a gateway has it: nobody says how many trajectories will come."""
    trace = question["trace"]
    setup = prepare(
        RunConfig(
            trace=str(ROOT / trace["path"]),
            seed=seed,
            missing=MissingConfig(**trace.get("missing", {})),
            history="none",
            cluster=ClusterConfig(**question["cluster"], max_running=trace["max_running"]),
            policy=PolicyConfig(preset=question["policy"]),
        )
    )
    times = _TrajectoryTimes()
    simulation = Simulation(_Core(setup, times), setup.simulation)
    driver, clock = simulation.driver, simulation.clock
    driver.open_rollout(ROLLOUT)
    for script in arriving(setup.workload.scripts, question, seed):
        driver.admit(ScriptedAgent(script, clock))
    # The rollout of a gateway is open as long as it runs; this one ends after the last arrival.
    clock.call_after(script.arrival_s + 1e-6, driver.close_rollout, ROLLOUT)
    simulation.run()
    return {
        "makespan_s": times.last_s,
        "mean_s": float(np.mean(times.seconds)),
        "p99_s": float(np.quantile(times.seconds, 0.99)),
    }


def arriving(
    scripts: Sequence[TrajectoryScript], question: Mapping[str, Any], seed: int
) -> list[TrajectoryScript]:
    """The same in their order, at times of a burst or of a Poisson process."""
    rng = np.random.default_rng([seed, 2718])
    if question["kind"] == "burst":
        at_s = np.sort(rng.uniform(0.0, question["burst_s"], len(scripts)))
    else:
        rate = question["trace"]["rates"][KINDS.index(question["kind"]) - 1]
        at_s = np.cumsum(rng.exponential(1.0 / rate, len(scripts)))
    return [
        replace(script, arrival_s=float(second - at_s[0]))
        for script, second in zip(scripts, at_s, strict=True)
    ]


def measure(context: Context) -> Measured:
    """Seconds of each cell, and the ratios of `auto` to sticky policies, paired by seed."""
    config = context.config
    made = computations(context.size, config)
    found = {name: context.store.get(each.key) for name, each in made.items()}
    values: dict[str, Value] = {}
    cells: dict[str, Any] = {}
    gains: dict[str, list[Value]] = {kind: [] for kind in KINDS}
    for trace in (each["name"] for each in config["traces"]):
        cells[trace] = {}
        for kind in KINDS:
            runs = {policy: found[f"{trace} {kind} {policy}"] for policy in SHOWN}
            key = OBJECTIVE[kind]

            def ratio(
                policy: str, under: str, runs: Mapping[str, Any] = runs, key: str = key
            ) -> Value:
                pairs = zip(runs[policy][key], runs[under][key], strict=True)
                return estimate([over / other for over, other in pairs])

            beside = [ratio("auto", other) for other in config["sticky"]]
            values[f"worse_{trace}_{kind}"] = exactly(max(0.0, *(v.low - 1.0 for v in beside)))
            gains[kind] += beside
            cells[trace][kind] = {
                policy: {
                    **{name: estimate(run[name]).plain() for name in run},
                    "over": {other: ratio(policy, other).plain() for other in config["sticky"]},
                }
                for policy, run in runs.items()
            }
    values |= {f"auto_{kind}": across(each) for kind, each in gains.items()}
    return Measured(values=values, data={"sticky": config["sticky"], "cells": cells})


def draw(data: Any, path: Path) -> None:
    """What is judged over that of `verl`, a panel for each kind of arrivals."""
    figure, axes = page(3, width=9.5, height=3.2, sharey=True)
    shown = [policy for policy in SHOWN if policy != "verl"]
    shades = {"batch": colour("heddle"), "open": "#7fb8d8", "auto": "#17364d"}
    for ax, kind in zip(axes, KINDS, strict=True):
        ratios = [
            (
                policy,
                [cell[kind][policy]["over"]["verl"] for cell in data["cells"].values()],
                shades.get(policy, colour(policy)),
            )
            for policy in shown
        ]
        bars(ax, list(data["cells"]), ratios)
        ax.axhline(1.0, color="#777777", lw=0.8)
        judged = "makespan" if kind == "burst" else "mean trajectory time"
        ax.set(title=f"{kind}: {judged}", ylim=(0.0, 1.5))
        ax.tick_params(axis="x", labelsize=8)
    axes[0].set(ylabel="over verl")
    axes[0].legend(fontsize=7, ncols=2, loc="upper left")
    save(figure, path)


def results(data: Any) -> str:
    """The table of all cells."""
    lines = [
        "# `serve.arrivals` beside sticky routing",
        "",
        "Simulated seconds: mean and half-width of the 95 % interval over five seeds. In bold is",
        "what counts: the makespan of a burst, the mean time of a trajectory where they come at",
        "any time. The last columns have its ratio to each sticky policy, paired by seed.",
        "Commands:",
        "[run.py](run.py); clusters and rates: [config.toml](config.toml).",
        "",
        "| trace | arrivals | policy | makespan | mean trajectory | p99 | "
        + " | ".join(f"over `{other}`" for other in data["sticky"])
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(data["sticky"]),
    ]
    for trace, kinds in data["cells"].items():
        for kind, policies in kinds.items():
            for policy, cell in policies.items():
                columns = ["makespan_s", "mean_s", "p99_s"]
                seconds = [
                    f"**{_seconds(cell[name])}**"
                    if name == OBJECTIVE[kind]
                    else _seconds(cell[name])
                    for name in columns
                ]
                ratios = [
                    "" if other == policy else _ratio(cell["over"][other])
                    for other in data["sticky"]
                ]
                named = f"`{policy}`" if policy in data["sticky"] else f"`heddle`, {policy}"
                lines.append("| " + " | ".join([trace, kind, named, *seconds, *ratios]) + " |")
    return "\n".join(lines) + "\n"


def _seconds(value: Mapping[str, float]) -> str:
    return f"{value['mean']:,.1f} ± {value['high'] - value['mean']:,.1f}"


def _ratio(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['high'] - value['mean']:.3f}"


if __name__ == "__main__":
    kept = json.loads((Path(__file__).with_name(MEASURED)).read_text(encoding="utf-8"))
    print(results(kept["data"]), end="")
