"""Messages between the driver and the agent of a node, in the format of the engines' wire."""

from typing import TypeAlias

from heddle_runtime.process.wire import WireMessage
from heddle_runtime.vllm.settings import VllmSettings


class Launch(WireMessage, frozen=True):
    """Start the process of an engine. Ends in `Exited`."""

    engine: str
    module: str
    """What `python -m` runs."""
    connection: bytes
    """Names the connection that the process gets."""
    settings: VllmSettings
    devices: tuple[str, ...]
    """Of the node's GPUs, those of the engine."""


class Kill(WireMessage, frozen=True):
    """End an engine's process and all that it started; nothing if it has ended."""

    engine: str


NodeOrder: TypeAlias = Launch | Kill


class Joined(WireMessage, frozen=True):
    """The first report: the agent accepts orders."""

    pid: int


class Launched(WireMessage, frozen=True):
    """A process has started."""

    engine: str
    pid: int


class Exited(WireMessage, frozen=True):
    """A process and all that it started are gone, or it could not be started."""

    engine: str
    reason: str
    log: bytes
    """The end of its output."""


class Used(WireMessage, frozen=True):
    """What an engine's processes have used so far, at an interval."""

    engine: str
    cpu_s: float
    stopped: bool
    """Whether a signal or a debugger has stopped one of them."""


NodeReport: TypeAlias = Joined | Launched | Exited | Used
