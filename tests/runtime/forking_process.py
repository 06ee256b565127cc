"""An engine's process that forks a second one, as a tensor-parallel engine does."""

import os
import time

from heddle_runtime.process.wire import Channel, Order
from heddle_runtime.vllm.settings import VllmSettings
from tests.runtime import counting_process


def serve(
    core: counting_process.CountingCore, channel: Channel[Order], settings: VllmSettings
) -> None:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    counting_process.serve(core, channel, settings)


if __name__ == "__main__":
    counting_process.main(serve)
