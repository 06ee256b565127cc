"""Programs of every kind, run in the sandbox in each mode that this machine permits."""

import asyncio
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from heddle_runtime.sandbox import kernel
from heddle_runtime.sandbox import runner as module
from heddle_runtime.sandbox.remove import remove_folder
from heddle_runtime.sandbox.runner import (
    IsolationMode,
    Sandbox,
    SandboxError,
    SandboxLimitError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
)
from tests.runtime.processes import descendants, wait_until_gone

QUICK = SandboxLimits(wall_s=20.0)
"""Far more than any program here needs that is not meant to be cut."""


async def _all(
    mode: IsolationMode, limits: SandboxLimits, sources: tuple[str, ...]
) -> list[SandboxResult]:
    async with Sandbox(limits, mode=mode) as sandbox:
        return await asyncio.gather(*(sandbox.run(textwrap.dedent(s)) for s in sources))


def run_all(
    mode: IsolationMode, *sources: str, limits: SandboxLimits = QUICK
) -> list[SandboxResult]:
    return asyncio.run(_all(mode, limits, sources))


def run(mode: IsolationMode, source: str, limits: SandboxLimits = QUICK) -> SandboxResult:
    return run_all(mode, source, limits=limits)[0]


def _permitted(mode: IsolationMode) -> str:
    """Why a mode is not to be had here; "" when it is."""
    try:
        run_all(mode)
    except SandboxUnavailableError as error:
        return str(error)
    return ""


REFUSED = {mode: _permitted(mode) for mode in ("namespaces", "filter")}


@pytest.fixture(params=["namespaces", "filter"])
def mode(request: pytest.FixtureRequest) -> IsolationMode:
    if REFUSED[request.param]:
        pytest.skip(REFUSED[request.param])
    return request.param


@pytest.fixture
def namespaces() -> IsolationMode:
    if REFUSED["namespaces"]:
        pytest.skip(REFUSED["namespaces"])
    return "namespaces"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = descendants()
    yield
    assert [p for p in descendants() if p not in before] == []


def test_a_mode_is_refused_only_where_the_machine_refuses_it():
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    command = [shutil.which("unshare") or "false", "-r", "-n", "-m", "-p", "-f", "true"]
    permitted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if permitted and release >= (5, 14):
        assert REFUSED["namespaces"] == ""
    query_version = (444, None, 0, 1)  # landlock_create_ruleset
    if sys.platform == "linux" and ctypes.CDLL(None).syscall(*query_version) >= 1:
        assert REFUSED["filter"] == ""


# -- ordinary programs -----------------------------------------------------------------------------


def test_a_result_has_what_a_program_printed_and_how_it_ended(mode):
    done = run(mode, "import sys; print('héddle ⇒ 1'); print('oops', file=sys.stderr); sys.exit(3)")
    assert (done.status, done.ok, done.exit_code, done.signal) == ("error", False, 3, "")
    assert (done.stdout, done.stderr) == ("héddle ⇒ 1\n", "oops\n")
    fine = run(mode, "")
    assert (fine.status, fine.ok, fine.exit_code, fine.stdout) == ("ok", True, 0, "")


def test_an_exception_is_reported_with_its_line(mode):
    done = run(mode, "x = 1\nx / 0\n")
    assert done.status == "error"
    assert 'File "/call.py", line 2' in done.stderr
    assert "x / 0" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a = ", "SyntaxError"),
        ("print('\ud800')", "SyntaxError"),
        ("# coding: no-such-thing\n", "SyntaxError"),
        ("if x:\nprint(1)", "IndentationError"),
        ("(" * 5000, "Error"),
        ("raise SystemExit('sorry')", "sorry"),
    ],
)
def test_what_is_no_program_fails_like_one(mode, source, said):
    done = run(mode, source)
    assert done.status == "error"
    assert said in done.stderr


def test_a_nul_byte_reaches_the_interpreter(mode):
    done = run(mode, "print(1)\nx\0 = 2\n")
    assert done.status in ("ok", "error")  # as releases differ
    assert done.status == "ok" or "null bytes" in done.stderr


def test_bytes_that_are_no_text_are_replaced(mode):
    done = run(mode, r"import sys; sys.stdout.buffer.write(b'a\xff\x00\xe2\x82')")
    assert done.stdout == "a\ufffd\x00\ufffd"


def test_a_program_of_a_megabyte_runs(mode):
    done = run(mode, f"x = '{'é' * 500_000}'\nprint(len(x))")
    assert done.stdout == "500000\n"


