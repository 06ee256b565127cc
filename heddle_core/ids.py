"""Identifiers, as readable strings, and the shape of an engine."""

from typing import Literal, NewType, TypeAlias

import msgspec

RolloutId = NewType("RolloutId", str)
TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)

Role: TypeAlias = Literal["both", "prefill", "decode"]


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
    """GPU class, TP degree and role of an engine: the key of cost estimates, plans and profiles."""

    gpu: str
    """GPU class."""
    tp: int
    """GPUs, all of one class."""
    role: Role = "both"
    """Which part of a step it runs: prefill, decode, or both."""

    def __str__(self) -> str:
        """Name it as messages do: ``h100 tp4``."""
        return f"{self.gpu} tp{self.tp}" + ("" if self.role == "both" else f" {self.role}")
