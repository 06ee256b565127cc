"""Heddle schedules agentic RL rollout by trajectory.

Public names: `compare`, `plan` and `loop`, which do what the commands do; `simulate`, `run`,
`replay`, `load_run`, `PRESETS`, and `RunConfig` with its sections; `prepare` and `Workspace`, for
many runs of one trace.
Names are imported when first used, so that ``import heddle`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heddle.api import compare as compare
    from heddle.api import loop as loop
    from heddle.api import plan as plan
    from heddle.cluster.config import ClusterConfig as ClusterConfig
    from heddle.cluster.gpu_pools import PoolConfig as PoolConfig
    from heddle.config import MissingConfig as MissingConfig
    from heddle.config import PolicyConfig as PolicyConfig
    from heddle.config import RunConfig as RunConfig
    from heddle.config import RuntimeConfig as RuntimeConfig
    from heddle.running import run as run
    from heddle.runs import load_run as load_run
    from heddle.runs.replay import replay as replay
    from heddle.setup import Workspace as Workspace
    from heddle.setup import prepare as prepare
    from heddle.simulation import simulate as simulate
    from heddle_core.presets import PRESETS as PRESETS

_WHERE = {
    "PRESETS": "heddle_core.presets",
    "ClusterConfig": "heddle.cluster.config",
    "MissingConfig": "heddle.config",
    "PolicyConfig": "heddle.config",
    "PoolConfig": "heddle.cluster.gpu_pools",
    "RunConfig": "heddle.config",
    "RuntimeConfig": "heddle.config",
    "Workspace": "heddle.setup",
    "compare": "heddle.api",
    "load_run": "heddle.runs",
    "loop": "heddle.api",
    "plan": "heddle.api",
    "prepare": "heddle.setup",
    "replay": "heddle.runs.replay",
    "run": "heddle.running",
    "simulate": "heddle.simulation",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'heddle' has no attribute {name!r}")
    found = getattr(import_module(_WHERE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