def test_a_program_killed_by_a_signal_says_which(mode):
    done = run(mode, "import os; print('now', flush=True); os.kill(os.getpid(), 11)")
    assert (done.status, done.signal, done.exit_code) == ("signal", "SIGSEGV", None)
    assert done.stdout == "now\n"
    assert run(mode, "import os; os.abort()").signal == "SIGABRT"
    real_time = run(mode, "import os; os.kill(os.getpid(), 40)")
    assert (real_time.status, real_time.signal) == ("signal", "signal 40")


def test_equal_programs_give_equal_results(mode):
    source = """
        import os, sys
        print(os.getcwd(), __file__, os.listdir(), sorted(os.environ), sys.argv)
        print({str(i) for i in range(50)}, hash("x"))
        raise KeyError(os.path.abspath("x"))
    """
    one, other = run_all(mode, source, source)
    assert (one.stdout, one.stderr) == (other.stdout, other.stderr)
    assert one.stdout.startswith("/sandbox /call.py [] ")


def test_a_program_has_the_standard_library_only(mode):
    done = run(mode, "import json, decimal, sqlite3, heddle_runtime")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'heddle_runtime'\n")
    assert "No module named 'numpy'" in run(mode, "import numpy").stderr


def test_a_program_has_no_input_and_nothing_of_our_environment(mode, monkeypatch):
    monkeypatch.setenv("HEDDLE_SECRET", "do not tell")
    assert "EOFError" in run(mode, "input()").stderr
    environment = run(mode, "import os; print(dict(os.environ))").stdout
    assert "HEDDLE_SECRET" not in environment
    assert "'HOME': '/sandbox'" in environment


def test_its_folder_is_empty_and_shared_with_no_other_program(mode):
    source = """
        import os, tempfile, time
        print(os.listdir())
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("x" * 10)
        os.mkdir("a"), os.symlink("a", "b")
        time.sleep(0.2)
        print(len(os.listdir()), os.path.dirname(file.name) == os.getcwd())
    """
    assert [d.stdout for d in run_all(mode, source, source, source)] == ["[]\n3 True\n"] * 3


def test_sixty_four_at_once(mode):
    done = run_all(mode, *(f"print({i} * {i})" for i in range(64)))
    assert [d.stdout for d in done] == [f"{i * i}\n" for i in range(64)]


def test_programs_beyond_the_limit_wait_their_time_uncounted(mode):
    async def main() -> list[SandboxResult]:
        limits = SandboxLimits(wall_s=20.0)
        async with Sandbox(limits, mode=mode, max_running=1) as sandbox:
            source = "import time; time.sleep(0.1); print(time.monotonic())"
            return await asyncio.gather(*(sandbox.run(source) for _ in range(4)))

    done = asyncio.run(main())
    ends = [float(d.stdout) for d in done]
    assert all(later - sooner >= 0.1 for sooner, later in pairwise(ends))


# -- limits ----------------------------------------------------------------------------------------


def test_a_program_that_hangs_is_cut_and_what_it_said_is_kept(mode):
    limits = SandboxLimits(wall_s=3.0)
    done = run(mode, "import time; print('before'); time.sleep(1000); print('after')", limits)
    assert (done.status, done.exit_code, done.stdout) == ("time", None, "before\n")
    assert 3.0 <= done.wall_s < 100.0


def test_no_way_of_hanging_helps(mode):
    ignoring_signals = """
        import signal, time
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        time.sleep(1000)
    """
    clinging = """
        import time
        try:
            time.sleep(1000)
        finally:
            while True: pass
    """
    sources = (
        ignoring_signals,
        clinging,
        "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time; os.close(1); os.close(2); time.sleep(1000)",
        "import os; r, w = os.pipe(); os.read(r, 1)",
    )
    done = run_all(mode, *sources, limits=SandboxLimits(wall_s=2.0))
    assert [d.status for d in done] == ["time"] * 6


def test_a_busy_program_is_cut_at_its_cpu_limit(mode):
    limits = SandboxLimits(cpu_s=1, wall_s=60.0)
    stubborn = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    done = run_all(mode, "while True: pass", stubborn, limits=limits)
    assert [d.status for d in done] == ["cpu", "cpu"]


def test_endless_output_is_cut(mode):
    limits = SandboxLimits(wall_s=60.0, output_bytes=1000)
    out, err, late = run_all(
        mode,
        "while True: print('x' * 99)",
        "import sys\nwhile True: sys.stderr.write('y' * 100)",
        "print('z' * 2000)",
        limits=limits,
    )
    assert (out.status, len(out.stdout), out.stderr) == ("output", 1000, "")
    assert (err.status, len(err.stderr), err.stdout) == ("output", 1000, "")
    assert (late.status, late.stdout) == ("output", "z" * 1000)
    assert run(mode, "print('z' * 999)", limits).status == "ok"


