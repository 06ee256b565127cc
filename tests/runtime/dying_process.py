"""A process that sends many messages and its reason, and dies at once."""

import os
import signal
import socket
import sys

from heddle_runtime.process import wire
from heddle_runtime.process.wire import Channel
from tests.runtime.test_last_messages import MESSAGES


def main() -> None:
    channel: Channel[wire.Order] = Channel(socket.socket(fileno=int(sys.argv[1])), wire.Order)
    for version in range(MESSAGES):
        channel.send(wire.WeightsLoaded(version))
    channel.send(wire.Broken("out of memory"))
    assert not channel.clogged
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
