"""An engine's process that computes in silence while it loads weights, as compiling does."""

import time
from pathlib import Path

from heddle_runtime.process.wire import Channel, Order
from heddle_runtime.vllm.settings import VllmSettings
from tests.runtime import counting_process

SECONDS = "seconds"
"""A file in a folder of weights: how much CPU time their loading takes."""


class ComputingCore(counting_process.CountingCore):
    def load_weights(self, path: str, *, keep_kv: bool = False) -> None:
        until_s = time.process_time() + float(Path(path, SECONDS).read_text())
        while time.process_time() < until_s:
            pass
        super().load_weights(path, keep_kv=keep_kv)


def serve(
    core: counting_process.CountingCore, channel: Channel[Order], settings: VllmSettings
) -> None:
    counting_process.serve(ComputingCore(core.folder, core.weights), channel, settings)


if __name__ == "__main__":
    counting_process.main(serve)