def test_a_memory_hog_gets_no_more(mode):
    limits = SandboxLimits(memory_bytes=128 << 20)
    done = run(mode, "x = []\nwhile True: x.append(bytearray(1 << 20))", limits)
    assert done.status == "error"
    assert "MemoryError" in done.stderr


def test_a_file_is_cut_and_no_more_are_opened_than_allowed(mode):
    limits = SandboxLimits(file_bytes=100_000, open_files=20)
    big, many = run_all(
        mode,
        "import os\nf = open('x', 'wb')\ntry:\n while True: f.write(b'x' * 4096); f.flush()\n"
        "except OSError as e: print(e.errno, os.stat('x').st_size)",
        "kept = []\ntry:\n while True: kept.append(open('/dev/null'))\n"
        "except OSError as e: print(e.errno, len(kept) < 20)",
        limits=limits,
    )
    assert big.stdout == "27 100000\n"
    assert many.stdout == "24 True\n"


def test_files_are_counted_and_so_is_their_size(namespaces):
    limits = SandboxLimits(files=50, disk_bytes=1 << 20, file_bytes=1 << 19)
    count, size = run_all(
        namespaces,
        "n = 0\ntry:\n while True: open(f'{n}', 'w').close(); n += 1\n"
        "except OSError as e: print(e.errno, n)",
        "n = 0\ntry:\n"
        " while True: open(f'{n}', 'wb').write(b'x' * 100_000); n += 1\n"
        "except OSError as e: print(e.errno, n)",
        limits=limits,
    )
    assert count.stdout == "28 50\n"
    assert size.stdout == "28 10\n"


# -- processes -------------------------------------------------------------------------------------


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
            program = (await _until_running(before, 3))[-1]
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


# -- what is kept out ------------------------------------------------------------------------------


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


# -- the ends of a call ----------------------------------------------------------------------------


SLEEPS = "import time; print('x', flush=True); time.sleep(1000)"


async def _until_running(before: list[int], least: int) -> list[int]:
    """Wait until a program itself is there, and not only its supervisor."""
    for _ in range(3000):
        new = [p for p in descendants() if p not in before]
        if len(new) >= least:
            return new
        await asyncio.sleep(0.01)
    raise AssertionError("the program never began")


def test_a_cancelled_call_leaves_nothing(mode):
    async def main() -> None:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=mode) as sandbox:
            for moment_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.3):
                call = asyncio.create_task(sandbox.run(SLEEPS))
                await asyncio.sleep(moment_s)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                assert [p for p in descendants() if p not in before] == []
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(main())


def test_a_call_cancelled_twice_leaves_nothing_either(mode):
    async def main() -> None:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=mode) as sandbox:
            call = asyncio.create_task(sandbox.run(SLEEPS))
            await _until_running(before, 3)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert [p for p in descendants() if p not in before] == []

    asyncio.run(main())


def test_programs_end_with_heddle_however_it_ends(mode, tmp_path):
    script = f"""
import asyncio
from heddle_runtime.sandbox.runner import *

async def main():
    async with Sandbox(SandboxLimits(wall_s=500.0), mode={mode!r}) as sandbox:
        await asyncio.gather(*(sandbox.run({SLEEPS!r}) for _ in range(3)))

asyncio.run(main())
"""
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        heddle = subprocess.Popen(
            [sys.executable, "-c", script], stderr=subprocess.DEVNULL, env={"TMPDIR": str(tmp_path)}
        )
        try:
            while len(programs := descendants(heddle.pid)) < 9:
                assert heddle.poll() is None
                time.sleep(0.01)
            heddle.send_signal(number)
            heddle.wait()
            assert wait_until_gone(programs) == [], number
        finally:
            heddle.kill()
            heddle.wait()


def test_a_supervisor_that_is_killed_takes_its_program_along(mode):
    async def main() -> None:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=mode) as sandbox:
            call = asyncio.create_task(sandbox.run(SLEEPS))
            programs = await _until_running(before, 3)
            assert os.getsid(programs[0]) == programs[0]  # Ctrl-C does not reach it
            await asyncio.sleep(0.2)
            os.kill(programs[0], signal.SIGKILL)
            with pytest.raises(
                SandboxError, match="the supervisor of a program failed with status -9"
            ):
                await call
            assert wait_until_gone(programs) == []

    asyncio.run(main())


@pytest.fixture
def far_folder() -> Iterator[Path]:
    """A folder that pytest never has to remove: its own way fails at great depths."""
    folder = tempfile.mkdtemp(prefix="heddle-test-")
    yield Path(folder)
    remove_folder(folder)


