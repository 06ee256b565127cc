"""Processes of a program: how many there may be, and that none outlives its call."""

import asyncio
import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from campaigns.processes import descendants
from heddle_runtime.sandbox.kernel import numbers
from heddle_runtime.sandbox.runner import Sandbox, SandboxLimits
from tests.runtime.sandbox.programs import REFUSED, SLEEPS, run, run_all, until_running

DAEMON = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    print("started")
"""


def test_a_daemon_ends_with_its_program(namespaces):
    done = run(namespaces, DAEMON, SandboxLimits(wall_s=60.0))
    assert (done.status, done.stdout) == ("ok", "started\n")
    assert done.wall_s < 60.0  # the daemon, which keeps the output open, is not waited for


def test_a_fork_bomb_stays_small_and_is_gone(namespaces):
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    count = """
        import os, time
        n = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
                n += 1
        except BlockingIOError:
            print(n)
    """
    assert run(namespaces, bomb, SandboxLimits(wall_s=1.0, processes=12)).status == "time"
    counted = run(namespaces, count, SandboxLimits(wall_s=20.0, processes=12))
    assert (counted.status, counted.stdout) == ("ok", "11\n")


def test_a_program_is_gone_before_its_result_is_there():
    if REFUSED["filter"]:
        pytest.skip(REFUSED["filter"])
    # It takes the kernel a while to free so much memory.
    source = """
        import os, time
        print(os.getpid(), flush=True)
        x = bytes(1) * (300 << 20)
        time.sleep(1000)
    """
    done = run("filter", source, SandboxLimits(wall_s=3.0))
    assert done.status == "time"
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_program_shares_no_namespace_with_heddle(namespaces):
    async def main() -> list[str]:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=namespaces) as sandbox:
            call = asyncio.create_task(sandbox.run(SLEEPS))
            program = (await until_running(before, 3))[-1]
            kinds = ["user", "net", "mnt", "pid", "ipc", "uts"]
            shared = [
                kind
                for kind in kinds
                if os.readlink(f"/proc/{program}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
            ]
            call.cancel()
            await asyncio.wait([call])
        return shared

    assert asyncio.run(main()) == []


def test_other_programs_can_be_started_where_processes_are_counted(namespaces):
    source = "import subprocess; print(subprocess.run(['/bin/echo', 'hi'], capture_output=True))"
    assert r"stdout=b'hi\n'" in run(namespaces, source).stdout


def test_without_namespaces_there_is_one_process():
    if REFUSED["filter"]:
        pytest.skip(REFUSED["filter"])
    sources = [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.system('/bin/true') and exit(1)",
    ]
    done = run_all("filter", *sources)
    assert [d.status for d in done] == ["error"] * 4
    assert all("PermissionError" in d.stderr for d in done[:3])
    threads = "import threading; t = threading.Thread(target=print, args=(1,)); t.start()"
    assert run("filter", threads).stdout == "1\n"


def test_a_program_that_kills_its_own_group_kills_itself_only(mode):
    done = run(mode, "import os; os.kill(0, 9)")
    assert (done.status, done.signal) == ("signal", "SIGKILL")


def test_no_signal_leaves_the_sandbox(mode):
    canary = subprocess.Popen(["sleep", "1000"])
    try:
        source = f"""
            import os, signal
            for target in (-1, {canary.pid}, {os.getpid()}, os.getppid(), -{canary.pid}):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    try: os.kill(target, number)
                    except OSError as error: pass
            try: os.killpg({os.getpgid(canary.pid)}, signal.SIGKILL)
            except OSError: pass
            print("alive")
        """
        assert run(mode, source).stdout == "alive\n"
        assert canary.poll() is None
    finally:
        canary.kill()
        canary.wait()


REACHING = """
    import ctypes, os, time
    libc = ctypes.CDLL(None, use_errno=True)
    number = NUMBERS
    read, write = os.pipe()
    pid = ctypes.byref(ctypes.c_int(CANARY))
    owner = ctypes.byref((ctypes.c_int * 2)(1, CANARY))
    zeros = ctypes.create_string_buffer(64)
    one = ctypes.byref(ctypes.c_ulong(1))
    for name, *arguments in (
        ("fcntl", read, 8, CANARY),
        ("fcntl", read, 8, -CANARY),
        ("fcntl", read, 15, owner),
        ("fcntl", read, 10, 9),
        ("fcntl", read, 4, 0o20000 | os.O_NONBLOCK),
        ("ioctl", read, 0x8901, pid),
        ("ioctl", read, 0x8902, pid),
        ("ioctl", read, 0x5452, pid),
        ("setpriority", 0, CANARY, 19),
        ("setpriority", 1, 0, 19),
        ("setpriority", 2, 0, 19),
        ("sched_setaffinity", CANARY, 8, one),
        ("sched_setscheduler", CANARY, 3, zeros),
        ("sched_setparam", CANARY, zeros),
        ("sched_setattr", CANARY, zeros, 0),
        ("ioprio_set", 1, CANARY, 3 << 13),
        ("ioprio_set", 2, 0, 3 << 13),
        ("ioprio_set", 3, 0, 3 << 13),
        ("migrate_pages", CANARY, 8, one, one),
        ("move_pages", CANARY, 0, None, None, None, 0),
        ("shmctl", SEGMENT, 0, None),
        ("shmat", SEGMENT, None, 0),
        ("prctl", 1, 0),
        ("inotify_add_watch", 0, b"/", 0xfff),
    ):
        ctypes.set_errno(0)
        if libc.syscall(number[name], *arguments) != -1 or ctypes.get_errno() != 1:
            print(name, *arguments[:2], ctypes.get_errno())
    os.write(write, b"x")
    # What a program may do to itself.
    os.nice(1), os.sched_setaffinity(0, os.sched_getaffinity(0)), os.set_blocking(read, False)
    libc.prctl(15, b"name", 0, 0, 0)
    print("done", os.read(read, 1))
