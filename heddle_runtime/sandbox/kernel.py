"""System calls that Python has no name for. Linux on x86-64 and ARM64 only.

Numbers and constants are those of the kernel's headers (asm/unistd_64.h, asm-generic/unistd.h,
linux/prctl.h, linux/capability.h).
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 22, 38, 36
SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522

_SHARED: Final[Mapping[str, int]] = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "clone3": 435,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
    "process_madvise": 440,
}
_X86_64: Final[Mapping[str, int]] = {
    **_SHARED,
    "ioctl": 16,
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "socket": 41,
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "kill": 62,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "fcntl": 72,
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "rt_sigqueueinfo": 129,
    "utime": 132,
    "setpriority": 141,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "pivot_root": 155,
    "prctl": 157,
    "chroot": 161,
    "mount": 165,
    "umount2": 166,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "tkill": 200,
    "sched_setaffinity": 203,
    "semtimedop": 220,
    "tgkill": 234,
    "utimes": 235,
    "mq_open": 240,
    "mq_unlink": 241,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "migrate_pages": 256,
    "fchownat": 260,
    "futimesat": 261,
    "inotify_add_watch": 254,
    "fchmodat": 268,
    "unshare": 272,
    "move_pages": 279,
    "utimensat": 280,
    "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298,
    "prlimit64": 302,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "sched_setattr": 314,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
}
_ARM64: Final[Mapping[str, int]] = {
    **_SHARED,
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "fcntl": 25,
    "ioctl": 29,
    "ioprio_set": 30,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "truncate": 45,
    "chroot": 51,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "utimensat": 88,
    "unshare": 97,
    "ptrace": 117,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "kill": 129,
    "tkill": 130,
    "tgkill": 131,
    "rt_sigqueueinfo": 138,
    "setpriority": 140,
    "prctl": 167,
    "mq_open": 180,
    "mq_unlink": 181,
    "msgget": 186,
    "msgctl": 187,
    "msgrcv": 188,
    "msgsnd": 189,
    "semget": 190,
    "semctl": 191,
    "semtimedop": 192,
    "semop": 193,
    "shmget": 194,
    "shmctl": 195,
    "shmat": 196,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "inotify_add_watch": 27,
    "keyctl": 219,
    "clone": 220,
    "migrate_pages": 238,
    "move_pages": 239,
    "rt_tgsigqueueinfo": 240,
    "perf_event_open": 241,
    "prlimit64": 261,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "sched_setattr": 274,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
}
_NUMBERS: Final[Mapping[str, Mapping[str, int]]] = {"x86_64": _X86_64, "aarch64": _ARM64}
"""ARM64 leaves out old calls, such as fork, for which its C library uses newer ones."""

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(Exception):
    """This machine does not permit a part of the isolation; the message says which and why."""


def numbers() -> Mapping[str, int]:
    """Return this machine's system call numbers, by name.

    Raises:
        IsolationError: not Linux, or an architecture without a table of numbers here.
    """
    system = os.uname()
    if system.sysname != "Linux" or system.machine not in _NUMBERS:
        raise IsolationError(
            f"{system.sysname} on {system.machine} is not supported, "
            "only Linux on x86_64 and aarch64"
        )
    return _NUMBERS[system.machine]


def call(name: str, *arguments: int | bytes | ctypes.Structure, about: str = "") -> int:
    """Make a system call; `about` is added to the message of its failure.

    Raises:
        IsolationError: the kernel refused.
    """
    passed = [
        ctypes.c_long(argument)
        if isinstance(argument, int)
        else ctypes.byref(argument)
        if isinstance(argument, ctypes.Structure)
        else ctypes.c_char_p(argument)
        for argument in arguments
    ]
    return checked(_libc.syscall(ctypes.c_long(numbers()[name]), *passed), f"{name} {about}")


def prctl(option: int, value: int, structure: ctypes.Structure | None = None) -> None:
    """Change an attribute of this process.

    Raises:
        IsolationError: the kernel refused.
    """
    third = ctypes.c_long(0) if structure is None else ctypes.byref(structure)
    zero = ctypes.c_long(0)
    checked(
        _libc.prctl(ctypes.c_long(option), ctypes.c_long(value), third, zero, zero),
        f"prctl {option}",
    )


def give_up_capabilities() -> None:
    """Drop all capabilities, also when this process runs as root.

    Raises:
        IsolationError: the kernel refused.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def checked(result: int, what: str) -> int:
    """Return `result`, or raise what the failed call left behind."""
    if result == -1:
        raise IsolationError(f"{what.strip()}: {os.strerror(ctypes.get_errno())}")
    return result
