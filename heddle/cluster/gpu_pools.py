"""Pools of GPUs: the classes of a mixed cluster, one pool of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """GPUs of one class in a cluster of several."""

    gpu: str
    """GPU class."""
    gpus: int
    """GPUs of this class; a multiple of the GPUs of an engine."""
    tp: int | None = None
    """TP degree of its engines where a policy does not plan them. None: the cluster's."""
    profile: str = ""
    """Path of a profile of the cluster's model on this class, a .json; empty: the shipped one."""

    def __post_init__(self) -> None:
        if not self.gpu.strip():
            raise ValueError("a pool needs a GPU class, as in gpu = 'h800'")
        if self.gpus < 1:
            raise ValueError(
                f"the pool of {self.gpu} has {self.gpus} GPUs: give it 1 or more, or leave it out"
            )
        if self.tp is not None and self.tp < 1:
            raise ValueError(f"the pool of {self.gpu} has tp = {self.tp}: take 1 or more")
        if self.profile and not self.profile.endswith(".json"):
            raise ValueError(
                f"the pool of {self.gpu} has profile = {self.profile!r}: give the path of a "
                "profile file, ending in .json"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePool:
    """Engines of one kind: an entry of `cluster.engines`."""

    gpu: str | None = None
    """GPU type. None: the cluster's."""
    gpus: int | None = None
    """GPUs of these engines; or give `count`."""
    count: int | None = None
    """Engines, each with `tp` GPUs."""
    tp: int | None = None
    """TP degree. None: the cluster's."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What they do."""
    profile: str = ""
    """Path of a profile of the cluster's model on this GPU type, a .json; empty: the shipped one.
    Only beside pools of other types."""


def engine_keys(pools: Sequence[EnginePool], tp: int, ranks: int) -> dict[str, Any]:
    """Return the keys of a cluster that say what a list of engines says.

    `tp` is the TP degree of engines that name none, and `ranks` their attention data-parallel
    ranks.

    Raises:
        ValueError: they are no cluster; the message has the remedy.
    """
    for pool in pools:
        if (pool.gpus is None) == (pool.count is None):
            raise ValueError("engines: give either gpus or count in each entry")
    each = [(pool, _gpus(pool, tp, ranks)) for pool in pools]
    types = list(dict.fromkeys(pool.gpu.lower() for pool in pools if pool.gpu))
    roles = {role: [p for p in each if p[0].role == role] for role in ("both", "prefill", "decode")}
    if len(types) > 1:
        if not all(pool.gpu for pool in pools) or len(roles["both"]) < len(pools):
            raise ValueError(
                "engines: of several GPU types each entry names its own, and all do both: leave "
                "role out"
            )
        named = [
            PoolConfig(gpu=pool.gpu or "", gpus=gpus, tp=pool.tp, profile=pool.profile)
            for pool, gpus in each
        ]
        return {"pool": tuple(named)}
    if roles["both"] and len(roles["both"]) < len(pools):
        raise ValueError("engines: give every entry a role, prefill or decode, or none")
    found: dict[str, Any] = {"gpus": sum(gpus for _, gpus in each)}
    if types:
        found["gpu"] = types[0]
    if not roles["both"]:
        totals = {role: sum(gpus for _, gpus in roles[role]) for role in ("prefill", "decode")}
        found["roles"] = ",".join(f"{role}={gpus}" for role, gpus in totals.items() if gpus)
        degrees = list(dict.fromkeys(pool.tp for pool, _ in roles["prefill"]))
        if len(degrees) > 1:
            raise ValueError("engines: those that prefill have one TP degree")
        if degrees and degrees[0] is not None:
            found["prefill_tp"] = degrees[0]
    homes = roles["both"] or roles["decode"]
    mix = [pool.tp or tp for pool, gpus in homes for _ in range(gpus // ((pool.tp or tp) * ranks))]
    if len(dict.fromkeys(mix)) == 1:
        return {**found, "tp": mix[0]}
    return {**found, "tp": min(mix, default=tp), "mix": tuple(mix)}


def _gpus(pool: EnginePool, tp: int, ranks: int) -> int:
    """GPUs of an entry.

    Raises:
        ValueError: they are no whole engines.
    """
    own = (pool.tp or tp) * ranks
    gpus = pool.gpus if pool.count is None else pool.count * own
    if gpus is None or gpus < 1 or own < 1 or gpus % own:
        raise ValueError(f"engines: {gpus} GPUs are no engines of {own}: take a multiple of {own}")
    return gpus


def check_pools(pools: Sequence[PoolConfig]) -> None:
    """Refuse a class that is named twice.

    Raises:
        ValueError: one is.
    """
    seen: dict[str, PoolConfig] = {}
    for pool in pools:
        other = seen.setdefault(pool.gpu.lower(), pool)
        if other is not pool:
            raise ValueError(
                f"pool: GPU class {pool.gpu} is named twice, with {other.gpus} and {pool.gpus} "
                f"GPUs: name it once, with {other.gpus + pool.gpus}"
            )


def read_tags(texts: Sequence[str]) -> dict[str, str]:
    """Read tags of tasks, ``TASK=CLASS``, as GPU class by task.

    Raises:
        ValueError: an entry is no tag, or two are of one task.
    """
    found: dict[str, str] = {}
    for text in texts:
        task, _, gpu = text.rpartition("=")
        if not task or not gpu.strip():
            raise ValueError(f"tags: {text!r} is not TASK=CLASS, such as swe=h800")
        if task in found:
            raise ValueError(f"tags: task {task!r} is tagged twice")
        found[task] = gpu.strip().lower()
    return found
