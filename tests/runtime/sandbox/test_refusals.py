"""What is not available, and wrong arguments, are one message."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from heddle_runtime.sandbox import kernel
from heddle_runtime.sandbox import runner as module
from heddle_runtime.sandbox.runner import (
    Sandbox,
    SandboxError,
    SandboxLimitError,
    SandboxLimits,
    SandboxUnavailableError,
)
from tests.runtime.sandbox.programs import REFUSED


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
