"""The campaign `fuzz`: one command on damaged input a case."""

import os
import resource
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir
from functools import lru_cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final, NoReturn
from unittest.mock import patch

import msgspec
from click.testing import CliRunner, Result

from campaigns.campaign import Failure, Outcome
from campaigns.fuzz.commands import LOG, NO_UTF8, OUTPUTS, TEMPLATES, any_options
from campaigns.fuzz.edits import Edit, any_edit
from campaigns.fuzz.folder import Workplace
from campaigns.fuzz.inputs import originals
from heddle.cli import main

MOST_CPU_S: Final = 5.0
MOST_MIB: Final = 768
"""Beyond what the process held before the command."""
ENDED_AFTER_S: Final = 20.0
"""CPU seconds after which a case is ended."""
MOST_ADDRESSES: Final = 16 << 30
"""Bytes of address space, so that a case that wants all memory fails alone."""


class HangError(BaseException):
    """A command that takes too much CPU time; no handler of errors takes it for an error."""


class FuzzCase(msgspec.Struct, frozen=True, kw_only=True):
    """A command line, in a folder that has the originals with these changes."""

    arguments: tuple[str, ...]
    edits: tuple[Edit, ...] = ()


class Fuzz:
    """Damaged files and odd options, in this process."""

    name = "fuzz"
    unit = "inputs"
    tolerated = 0.0
    saves = True
    most_wall_s = 120.0
    case_type = FuzzCase

    def begin(self, folder: str) -> None:
        """Limit memory."""
        tempfile.tempdir = folder
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, most))

    def case(self, rng: Random) -> FuzzCase:
        if rng.random() < 0.25:
            return FuzzCase(arguments=any_options(rng))
        (template,) = rng.choices(TEMPLATES, weights=[t.weight for t in TEMPLATES])
        files = originals()
        names = [n for n in files if n.partition("/")[0] in template.files]
        arguments = template.arguments
        if LOG in arguments:
            names = [rng.choice(names)]
            arguments = tuple(names[0] if a == LOG else a for a in arguments)
        edits = []
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            name = rng.choice(names)
            edits.append(any_edit(rng, name, len(files[name])))
        return FuzzCase(arguments=arguments, edits=tuple(edits))

    def run(self, case: FuzzCase) -> Outcome:
        """Run the command in the folder of this process."""
        place = workplace_of(os.getpid())
        with chdir(place.folder):
            place.damage(case.edits)
            _reset_peak()
            held = peak_mib()
            begun_s = time.process_time()
            try:
                result = _limited(case.arguments)
            except HangError as error:
                return Outcome(Failure(f"hang {' '.join(case.arguments[:2])}", str(error)))
            finally:
                used_s = time.process_time() - begun_s
                written = [name for name in OUTPUTS if Path(name).exists()]
                place.restore()
            peak = peak_mib() - held
            failure = judged(case, result, used_s, peak, written)
            return Outcome(failure, {f"status {result.exit_code}": 1, "peak MiB": peak})

    def smaller(self, case: FuzzCase) -> Iterator[FuzzCase]:
        """Fewer changes, then fewer options."""
        for i in range(len(case.edits)):
            yield msgspec.structs.replace(case, edits=case.edits[:i] + case.edits[i + 1 :])
        for i in range(2, len(case.arguments)):
            arguments = case.arguments[:i] + case.arguments[i + 1 :]
            yield msgspec.structs.replace(case, arguments=arguments)


@lru_cache
def workplace_of(process: int) -> Workplace:
    """Make the folder of a process."""
    return Workplace()


def judged(
    case: FuzzCase, result: Result, used_s: float, peak: int, written: list[str]
) -> Failure | None:
    """Return what a command did that it must not do.

    `peak` counts MiB beyond what the process held before; `written` are outputs that it left.
    """
    command = " ".join(case.arguments[:2])
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]} {frame.name}"
        text = "".join(traceback.format_exception(error)[-4:])
        return Failure(f"traceback {type(error).__name__} {place}", text)
    if result.exit_code not in (0, 1, 2):
        return Failure(f"status {result.exit_code} {command}", result.output)
    if "Traceback (most recent" in result.output:
        return Failure(f"printed traceback {command}", result.output)
    if result.exit_code and not (result.stderr.strip() or result.stdout.strip()):
        return Failure(f"no message {command}", f"status {result.exit_code}, and no word")
    if result.exit_code == 2 and written:
        return Failure(f"half-written {command}", f"refused, but {written} is there")
    if used_s > MOST_CPU_S:
        return Failure(f"slow {command}", f"{used_s:.1f} CPU seconds")
    if peak > MOST_MIB:
        return Failure(f"memory {command}", f"{peak:,} MiB")
    return None


def _limited(arguments: tuple[str, ...]) -> Result:
    """Run a command without a network, its CPU time limited."""

    def ended(number: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-3:])
        raise HangError(f"more than {ENDED_AFTER_S:.0f} CPU seconds, at\n{where}")

    given = ["\udcff" if argument == NO_UTF8 else argument for argument in arguments]
    handler = signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, ENDED_AFTER_S)
    try:
        with patch.object(socket.socket, "connect", _refused):
            return CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(main, given)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)


def _refused(*arguments: object) -> NoReturn:
    raise OSError("no network")


def _reset_peak() -> None:
    """Count peak memory from here on, where Linux permits it."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_mib() -> int:
    """Peak resident memory since the last reset."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) >> 10
