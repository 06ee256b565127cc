"""Pools of GPUs: the classes of a mixed cluster, one pool of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_FORM: Final = "write CLASS:GPUS as h800:96, and after it :tp=DEGREE or :profile=FILE.json"


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


def read_pool(text: str) -> dict[str, Any]:
    """Read ``CLASS:GPUS``, ``:tp=DEGREE`` and ``:profile=FILE`` into the fields of a `PoolConfig`.

    Raises:
        ValueError: it is no pool; the message has the form.
    """
    gpu, *rest = text.split(":")
    found: dict[str, Any] = {"gpu": gpu.strip()}
    try:
        found["gpus"] = int(rest[0])
        for part in rest[1:]:
            key, equals, value = part.partition("=")
            if not equals or key not in ("tp", "profile") or key in found:
                raise ValueError
            found[key] = int(value) if key == "tp" else value
    except (ValueError, IndexError):
        raise ValueError(f"{text!r} is no pool of GPUs: {_FORM}") from None
    return found


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
