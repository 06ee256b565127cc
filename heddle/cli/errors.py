"""Errors that a user can fix become one message and an exit status; bugs keep their traceback."""

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import rich_click as click
from click.exceptions import Exit

from heddle.packages import OUR_PACKAGES
from heddle.signals import Terminated
from heddle_compiled import DISTRIBUTION

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

RUN_FAILURES = (
    "MetricsError",
    "StuckError",
    "LedgerError",
    "WorkerError",
    "MeasureError",
    "TooManyFailuresError",
    "GatewayFailedError",
)
"""Errors of ours for failed runs, as opposed to wrong usage."""

_DISK = {
    errno.ENOSPC: "the disk is full: free some space, or choose another folder with --out",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another folder with --out",
    errno.EFBIG: "a file reached the largest size allowed: raise the limit (ulimit -f), or choose "
    "another folder with --out",
    errno.EIO: "the disk reports an error: choose another folder with --out",
}
_FOLDER = {
    errno.EROFS: "is on a read-only file system: choose another folder with --out",
    errno.EACCES: "permission denied: choose another folder with --out, or change its permissions",
    errno.EEXIST: "is there already, and is no folder: choose another with --out",
    errno.EPERM: "not permitted: choose another folder with --out, or change its permissions",
    errno.ENOTDIR: "part of this path is a file, not a folder",
    errno.ENAMETOOLONG: "this name is too long for the file system",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "is a folder, not a file",
    errno.ELOOP: "is a link that leads back to itself",
    errno.ENXIO: "is a pipe or a device that has no reader",
}


_EXTRAS = {
    "matplotlib": "figures",
    "plotly": "pages",
    "scipy": "calibrate",
    "pandas": "calibrate",
    "lightgbm": "predict",
    "httptools": "serve",
    "tokenizers": "tokens",
    "tiktoken": "tokens",
    "ray": "ray",
}
"""Packages that only some commands import, and the extra that has each."""


def encodable() -> None:
    """Let a stream that cannot show a character show "?", as a terminal under locale C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def exit_with_user_errors() -> Iterator[None]:
    """Print errors that the user can fix, and exit with their status; raise all others.

    Known are: ValueErrors that the packages define for bad input, failures of disk and folders,
    lack of memory, the keyboard interrupt, and signals that end a run.
    """
    try:
        yield
    except (click.ClickException, Exit, click.Abort):
        raise
    except Terminated as e:
        _end(f"Interrupted: {e}.", e, e.status)
    except KeyboardInterrupt as e:
        _end("Interrupted.", e, INTERRUPTED)
    except MemoryError as e:
        _end(
            "Error: not enough memory: replay fewer trajectories, or fewer runs at once (--jobs 1)",
            e,
            FAILED,
        )
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        if e.errno in _DISK:
            _end(f"Error: {where}{_DISK[e.errno]}", e, FAILED)
        if e.errno in _FOLDER:
            _end(f"Error: {where}{_FOLDER[e.errno]}", e, BAD_INPUT)
        raise
    except ModuleNotFoundError as e:
        extra = _EXTRAS.get((e.name or "").partition(".")[0])
        if extra is None:
            raise
        _end(
            f"Error: this needs {e.name}, which is not installed: "
            f"pip install '{DISTRIBUTION}[{extra}]'",
            e,
            BAD_INPUT,
        )
    except (ValueError, RuntimeError) as e:
        if type(e).__module__.partition(".")[0] not in OUR_PACKAGES:
            raise
        _end(f"Error: {e}", e, FAILED if type(e).__name__ in RUN_FAILURES else BAD_INPUT)


def _end(message: str, e: BaseException, status: int) -> NoReturn:
    # Plain text, not a drawn box: a message that is folded into a frame cannot be searched for.
    click.echo("\n".join([message, *getattr(e, "__notes__", [])]), err=True)
    sys.exit(status)
