"""Processes of a program: how many there may be, and that none outlives its call."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from heddle_runtime.sandbox.runner import Sandbox, SandboxLimits
from tests.runtime.processes import descendants
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
