"""One run as a value: rollout, cluster, policy. Equal values run once."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

from experiments.harness.pools import read_pool
from heddle.cluster.config import ClusterConfig
from heddle.config import MissingConfig

SCHEMA = "heddle.experiment-run/2"
FIRST_SEED = 101
"""Rollouts are synthesised with seeds from here on; shipped histories are of other seeds."""
BASELINE_TP = {"qwen3-8b": 1, "qwen3-14b": 1, "qwen3-32b": 2, "llama-3.1-8b": 1}
"""TP degree of the baselines' engines; arXiv 2603.28101, setting of the evaluation."""
PREDICTION_S = {"coding": 0.10, "search": 0.15, "math": 0.27}
"""Latency of a served prediction: Table 1 of the paper, 14B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The replayed rollout: synthetic, or a recorded trace if `path` is set."""

    workload: str
    trajectories: int = 0
    samples: int = 16
    seed: int = FIRST_SEED
    tool_scale: float = 1.0
    """Factor on the seconds of every tool call."""
    path: str = ""
    """Recorded trace, relative to the repository's root."""
    missing: MissingConfig = field(default_factory=MissingConfig)
    arrive_over_s: float = 0.0
    """Groups arrive one by one, at random, over so many seconds; 0: all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One policy on one rollout on one cluster."""

    rollout: Rollout
    cluster: ClusterConfig
    policy: str
    seed: int = 0
    """Of the run: what is drawn in it. Rollouts differ by seeds of their own."""
    history: str = "prior"

    @property
    def key(self) -> str:
        """Address of its result: a hash of all its inputs."""
        plain = msgspec.to_builtins(self)
        # Results keep their address where a field that came later has no effect.
        if not self.rollout.arrive_over_s:
            del plain["rollout"]["arrive_over_s"]
        if not self.cluster.standby_tp:
            for name in ("standby_tp", "standby_start_s", "standby_gib"):
                del plain["cluster"][name]
        if self.cluster.expert_parallel == "auto":
            del plain["cluster"]["expert_parallel"]
        if self.cluster.attention_dp == 1:
            del plain["cluster"]["attention_dp"]
        if not self.cluster.pool:
            del plain["cluster"]["pool"]
        if self.cluster.speculation == "off":
            del plain["cluster"]["speculation"], plain["cluster"]["acceptance_decay"]
        if self.cluster.host_kv == "none":
            for name in ("host_kv", "host_kv_gib", "host_kv_gb_per_s"):
                del plain["cluster"][name]
        return content_key({"schema": SCHEMA, "job": plain})


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A result that is no run, such as the figures of a fitted predictor."""

    question: Mapping[str, Any]
    """JSON; all inputs."""
    make: Callable[[], Mapping[str, Any]]
    """Picklable: it is called in another process."""

    @property
    def key(self) -> str:
        """Address of its result: a hash of the question."""
        return content_key(self.question)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a set of runs is."""

    name: str
    gpus: int
    seeds: int

    @property
    def full(self) -> bool:
        """Whether it is the paper's size."""
        return self.gpus >= 64


REDUCED = Size(name="reduced", gpus=8, seeds=2)
FULL = Size(name="full", gpus=64, seeds=3)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A job and the values by which an experiment finds its result."""

    axes: Mapping[str, Any]
    job: Job


def content_key(value: Any) -> str:
    """Short hash of a JSON value, whatever the order of its keys."""
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:20]


_DEFAULTS: Mapping[str, Any] = {
    "workload": "coding",
    "model": "qwen3-14b",
    "policy": "verl",
    "gpu": "h100",
    "gpus": None,
    "pool": None,
    "tp": None,
    "per_engine": 100,
    "trajectories": None,
    "samples": 16,
    "max_running": 100,
    "prediction_s": None,
    "tool_capacity_per_gpu": None,
    "engine_start_s": None,
    "tool_scale": 1.0,
    "arrive_over_s": 0.0,
    "history": "prior",
    "seeds": None,
}
"""Keys of a `[[runs]]` table; a list stands for each of its values. None: by size or workload."""

_SINGLE = ("path", "missing", "name")
"""Keys of a recorded trace, which are no axes."""


def planned_runs(config: Mapping[str, Any], size: Size) -> list[PlannedRun]:
    """Every run of a configuration, at a size.

    Raises:
        ValueError: a `[[runs]]` table has a key that nothing reads.
    """
    return [run for table in config.get("runs", ()) for run in _table(table, size)]


def _table(table: Mapping[str, Any], size: Size) -> Iterator[PlannedRun]:
    unknown = [key for key in table if key not in _DEFAULTS and key not in _SINGLE]
    if unknown:
        known = ", ".join((*_DEFAULTS, *_SINGLE))
        raise ValueError(f"config.toml: [[runs]] has no key {unknown[0]!r}; keys: {known}")
    lists = {key: _as_list(table.get(key, default)) for key, default in _DEFAULTS.items()}
    for combination in product(*lists.values()):
        values = dict(zip(lists, combination, strict=True))
        for number in range(values["seeds"] or size.seeds):
            yield _planned_run(values, table, size, number)


def _planned_run(
    values: Mapping[str, Any], table: Mapping[str, Any], size: Size, number: int
) -> PlannedRun:
    model, workload = str(values["model"]), str(values["workload"])
    # Pools as one text, since a list is an axis: "h800:24 h20:8".
    pools = tuple(read_pool(text) for text in (values["pool"] or "").split())
    gpus = sum(pool.gpus for pool in pools) or values["gpus"] or size.gpus
    tp = values["tp"] or BASELINE_TP[model]
    per_gpu = values["tool_capacity_per_gpu"]
    latency = values["prediction_s"]
    cluster = ClusterConfig(
        model=model,
        gpu=values["gpu"],
        gpus=gpus,
        pool=pools,
        tp=tp,
        max_running=values["max_running"],
        prediction_s=PREDICTION_S.get(workload, 0.10) if latency is None else latency,
        engine_start_s=values["engine_start_s"],
        # 0 in a configuration stands for tools without limit: TOML has no null.
        tool_capacity=round(per_gpu * gpus) if per_gpu else None,
    )
    if "path" in table:
        rules = MissingConfig(**table.get("missing", {}))
        rollout = Rollout(workload=table["name"], path=table["path"], missing=rules)
    else:
        count = values["trajectories"] or gpus // BASELINE_TP[model] * values["per_engine"]
        rollout = Rollout(
            workload=workload,
            trajectories=count,
            samples=values["samples"],
            seed=FIRST_SEED + number,
            tool_scale=values["tool_scale"],
            arrive_over_s=values["arrive_over_s"],
        )
    job = Job(
        rollout=rollout,
        cluster=cluster,
        policy=values["policy"],
        history=values["history"],
    )
    return PlannedRun({**values, "workload": rollout.workload, "gpus": gpus, "tp": tp}, job)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
