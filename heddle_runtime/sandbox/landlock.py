"""Landlock: which files a process without namespaces can reach; newer kernels: which processes.

Needs no privilege. It does not hide that a file exists, nor its size, owner and times.
`syscall_filter` refuses changes that Landlock does not cover.
See https://docs.kernel.org/userspace-api/landlock.html.
"""

import os
import stat
import struct
from collections.abc import Iterable

from heddle_runtime.sandbox.kernel import call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ABI_1 = (1 << 13) - 1
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_PATH_BENEATH = 1
_VERSION = 1
_SCOPES_FROM = 6
"""The version of Landlock that has scopes."""
_SIGNAL_SCOPE = 2


def apply(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process and its descendants to these folders and files, permanently.

    Where the kernel has scopes (Linux 6.12), they also signal no process but each other.

    Needs `no_new_privs` to be set.

    Raises:
        IsolationError: no Landlock in this kernel (before 5.13, or not switched on).
    """
    version = call("landlock_create_ruleset", 0, 0, _VERSION, about="(is Landlock switched on?)")
    handled = _ABI_1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("=Q", handled)
    if version >= _SCOPES_FROM:  # files, ports (none of them handled), scopes
        attributes = struct.pack("=3Q", handled, 0, _SIGNAL_SCOPE)
    rules = call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(rules, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(rules, path, handled)
        call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        call("landlock_add_rule", rules, _PATH_BENEATH, rule, 0, about=path)
    finally:
        os.close(place)
