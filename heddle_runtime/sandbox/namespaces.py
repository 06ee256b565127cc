"""Namespaces: a tool call's own users, files, processes, network and shared memory.

Needs no privilege where the kernel permits unprivileged user namespaces. See namespaces(7),
user_namespaces(7), pivot_root(2) and mount_setattr(2).
"""

import os
import struct
from collections.abc import Sequence

from heddle_runtime.sandbox.kernel import IsolationError, call

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

UNPRIVILEGED_ID = 65534
"""Outside user of a tool call that root starts: the kernel does not count root's processes."""
INSIDE = 1000
"""Its user and group inside; not 0, so that starting a program drops every capability."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def enter() -> None:
    """Move this process to new namespaces, except that of files; children get the new process ids.

    Raises:
        IsolationError: not permitted here.
    """
    user, group, this = os.geteuid(), os.getegid(), os.getpid()
    unshared, signal_unshared = os.pipe()
    # Only a process outside may map more than its own user, and only root may do it.
    outside = os.fork()
    if outside == 0:
        status = 1
        try:
            os.close(signal_unshared)
            if os.read(unshared, 1):
                _map_users(this, user, group)
            status = 0
        finally:
            os._exit(status)
    os.close(unshared)
    try:
        call("unshare", _NEW_USER | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET)
        os.write(signal_unshared, b"x")
    finally:
        os.close(signal_unshared)
        _, status = os.waitpid(outside, 0)
    if status:
        raise IsolationError(
            f"users of a new namespace cannot be mapped (user {user}, group {group})"
        )


def _map_users(process: int, user: int, group: int) -> None:
    """Map the user to `INSIDE`; root stays root, and `UNPRIVILEGED_ID` becomes `INSIDE`."""
    users = f"0 0 1\n{INSIDE} {UNPRIVILEGED_ID} 1\n" if user == 0 else f"{INSIDE} {user} 1\n"
    groups = (
        f"0 {group} 1\n{INSIDE} {UNPRIVILEGED_ID} 1\n" if user == 0 else f"{INSIDE} {group} 1\n"
    )
    for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def build_root(
    folder: str, *, shown: Sequence[str], source: bytes, disk_bytes: int, files: int
) -> None:
    """Make `folder` the root of a file system of its own, for this process and its children.

    It has `shown` and a few devices, read-only; /call.py with `source`; and the only writable
    folder, /sandbox, limited to `disk_bytes` and `files`. It is invisible outside and disappears
    with its last process.

    Raises:
        IsolationError: not permitted here.
    """
    call("unshare", _NEW_NS)
    call("mount", b"none", b"/", 0, _MS_REC | _MS_PRIVATE, 0)
    _mount_tmpfs(folder, f"mode=755,size={len(source) + (1 << 20)}")
    _lay_out(folder, shown)
    with open(f"{folder}/call.py", "wb") as file:
        file.write(source)
    os.mkdir(f"{folder}/sandbox")
    owner = f"uid={INSIDE},gid={INSIDE}"
    _mount_tmpfs(f"{folder}/sandbox", f"mode=700,size={disk_bytes},nr_inodes={files + 1},{owner}")
    os.chdir(folder)
    call("pivot_root", b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/sandbox")
    _restrict("/", _ATTR_RDONLY, recursive=False)


def become_inside() -> None:
    """Become user and group `INSIDE`, permanently."""
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)


def _lay_out(folder: str, shown: Sequence[str]) -> None:
    done: list[str] = []
    for path in sorted(dict.fromkeys(shown), key=len):
        if not os.path.lexists(path) or any(path.startswith(f"{above}/") for above in done):
            continue
        os.makedirs(os.path.dirname(folder + path), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), folder + path)
        else:
            _bind(path, folder + path)
            _restrict(folder + path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, recursive=True)
            done.append(path)
    os.mkdir(f"{folder}/dev")
    for device in DEVICES:
        if os.path.exists(device):
            _bind(device, folder + device)


def _bind(path: str, place: str) -> None:
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        with open(place, "xb"):
            pass
    call("mount", os.fsencode(path), os.fsencode(place), 0, _MS_BIND | _MS_REC, 0, about=path)


def _mount_tmpfs(place: str, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", flags, options.encode(), about="tmpfs")


def _restrict(place: str, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("=4Q", attributes, 0, 0, 0)
    call(
        "mount_setattr",
        _AT_FDCWD,
        os.fsencode(place),
        _AT_RECURSIVE if recursive else 0,
        wanted,
        len(wanted),
        about=place,
    )
