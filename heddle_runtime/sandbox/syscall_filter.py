"""A seccomp filter: the system calls that a tool call may not make.

Needs no privilege, and works where namespaces are not permitted, such as in most containers. It
checks numbers and the lower halves of arguments; the kernel reads no more of those that it checks.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from heddle_runtime.sandbox.kernel import (
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    SECCOMP_MODE_FILTER,
    numbers,
    prctl,
)

_NEVER: Final[Sequence[str]] = (
    # The network, and sockets of other programs on this machine.
    "socket",
    "io_uring_setup",
    # Memory of other processes.
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    # Privileges over mounts and namespaces, which a new namespace would give.
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "open_tree_attr",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "mount_setattr",
    "unshare",
    "setns",
    "open_by_handle_at",
    "name_to_handle_at",
    # Parts of the kernel that no computation needs.
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "keyctl",
    "add_key",
    "request_key",
    # Memory that no limit counts, or that outlives its process.
    "memfd_create",
    "memfd_secret",
    "shmget",
    "shmat",
    "shmctl",
    "msgget",
    "msgsnd",
    "msgrcv",
    "msgctl",
    "semget",
    "semop",
    "semtimedop",
    "semctl",
    "mq_open",
    "mq_unlink",
)
_ALONE: Final[Sequence[str]] = (
    "fork",
    "vfork",
    "tkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_open",
    "pidfd_send_signal",
    "migrate_pages",
    "move_pages",
    "process_madvise",
    # What Landlock does not see: lengths (when it is old), modes, owners, times and attributes.
    "truncate",
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "utime",
    "utimes",
    "futimesat",
    "utimensat",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "setxattrat",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
    "removexattrat",
    "file_setattr",
    # It reports what others do with files outside, which Landlock does not see either.
    "inotify_add_watch",
)
"""Also refused where the process shares process ids and files with all others."""
_SELF_ONLY: Final[Sequence[str]] = (
    "kill",
    "tgkill",
    "prlimit64",
    "sched_setparam",
    "sched_setscheduler",
    "sched_setaffinity",
    "sched_setattr",
)
"""There, these may name only the process itself (0 too)."""
_SELF_AS_SECOND: Final[Mapping[str, int]] = {"setpriority": 0, "ioprio_set": 1}
"""There, these must have this first argument (PRIO_PROCESS, IOPRIO_WHO_PROCESS), and the process
itself as second (0 too): neither a group of processes nor a user."""
_OPTIONS_REFUSED: Final[Mapping[str, tuple[int, Sequence[int]]]] = {
    # The kernel ends the program with the first process of its call: PR_SET_PDEATHSIG.
    "prctl": (0, (PR_SET_PDEATHSIG,)),
    # Signals to any process of the user: F_SETOWN, F_SETSIG, F_SETOWN_EX.
    "fcntl": (1, (8, 10, 15)),
    # The same: FIOSETOWN, SIOCSPGRP, FIOASYNC.
    # Attributes of readable files: FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY.
    "ioctl": (1, (0x8901, 0x8902, 0x5452, 0x40086602, 0x401C5820, 0x40806685)),
}
"""There: system calls, the position of their option, and the options that they may not have."""
_SETFL, _ASYNC = 4, 0o20000
"""fcntl's F_SETFL, whose flags may not have O_ASYNC there."""

_NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags that clone takes."""
_THREAD = 0x00010000
"""CLONE_THREAD"""
_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""Numbers from here on are x86-64's second set of system calls."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY, _ABSENT = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def apply(*, alone: bool) -> None:
    """Filter the system calls of this process and its descendants, permanently.

    `alone`: for a process without its own namespaces; it may start and signal no other process.

    Raises:
        IsolationError: no seccomp here.
    """

    code = b"".join(_program(alone))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _Program(len(code) // 8, code))


def _program(alone: bool) -> Iterator[bytes]:
    of = numbers()
    machine = os.uname().machine
    yield _one(_LOAD, _ARCHITECTURE)
    yield _one(_EQUAL, _AUDIT[machine], yes=1)
    yield _one(_RETURN, _KILL)  # another architecture's calls have other numbers
    yield _one(_LOAD, _NUMBER)
    if machine == "x86_64":
        yield from _when(_AT_LEAST, _X32, _DENY)
    for name in (*_NEVER, *(_ALONE if alone else ())):
        if name in of:
            yield from _when(_EQUAL, of[name], _DENY)
    # A filter cannot read its flags, which are in memory; C libraries then use clone.
    yield from _when(_EQUAL, of["clone3"], _ABSENT)
    if alone:
        for name in _SELF_ONLY:
            yield from _of(of[name], _this_process(0))
        for name, which in _SELF_AS_SECOND.items():
            first = [_one(_LOAD, _ARGUMENTS[0]), _one(_EQUAL, which, yes=1), _one(_RETURN, _DENY)]
            yield from _of(of[name], [*first, *_this_process(1)])
        for name, (position, options) in _OPTIONS_REFUSED.items():
            refused = [code for option in options for code in _when(_EQUAL, option, _DENY)]
            rest = _no_async() if name == "fcntl" else ()
            yield from _of(
                of[name],
                [_one(_LOAD, _ARGUMENTS[position]), *refused, *rest, _one(_RETURN, _ALLOW)],
            )
    yield _one(_EQUAL, of["clone"], no=5)
    yield _one(_LOAD, _ARGUMENTS[0])
    yield _one(_ANY_BIT, _NEW_NAMESPACES, yes=2)
    yield _one(_ANY_BIT, _THREAD, no=int(alone))
    yield _one(_RETURN, _ALLOW)
    yield _one(_RETURN, _DENY)
    yield _one(_RETURN, _ALLOW)


def _of(number: int, instructions: Sequence[bytes]) -> Iterator[bytes]:
    """For the system call with this number; they end with its answer."""
    yield _one(_EQUAL, number, no=len(instructions))
    yield from instructions


def _this_process(position: int) -> list[bytes]:
    """Allow 0 and this process's id in the argument at this position, and nothing else."""
    return [
        _one(_LOAD, _ARGUMENTS[position]),
        _one(_EQUAL, 0, yes=1),
        _one(_EQUAL, os.getpid(), no=1),
        _one(_RETURN, _ALLOW),
        _one(_RETURN, _DENY),
    ]


def _no_async() -> list[bytes]:
    """Refuse O_ASYNC where the option, which is loaded, is F_SETFL."""
    return [
        _one(_EQUAL, _SETFL, no=3),
        _one(_LOAD, _ARGUMENTS[2]),
        _one(_ANY_BIT, _ASYNC, no=1),
        _one(_RETURN, _DENY),
    ]


def _when(test: int, value: int, then: int) -> Iterator[bytes]:
    yield _one(test, value, no=1)
    yield _one(_RETURN, then)


def _one(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no`: instructions to skip when the test holds or fails."""
    return struct.pack("=HBBI", code, yes, no, value)