def test_what_a_program_leaves_on_disk_is_gone(mode, far_folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(far_folder))
    deep = """
        import os
        os.mkdir("locked", 0)
        for _ in range(1100):
            os.mkdir("d")
            os.chdir("d")
            open("f", "w").close()
    """

    async def main() -> None:
        limits = SandboxLimits(files=4000, wall_s=60.0)
        async with Sandbox(limits, mode=mode) as sandbox:
            done = await sandbox.run(textwrap.dedent(deep))
            assert done.status == "ok", done
            (folder,) = far_folder.iterdir()
            assert list(folder.iterdir()) == []

    asyncio.run(main())
    assert list(far_folder.iterdir()) == []


def test_a_folder_with_closed_doors_is_removed(tmp_path):
    folder = tmp_path / "x"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (folder / "out").symlink_to(tmp_path)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    remove_folder(str(folder))
    assert not folder.exists()
    assert tmp_path.exists()


# -- what is not available, and wrong arguments ---------------------------------------------------


def says(**report: str | float) -> str:
    return f"print({json.dumps(json.dumps(report))})"


@pytest.mark.parametrize(
    ("boot", "error", "said"),
    [
        (says(refused="no such thing"), SandboxUnavailableError, "no such thing"),
        ("raise ValueError('a bug')", SandboxError, "failed with status 1: ValueError: a bug"),
        ("import os; os.kill(os.getpid(), 9)", SandboxError, "failed with status -9"),
        (
            says(status="ok", stdout="", stderr="Boo\nBaa", wall_s=1.0),
            SandboxUnavailableError,
            r"a first program ended with ok \(Baa\)",
        ),
    ],
)
def test_a_machine_without_isolation_runs_nothing(monkeypatch, tmp_path, boot, error, said):
    monkeypatch.setattr(module, "_BOOT", boot)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        async with Sandbox():
            raise AssertionError("entered")

    with pytest.raises(error, match=said):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_the_second_mode_is_taken_where_the_first_is_not_permitted(monkeypatch):
    if REFUSED["filter"]:
        pytest.skip(REFUSED["filter"])
    boot = (
        "from heddle_runtime.sandbox import namespaces as n; n.enter = lambda: n.call('setns', -1)"
    )
    monkeypatch.setattr(module, "_BOOT", module._BOOT.replace("main()", f"{boot}; main()"))

    async def main() -> None:
        async with Sandbox() as sandbox:
            assert sandbox.mode == "filter"
            assert "namespaces" in sandbox.note
            assert "they can start no processes" in sandbox.note
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(main())


def test_no_more_processes_to_be_had_is_said(monkeypatch):
    monkeypatch.setattr(module, "_interpreter", lambda: "/no/such/python")

    async def main() -> None:
        async with Sandbox():
            pass

    with pytest.raises(SandboxError, match=r"no process could be started for a program: .*python"):
        asyncio.run(main())


def test_a_closed_sandbox_runs_nothing(mode):
    async def main() -> None:
        sandbox = Sandbox(mode=mode)
        with pytest.raises(SandboxError, match="is closed"):
            await sandbox.run("print(1)")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_s", 0.0),
        ("wall_s", float("nan")),
        ("wall_s", float("inf")),
        ("wall_s", "30"),
        ("files", None),
        ("cpu_s", 0),
        ("cpu_s", 1.5),
        ("memory_bytes", 1 << 20),
        ("memory_bytes", True),
        ("files", -1),
        ("processes", 0),
        ("output_bytes", 1 << 40),
    ],
)
def test_a_limit_out_of_range_is_named(name, value):
    with pytest.raises(SandboxLimitError, match=f"sandbox limit {name}: found {value!r}; give "):
        SandboxLimits(**{name: value})


def test_a_limit_of_no_programs_is_refused():
    with pytest.raises(SandboxLimitError, match="max_running: found 0; give at least 1"):
        Sandbox(max_running=0)


def test_the_supervisor_needs_the_standard_library_only():
    code = module._BOOT.replace(
        "main()", "print([m for m in sys.modules if m in ('asyncio', 'numpy', 'msgspec')])"
    )
    command = [sys.executable, "-s", "-S", "-P", "-c", code, str(Path(module.__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "asm-generic/unistd.h"),
    ],
)
def test_system_calls_have_the_numbers_of_the_kernels_headers(machine, header):
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no kernel headers here")
    words = [line.split() for line in path.read_text().splitlines()]
    real = {
        w[1][5:]: int(w[2]) for w in words if len(w) == 3 and w[1][:5] == "__NR_" and w[2].isdigit()
    }
    assert len(real) > 250
    ours = kernel._NUMBERS[machine]
    assert {name: real[name] for name in ours if name in real} == {
        name: number for name, number in ours.items() if name in real
    }
