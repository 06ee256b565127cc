"""The command `heddle`: it can be interrupted before the command line is imported."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Import and run the command line; Ctrl-C during the imports ends in one message."""
    try:
        from heddle.cli import main as command_line
        from heddle.signals import end_process_with_first
    except BaseException as error:
        if not _interrupted(error):
            raise
        sys.stderr.write("Interrupted.\n")
        sys.exit(INTERRUPTED)
    end_process_with_first()
    command_line(prog_name="heddle")


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is the cause: extension modules raise errors of their own for it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
