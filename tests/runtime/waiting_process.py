"""An engine that waits, while it starts, for a thread that has died."""

import sys
import threading

from heddle_runtime.process import wire
from heddle_runtime.process.connection import connect
from heddle_runtime.process.fatal_error import fail_on_thread_death


def main() -> None:
    channel, _ = connect(int(sys.argv[1]), wire.Order, wire.Boot)
    listening = threading.Event()

    def listen() -> None:
        raise OSError("the port is taken")

    with fail_on_thread_death(channel):
        threading.Thread(target=listen).start()
        listening.wait()


if __name__ == "__main__":
    main()
