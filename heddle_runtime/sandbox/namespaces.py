"""Namespaces: a tool call's own users, files, processes, network and shared memory.

Needs no privilege where the kernel lets anybody make a user namespace. See namespaces(7),
user_namespaces(7), pivot_root(2) and mount_setattr(2).
"""

import os
import struct
from collections.abc import Sequence

from heddle_runtime.sandbox.kernel import FenceError, call

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

NOBODY = 65534
"""Whom a tool call runs as outside when root makes it: the kernel counts no processes of root."""
INSIDE = 1000
"""Its user and group inside; not 0, so that starting a program gives up every capability."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def enter() -> None:
    """Give this process namespaces of its own, but for its files; children get the processes.

    Raises:
        FenceError: not permitted here.
    """
    user, group, this = os.geteuid(), os.getegid(), os.getpid()
    told, tell = os.pipe()
    # Only a process outside may map more than its own user, and only root may do it.
    outside = os.fork()
    if outside == 0:
        status = 1
        try:
            os.close(tell)
            if os.read(told, 1):
                _map_users(this, user, group)
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    try:
        call("unshare", _NEW_USER | _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET)
        os.write(tell, b"x")
    finally:
        os.close(tell)
        _, status = os.waitpid(outside, 0)
    if status:
        raise FenceError(f"users of a new namespace cannot be mapped (user {user}, group {group})")


def _map_users(process: int, user: int, group: int) -> None:
    """Let the user be `INSIDE` there; or, for root, stay root and let nobody be `INSIDE`."""
    users = f"0 0 1\n{INSIDE} {NOBODY} 1\n" if user == 0 else f"{INSIDE} {user} 1\n"
    groups = f"0 {group} 1\n{INSIDE} {NOBODY} 1\n" if user == 0 else f"{INSIDE} {group} 1\n"
    for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def build_root(
    folder: str, *, shown: Sequence[str], source: bytes, disk_bytes: int, files: int
) -> None:
    """Make `folder` the root of a file system of its own, for this process and its children.

    In it are `shown` and a few devices, to be read; /call.py, which holds `source`; and the
    working folder /sandbox, the only one to be written, with room for `disk_bytes` and `files`.
    Nothing of it is seen outside, and it is gone with its last process.

    Raises:
        FenceError: not permitted here.
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
    """Become `INSIDE`, for good."""
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
    for device in _DEVICES:
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
