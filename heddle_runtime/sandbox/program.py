"""Inside the sandbox: the first process, which waits, and the program that it starts."""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, TypedDict

from heddle_runtime.sandbox import landlock, namespaces, syscall_filter
from heddle_runtime.sandbox.kernel import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    IsolationError,
    give_up_capabilities,
    prctl,
)


class ProgramRequest(TypedDict):
    """A program and its limits; `heddle_runtime.sandbox.runner` explains each."""

    source: str
    mode: str
    folder: str
    """With namespaces, an empty one that all calls share; without them, one for this call."""
    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    disk_bytes: int
    files: int
    open_files: int
    processes: int
    output_bytes: int


_READABLE: Final[Sequence[str]] = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/etc/ld.so.cache",
    "/nix/store",
)
"""Beside the interpreter's own folders: where systems keep programs and shared libraries."""
_FLAGS: Final[Sequence[str]] = ("-s", "-S", "-P", "-B", "-u", "-X", "utf8")
"""Standard library only, nothing from or beside the script's folder, output at once, UTF-8."""
_LEEWAY_S = 5.0


def run_first_process(request: ProgramRequest, out: int, err: int, status: int) -> NoReturn:
    """Start the program, wait for its end, and write how it ended to the pipe `status`."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Either ends this process: the death of the supervisor, or the alarm.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"] + _LEEWAY_S)
        root = _prepare(request)
        this = os.getpid()
        program = os.fork()
        if program == 0:
            _start_program(request, root, this, (out, err, status))
        for pipe in (out, err):
            os.close(pipe)
        while True:
            process, wait_status, used = os.wait4(-1, 0)
            if process == program:
                break
        _report(status, wait_status=wait_status, cpu_s=used.ru_utime + used.ru_stime)
    except BaseException as error:
        _report(status, refused=_message(error))
    finally:
        os._exit(0)


def _prepare(request: ProgramRequest) -> str:
    """Create the files; return the real path of the folder that holds /call.py and /sandbox."""
    source = request["source"].encode("utf-8", "surrogatepass")
    if request["mode"] == "namespaces":
        namespaces.build_root(
            request["folder"],
            shown=_readable(),
            source=source,
            disk_bytes=request["disk_bytes"],
            files=request["files"],
        )
        return ""
    root = request["folder"]
    with open(f"{root}/call.py", "wb") as file:
        file.write(source)
    os.mkdir(f"{root}/sandbox", 0o700)
    os.chdir(f"{root}/sandbox")
    return root


def _readable() -> list[str]:
    interpreter = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(_interpreter())]
    return [*_READABLE, *(os.path.realpath(path) for path in interpreter)]


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _start_program(
    request: ProgramRequest, root: str, parent: int, pipes: tuple[int, int, int]
) -> NoReturn:
    try:
        _become_program(request, root, parent, pipes)
    except BaseException as error:
        _report(pipes[2], refused=_message(error))
    finally:
        os._exit(1)


def _become_program(
    request: ProgramRequest, root: str, parent: int, pipes: tuple[int, int, int]
) -> None:
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDONLY)
    for number, pipe in enumerate((nothing, pipes[0], pipes[1])):
        os.dup2(pipe, number)
    for changed in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM):
        signal.signal(changed, signal.SIG_DFL)
    alone = request["mode"] != "namespaces"
    _limit(request, alone)
    if not alone:
        namespaces.become_inside()
    give_up_capabilities()
    # After all changes of user and rights, which would reset it.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before this call
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    home = f"{root}/sandbox"
    script = f"{root}/call.py"
    if alone:
        landlock.apply(readable=[*_readable(), script], writable=[home, *namespaces.DEVICES])
    syscall_filter.apply(alone=alone)
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        # Sets have the same order each time, so equal programs give equal observations.
        "PYTHONHASHSEED": "0",
        # Otherwise each thread reserves 64 MiB of the memory limit.
        "MALLOC_ARENA_MAX": "1",
    }
    os.execve(_interpreter(), [_interpreter(), *_FLAGS, script], environment)


def _limit(request: ProgramRequest, alone: bool) -> None:
    cpu_s = request["cpu_s"]
    _lower(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    _lower(resource.RLIMIT_AS, request["memory_bytes"])
    _lower(resource.RLIMIT_FSIZE, request["file_bytes"])
    _lower(resource.RLIMIT_NOFILE, request["open_files"])
    _lower(resource.RLIMIT_CORE, 0)
    if not alone:  # otherwise it counts all processes of the user, engines included
        ours = 2 if os.getuid() == namespaces.INSIDE else 0
        _lower(resource.RLIMIT_NPROC, request["processes"] + ours)


def _lower(what: int, soft: int, hard: int | None = None) -> None:
    """Set a limit, or keep a stricter one."""
    _, highest = resource.getrlimit(what)
    values = [
        value if highest == resource.RLIM_INFINITY else min(value, highest)
        for value in (soft, soft if hard is None else hard)
    ]
    resource.setrlimit(what, (values[0], values[1]))


def _report(status: int, **fields: str | int | float) -> None:
    os.write(status, json.dumps(fields).encode() + b"\n")


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, IsolationError) else f"{type(error).__name__}: {error}"
