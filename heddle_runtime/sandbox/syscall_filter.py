"""A seccomp filter: the system calls that a tool call may not make.

Needs no privilege, and works where namespaces are not permitted, such as in most containers. It
checks numbers and the lower half of the first argument only.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from heddle_runtime.sandbox.kernel import PR_SET_SECCOMP, SECCOMP_MODE_FILTER, numbers, prctl

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
    "msgget",
    "semget",
    "mq_open",
)
_ALONE: Final[Sequence[str]] = (
    "fork",
    "vfork",
    "tkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_open",
    "pidfd_send_signal",
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
)
"""Also refused where the process shares process ids and files with all others."""
_SELF_ONLY: Final[Sequence[str]] = ("kill", "tgkill", "prlimit64")
"""There, these may name only the process itself (0 too)."""

_NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags that clone takes."""
_THREAD = 0x00010000
"""CLONE_THREAD"""
_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""Numbers from here on are x86-64's second set of system calls."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
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
            yield _one(_EQUAL, of[name], no=5)
            yield _one(_LOAD, _FIRST_ARGUMENT)
            yield _one(_EQUAL, 0, yes=1)
            yield _one(_EQUAL, os.getpid(), no=1)
            yield _one(_RETURN, _ALLOW)
            yield _one(_RETURN, _DENY)
    yield _one(_EQUAL, of["clone"], no=5)
    yield _one(_LOAD, _FIRST_ARGUMENT)
    yield _one(_ANY_BIT, _NEW_NAMESPACES, yes=2)
    yield _one(_ANY_BIT, _THREAD, no=int(alone))
    yield _one(_RETURN, _ALLOW)
    yield _one(_RETURN, _DENY)
    yield _one(_RETURN, _ALLOW)


def _when(test: int, value: int, then: int) -> Iterator[bytes]:
    yield _one(test, value, no=1)
    yield _one(_RETURN, then)


def _one(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no`: instructions to skip when the test holds or fails."""
    return struct.pack("=HBBI", code, yes, no, value)
