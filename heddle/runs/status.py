"""Why a run has no results."""

import os
import socket
from collections.abc import Mapping
from typing import Any


def why_unfinished(manifest: Mapping[str, Any]) -> str:
    """Return the status of an unfinished run, as the end of a sentence."""
    match manifest["status"]:
        case "running":
            here = manifest["host"].get("name") == socket.gethostname()
            if here and not _alive(manifest["pid"]):
                return "its process died before it finished"
            return "is still running, or its process died"
        case "interrupted":
            return "was interrupted before it finished"
        case _:
            return f"failed ({manifest['error']})"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
