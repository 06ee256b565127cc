"""Names of things, as readable strings: ``"math-017/3"``, ``"e2"``."""

from typing import NewType

TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
EngineId = NewType("EngineId", str)
