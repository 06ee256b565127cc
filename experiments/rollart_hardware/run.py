"""R: tasks on the GPU class that suits them, at equal cost (RollArt)."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import heddle
from experiments.harness.drawing import COLOURS, MARKERS, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import FIRST_SEED, Computation, Rollout, Size
from experiments.harness.pools import read_pool
from experiments.harness.running import records_of
from experiments.harness.values import exactly
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.setup import prepare
from heddle_trace import write_trace

TAGGED, MEASURED_SHARES = "rollart", "rollart-measured"
HISTORY_SEED = 7
"""Of the rollout before, which `rollart-measured` learns from."""


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each workload, cluster and policy; the same at any size."""
    cluster, tasks, mix = config["cluster"], config["tasks"], config["mix"]
    runs: list[dict[str, Any]] = [
        {"workload": task, "trajectories": load, "pool": pool, "policy": "verl"}
        for task in (mix["prefill"], mix["decode"])
        for load in tasks["loads"]
        for pool in tasks["pools"]
    ]
    mixed = {"workload": "rollart-mix", "trajectories": mix["trajectories"]}
    runs += [{**mixed, "pool": mix[name], "policy": "verl"} for name in ("h800", "h20")]
    runs += [
        {**mixed, "pool": pool, "policy": policy}
        for pool in mix["mixed"]
        for policy in ("verl", TAGGED, MEASURED_SHARES)
    ]
    runs += [_split(config, prefill) for prefill in config["roles"]["prefill"]]
    tags = (f"{mix['prefill']}=h800", f"{mix['decode']}=h20")
    return {_name(run): _computation({**run, **cluster, "tags": tags}) for run in runs}


def _split(config: Mapping[str, Any], prefill: int) -> dict[str, Any]:
    pool = config["roles"]["pool"]
    decode = int(pool.partition(":")[2]) - prefill
    return {
        "workload": "rollart-mix",
        "trajectories": config["mix"]["trajectories"],
        "pool": pool,
        "policy": "verl",
        "roles": f"prefill={prefill},decode={decode}" if prefill else "",
    }


def _name(run: Mapping[str, Any]) -> str:
    roles = run.get("roles", "")
    name = f"{run['workload']} {run['trajectories']} {run['pool']} {run['policy']}"
    return f"{name} {roles}" if roles else name


def _computation(run: Mapping[str, Any]) -> Computation:
    return Computation(question={"rollart_hardware": 1, **run}, make=partial(_simulated, run))


def _simulated(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Makespan in seconds of one rollout."""
    tagged = run["policy"] == TAGGED
    learns = run["policy"] == MEASURED_SHARES
    with tempfile.TemporaryDirectory(prefix="heddle-experiment-") as folder:
        now, before = Path(folder) / "now.jsonl.gz", Path(folder) / "before.jsonl.gz"
        for path, seed in ((now, FIRST_SEED), (before, HISTORY_SEED)):
            rollout = Rollout(workload=run["workload"], trajectories=run["trajectories"], seed=seed)
            write_trace(path, records_of(rollout))
        config = RunConfig(
            trace=str(now),
            history=str(before) if learns else "none",
            cluster=_cluster(run),
            policy=PolicyConfig(preset=run["policy"], tags=run["tags"] if tagged else ()),
        )
        result = heddle.simulate(prepare(config), out=Path(folder) / "runs")
        return {"makespan_s": result.summary["makespan_s"]}


def _cluster(run: Mapping[str, Any]) -> ClusterConfig:
    pools = tuple(read_pool(text) for text in run["pool"].split())
    only = pools[0]
    return ClusterConfig(
        model=run["model"],
        pool=pools if len(pools) > 1 else (),
        gpu=only.gpu,
        gpus=only.gpus,
        tp=run["tp"],
        max_running=run["max_running"],
        roles=run.get("roles", ""),
    )


def measure(context: Context) -> Measured:
    """Ratios of makespans on clusters of equal cost."""
    made = computations(context.size, context.config)
    seconds = {name: context.store.get(each.key)["makespan_s"] for name, each in made.items()}
    tasks, mix = context.config["tasks"], context.config["mix"]
    h800, h20 = tasks["pools"]

    def ratios(task: str) -> list[float]:
        return [
            seconds[f"{task} {load} {h800} verl"] / seconds[f"{task} {load} {h20} verl"]
            for load in tasks["loads"]
        ]

    prefill, decode = ratios(mix["prefill"]), ratios(mix["decode"])
    of_mix = f"rollart-mix {mix['trajectories']}"
    alone = {name: seconds[f"{of_mix} {mix[name]} verl"] for name in ("h800", "h20")}
    mixed = {
        policy: {pool: seconds[f"{of_mix} {pool} {policy}"] for pool in mix["mixed"]}
        for policy in ("verl", TAGGED, MEASURED_SHARES)
    }
    best = {policy: min(by_pool.values()) for policy, by_pool in mixed.items()}
    splits = [_name(_split(context.config, n)) for n in context.config["roles"]["prefill"]]
    values = {
        "prefill": prefill[1],
        "decode": 1 / decode[1],
        "tagged_over_h800": alone["h800"] / best[TAGGED],
        "tagged_over_h20": alone["h20"] / best[TAGGED],
        "measured_over_h800": alone["h800"] / best[MEASURED_SHARES],
        "measured_over_h20": alone["h20"] / best[MEASURED_SHARES],
        "roles": seconds[splits[0]] / min(seconds[split] for split in splits[1:]),
    }
    data = {
        "loads": [load / int(h800.partition(":")[2]) for load in tasks["loads"]],
        "prefill": prefill,
        "decode": decode,
        "alone": alone,
        "mixed": mixed,
    }
    return Measured(values={name: exactly(value) for name, value in values.items()}, data=data)


def draw(data: Any, path: Path) -> None:
    """Above: one class over the other by load. Below: makespans of the mix."""
    figure, (above, below) = page(1, 2, height=6.4, height_ratios=(1, 1.4))
    for index, (key, name) in enumerate((("prefill", "prefill-heavy"), ("decode", "decode-heavy"))):
        above.plot(
            data["loads"], data[key], marker=MARKERS[index], color=COLOURS[index], label=name
        )
    above.axhline(1.0, color="#777777", lw=0.8)
    above.set(
        xlabel="trajectories for an H800",
        ylabel="time on H800 over H20",
        ylim=(0, None),
        title="one task on 14 H800 or 40 H20 (both derived)",
    )
    above.set_xscale("log", base=2)
    above.set_xticks(data["loads"], [f"{load:g}" for load in data["loads"]])
    above.legend()
    bars = [("27 h800, verl", data["alone"]["h800"]), ("76 h20, verl", data["alone"]["h20"])]
    for policy, by_pool in data["mixed"].items():
        bars += [(f"{pool.replace(':', ' ')}, {policy}", s) for pool, s in by_pool.items()]
    below.barh([name for name, _ in bars], [seconds for _, seconds in bars], color=COLOURS[0])
    below.invert_yaxis()
    below.set(xlabel="makespan (s)", title="both tasks, at equal cost")
    save(figure, path)