"""


def test_a_program_without_namespaces_reaches_no_other_process_of_its_user():
    if REFUSED["filter"]:
        pytest.skip(REFUSED["filter"])
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o1600)
    canary = subprocess.Popen(["sleep", "1000"])
    try:
        source = REACHING.replace("CANARY", str(canary.pid)).replace("SEGMENT", str(segment))
        before = os.sched_getaffinity(canary.pid), os.getpriority(os.PRIO_PROCESS, canary.pid)
        done = run("filter", source.replace("NUMBERS", repr(dict(numbers()))))
        assert (done.stdout, done.stderr, done.status) == ("done b'x'\n", "", "ok")
        assert canary.poll() is None
        after = os.sched_getaffinity(canary.pid), os.getpriority(os.PRIO_PROCESS, canary.pid)
        assert after == before
    finally:
        canary.kill()
        canary.wait()
        assert libc.shmctl(segment, 0, None) == 0


def test_a_program_cannot_outlive_its_call_by_killing_its_first_process():
    if REFUSED["filter"]:
        pytest.skip(REFUSED["filter"])
    source = """
        import ctypes, os, time
        libc = ctypes.CDLL(None)
        libc.prctl(1, 0, 0, 0, 0)
        read, write = os.pipe()
        for command, value in ((8, os.getppid()), (10, 9), (4, 0o20000)):
            libc.fcntl(read, command, value)
        os.write(write, b"x")
        time.sleep(1000)
    """
    done = run("filter", source, SandboxLimits(wall_s=2.0))
    assert done.status == "time"


def in_a_process(code: str) -> str:
    """What code prints that changes the process it runs in for good."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_supervisor_ends_a_program_that_outlives_the_first_process():
    code = """
        import os, time
        from heddle_runtime.sandbox.kernel import PR_SET_CHILD_SUBREAPER, prctl
        from heddle_runtime.sandbox.supervisor import _end_all
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        read, write = os.pipe()
        if (first := os.fork()) == 0:
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                time.sleep(1000)
            time.sleep(1000)
        program = int(os.read(read, 20))
        _end_all(first)
        print([os.path.exists(f"/proc/{pid}") for pid in (first, program)])
    """
    assert in_a_process(code) == "[False, False]\n"


def test_landlock_alone_keeps_signals_in_where_it_has_scopes():
    query_version = (444, None, 0, 1)  # landlock_create_ruleset
    if ctypes.CDLL(None).syscall(*query_version) < 6:
        pytest.skip("this kernel's Landlock has no scopes")
    code = """
        import os
        from heddle_runtime.sandbox import landlock
        from heddle_runtime.sandbox.kernel import PR_SET_NO_NEW_PRIVS, prctl
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.kill(os.getppid(), 0)
        landlock.apply(readable=[], writable=[])
        os.kill(os.getpid(), 0)
        try:
            os.kill(os.getppid(), 0)
        except PermissionError:
            print("refused")
    """
    assert in_a_process(code) == "refused\n"
