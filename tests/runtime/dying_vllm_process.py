"""A vLLM engine's process that is killed in its first steps, however slow its driver is.

Where there is a file that the environment variable `DIES` names, it is removed, and the process
ends by SIGKILL as soon as it has reported tokens of a step that goes on.
"""

import os
import signal
import sys
from pathlib import Path

from heddle_runtime.process import loop
from heddle_runtime.vllm.process import main

DIES = "HEDDLE_TEST_ENGINE_DIES"


class DyingLoop(loop.EngineLoop):
    """Ends its process after a report."""

    def _report(self) -> None:
        super()._report()
        dies = Path(os.environ[DIES])
        if dies.exists() and any(job.reported_tokens for job in self._jobs.values()):
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    loop.EngineLoop = DyingLoop  # type: ignore[misc]
    main(sys.argv[1:])
    os._exit(0)
