"""The command `heddle`: Ctrl-C ends it in one message, during its imports too."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED = 130


def main() -> None:
    """Import and run the command line; Ctrl-C at any moment ends in one message."""
    try:
        from heddle.signals import first_ends_process

        with first_ends_process():
            _command_line()(prog_name="heddle")
    except KeyboardInterrupt:
        # Most end inside the command line, which knows what to close; here, those around it.
        try:
            sys.stderr.write("Interrupted.\n")
        except OSError:  # a change of the stream was interrupted
            with suppress(OSError):
                os.write(2, b"Interrupted.\n")
        sys.exit(INTERRUPTED)


def _command_line() -> Callable[..., object]:
    try:
        from heddle.cli import main as command_line
    except BaseException as error:
        if not _interrupted(error):
            raise
        raise KeyboardInterrupt from error
    return command_line


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is the cause: extension modules raise errors of their own for it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
