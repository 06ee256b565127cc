"""W: RollArt's set-ups, a file each: H800 and H20 generate, H800 train, rewards are serverless."""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.values import exactly
from heddle.command_config import Config
from heddle.config_files import ConfigSource, read_toml, resolve, setting
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import loop_of
from heddle.loops.own_regimes import regime_names
from heddle.loops.splits import splits
from heddle_trace import write_trace
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.synth import synth

SETUPS = Path(__file__).with_name("setups")
OURS = "rollart"
BASELINES = ("sync", "sync_apart", "one_off", "areal")


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each file."""
    found = {}
    for name in config["setups"].split():
        source = read_toml(SETUPS / f"{name}.toml")
        values = source.values if size.full else _halved(source.values)
        question = {"rollart_setups": 2, **config, "values": values}
        found[name] = Computation(question=question, make=partial(_simulated, values, config))
    return found


def _halved(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with half of the GPUs, as far as there are whole engines, and of the prompts."""
    cluster, loop = dict(values["cluster"]), dict(values["loop"])
    if "gpus" in cluster:
        cluster["gpus"] //= 2
    cluster["engines"] = [
        {**each, "count": each["count"] // 2} for each in cluster.get("engines", ())
    ]
    for key in {"groups", "train_gpus"} & loop.keys():
        loop[key] //= 2
    return {**values, "cluster": cluster, "loop": loop}


def _simulated(values: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Seconds of a step, GPU-hours and dollars."""
    with tempfile.TemporaryDirectory(prefix="heddle-experiment-") as folder:
        path = Path(folder) / "mix.jsonl.gz"
        loop = values["loop"]
        write_trace(path, _mix(config, loop["groups"] * (loop["batches"] + 4)))
        taken: Config = resolve([ConfigSource("setup", values), setting(f"trace={path}")])
        made = loop_of(taken, regime_names("setup", taken.regimes))
        found = compare_regimes(splits(made, [made.train_gpus], [taken.cluster.tp]))
        (row,) = found.plain()["regimes"]
        kept = ("gpu_hours_per_1k_samples", "dollars_per_1k_samples", "wasted_share", "split_s")
        kept += ("samples_per_s", "equal_samples_per_s", "tokens_per_s", "length_bias")
        return {"step_s": row["step_s"]["mean"], **{key: row[key] for key in kept}}


def _mix(config: Mapping[str, Any], prompts: int) -> Iterator[TrajectoryRecord]:
    """Prompts of the tasks in turn."""
    samples, tasks = config["samples"], config["tasks"]
    each = -(-prompts // len(tasks)) * samples
    made = [[*synth(task, each, config["seed"], samples)] for task in tasks]
    for first in range(0, each, samples):
        yield from chain.from_iterable(records[first : first + samples] for records in made)


def measure(context: Context) -> Measured:
    """Time for equal data of other set-ups over that of RollArt's; the data has steps too.

    A step of RollArt's trains shorter samples, which are less work and less data.
    """
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    pairs = [(f"over_{name}", name, OURS) for name in BASELINES]
    pairs += [(f"mixed_over_{gpu}", f"only_{gpu}", "mixed") for gpu in ("h800", "h20")]
    values = {
        claim: rows[ours]["equal_samples_per_s"] / rows[other]["equal_samples_per_s"]
        for claim, other, ours in pairs
    }
    steps = {claim: rows[other]["step_s"] / rows[ours]["step_s"] for claim, other, ours in pairs}
    return Measured(
        values={name: exactly(value) for name, value in values.items()},
        data={"setups": rows, "by_step": steps},
    )


def draw(data: Any, path: Path) -> None:
    """The parts of a step, by set-up."""
    figure, ax = page(1, width=7.0)
    setups = data["setups"]
    left = [0.0] * len(setups)
    for part in ("rollout", "reward", "training", "update"):
        seconds = [row["split_s"][part] for row in setups.values()]
        ax.barh(list(setups), seconds, left=left, label=part)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    ax.invert_yaxis()
    ax.set(xlabel="seconds of a step")
    ax.legend()
    save(figure, path)
