"""Identifiers, as readable strings, and the shape of an engine."""

from typing import Literal, NewType, TypeAlias

import msgspec

RolloutId = NewType("RolloutId", str)
TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)

Role: TypeAlias = Literal["both", "prefill", "decode"]

GpuRole: TypeAlias = Literal["rollout", "training"]

GpuPool: TypeAlias = Literal["all", "hybrid"]
"""GPUs that change sides: all of a colocated cluster, whose engines sleep meanwhile, or those of a
hybrid pool, which have no engines while they train."""


class EngineId(str):
    """A plan's name for an engine, and the number of its restart: ``"e3"``, then ``"e3+1"``.

    Each start of an engine has its own id, so that a late message for a dead engine cannot reach
    its successor.
    """

    __slots__ = ()

    def __new__(cls, name: str, life: int = 0) -> "EngineId":
        """Join name and restart; `name` alone may be a complete id as text."""
        return super().__new__(cls, f"{name}+{life}" if life else name)

    @property
    def name(self) -> str:
        """The plan's name, the same in every life."""
        return self.partition("+")[0]

    @property
    def life(self) -> int:
        """0 for the first start."""
        return int(self.partition("+")[2] or 0)


class EngineShape(msgspec.Struct, frozen=True, cache_hash=True, order=True, gc=False):
    """GPU class, parallelism and role of an engine: key of cost estimates, plans and profiles."""

    gpu: str
    """GPU class."""
    tp: int
    """TP degree of each data-parallel rank."""
    role: Role = "both"
    """Which part of a step it runs: prefill, decode, or both."""
    ep: int = 1
    """GPUs that the experts of a layer are spread over; 1: each expert is cut by TP."""
    dp: int = 1
    """Attention data parallelism: ranks, each with the KV of its own sequences."""

    @property
    def gpus(self) -> int:
        """GPUs of the engine, all of one class."""
        return self.tp * self.dp

    def as_role(self, role: Role) -> "EngineShape":
        """The same engine with another role."""
        if role == self.role:
            return self
        return EngineShape(self.gpu, self.tp, role, self.ep, self.dp)

    @property
    def prefills_only(self) -> bool:
        """Whether another engine decodes what it prefills."""
        return self.role == "prefill"

    def __str__(self) -> str:
        """Name it as messages do: ``h100 tp4``, ``h200 tp1 dp8 ep8``."""
        parts = [f"{self.gpu} tp{self.tp}"]
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [self.role] if self.role != "both" else []
        return " ".join(parts)
