"""However a call ends, nothing of it is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.processes import descendants, wait_until_gone
from heddle_runtime.sandbox.remove import remove_folder
from heddle_runtime.sandbox.runner import Sandbox, SandboxError, SandboxLimits
from tests.runtime.sandbox.programs import SLEEPS, until_running


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
                assert descendants(besides=before) == []
            assert (await sandbox.run("print(1)")).stdout == "1\n"

    asyncio.run(main())


def test_a_call_cancelled_twice_leaves_nothing_either(mode):
    async def main() -> None:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=mode) as sandbox:
            call = asyncio.create_task(sandbox.run(SLEEPS))
            await until_running(before, 3)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert descendants(besides=before) == []

    asyncio.run(main())


def test_leaving_a_sandbox_ends_the_programs_that_run(mode):
    async def main() -> None:
        before = descendants()
        async with Sandbox(SandboxLimits(wall_s=500.0), mode=mode) as sandbox:
            call = asyncio.create_task(sandbox.run(SLEEPS))
            await until_running(before, 3)
        assert descendants(besides=before) == []
        assert call.cancelled()

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
            programs = await until_running(before, 3)
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
