"""Ordinary programs, run for real, and the limits at which others are cut."""

import asyncio
import ctypes
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest

from heddle_runtime.sandbox.runner import Sandbox, SandboxLimits, SandboxResult
from tests.runtime.sandbox.programs import REFUSED, run, run_all


def test_a_mode_is_refused_only_where_the_machine_refuses_it():
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    command = [shutil.which("unshare") or "false", "-r", "-n", "-m", "-p", "-f", "true"]
    permitted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if permitted and release >= (5, 14):
        assert REFUSED["namespaces"] == ""
    query_version = (444, None, 0, 1)  # landlock_create_ruleset
    if sys.platform == "linux" and ctypes.CDLL(None).syscall(*query_version) >= 1:
        assert REFUSED["filter"] == ""


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
    limits = SandboxLimits(wall_s=500.0)  # on a busy machine, 64 interpreters start slowly
    done = run_all(mode, *(f"print({i} * {i})" for i in range(64)), limits=limits)
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
