"""An engine that never becomes ready; its rank has shared memory of the folder's name open."""

import mmap
import os
import sys
import time
from pathlib import Path

from heddle_runtime.process import wire
from heddle_runtime.process.connection import connect


def main() -> None:
    _, boot = connect(int(sys.argv[1]), wire.Order, wire.Boot)
    if os.fork() == 0:
        shared = Path("/dev/shm", f"vllm_{Path(boot.settings.model_dir).name}")
        shared.write_bytes(bytes(mmap.PAGESIZE))
        with shared.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            time.sleep(600)
    time.sleep(600)


if __name__ == "__main__":
    main()
