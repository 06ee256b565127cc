"""What a program can neither reach, read, change nor gain."""

import os
import socket
from pathlib import Path

import pytest

from tests.runtime.sandbox.programs import run


def test_nothing_listening_here_is_reached(mode, tmp_path):
    path = str(tmp_path / "s")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        local.bind(path)
        local.listen()
        udp.bind(("127.0.0.1", 0))
        source = f"""
            import socket
            for family, kind, address in (
                (socket.AF_INET, socket.SOCK_STREAM, {tcp.getsockname()!r}),
                (socket.AF_UNIX, socket.SOCK_STREAM, {path!r}),
                (socket.AF_INET, socket.SOCK_DGRAM, {udp.getsockname()!r}),
            ):
                try:
                    with socket.socket(family, kind) as s:
                        s.connect(address)
                        s.send(b"x")
                        print("out")
                except OSError as error:
                    print(type(error).__name__)
        """
        assert run(mode, source).stdout == "PermissionError\n" * 3
        for listening in (tcp, local):
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)


def test_our_files_can_neither_be_read_nor_changed(mode, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("keep")
    mine.chmod(0o640)
    times = os.stat(mine).st_mtime_ns
    source = f"""
        import os, shutil
        for act in (
            lambda: open("/etc/passwd").read(),
            lambda: open("/proc/self/environ").read(),
            lambda: os.listdir({str(Path.home())!r}).index("no such thing"),
            lambda: open({str(mine)!r}).read(),
            lambda: open({str(mine)!r}, "w"),
            lambda: os.truncate({str(mine)!r}, 0),
            lambda: os.remove({str(mine)!r}),
            lambda: os.rename({str(mine)!r}, "x"),
            lambda: os.link({str(mine)!r}, "x"),
            lambda: os.chmod({str(mine)!r}, 0o777),
            lambda: os.utime({str(mine)!r}, (0, 0)),
            lambda: os.chown({str(mine)!r}, os.getuid(), os.getgid()),
            lambda: shutil.rmtree({str(tmp_path)!r}),
            lambda: open(os.__file__, "a"),
            lambda: os.chmod(os.__file__, 0o777),
            lambda: open(__file__, "a"),
            lambda: open("/x", "w"),
            lambda: open({str(tmp_path / "new")!r}, "w"),
        ):
            try:
                print(act())
            except (OSError, ValueError):
                pass
    """
    done = run(mode, source)
    assert (done.status, done.stdout) == ("ok", ""), done
    assert mine.read_text() == "keep"
    assert (mine.stat().st_mode & 0o777, mine.stat().st_mtime_ns) == (0o640, times)
    assert list(tmp_path.iterdir()) == [mine]


def test_a_program_has_no_privileges_and_gets_none(mode):
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        new_user, new_net = 0x10000000, 0x40000000
        for name, *arguments in (
            ("unshare", new_user),
            ("unshare", new_net),
            ("setuid", 0),
            ("mount", b"tmpfs", b"/sandbox", b"tmpfs", 0, None),
            ("chroot", b"/sandbox"),
            ("ptrace", 0, 0, 0, 0),
            ("memfd_create", b"x", 0),
            ("shmget", 0, 4096, 0o1600),
            ("socket", 16, 3, 0),
        ):
            result = getattr(libc, name)(*arguments)
            if result != -1 and not (name == "setuid" and os.getuid() == 0):
                print(name, result)
        # The second set of numbers that x86-64 has; 41 is socket.
        if os.uname().machine == "x86_64":
            libc.syscall(0x40000000 + 41, 2, 1, 0)
            if ctypes.get_errno() != 1:
                print("x32", ctypes.get_errno())
    """
    done = run(mode, source)
    assert (done.status, done.stdout) == ("ok", "")


def test_limits_cannot_be_raised_again(mode):
    source = """
        import os, resource
        for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE"):
            number = getattr(resource, f"RLIMIT_{name}")
            soft, hard = resource.getrlimit(number)
            try:
                resource.setrlimit(number, (soft, hard + 1))
                print(name)
            except ValueError:
                pass
        for target in (os.getppid(), 1):
            try: print(resource.prlimit(target, resource.RLIMIT_CPU, (1, 1)))
            except OSError: pass
        try: print(os.nice(-1))
        except PermissionError: pass
    """
    done = run(mode, source)
    assert (done.status, done.stdout) == ("ok", "")


def test_other_processes_and_their_memory_are_out_of_sight(mode):
    source = f"""
        import os
        for path in ("/proc/{os.getpid()}/mem", "/proc/{os.getpid()}/environ", "/proc/1/cmdline"):
            try:
                print(open(path, "rb").read(1))
            except OSError:
                pass
    """
    assert run(mode, source).stdout == ""
