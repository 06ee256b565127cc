"""Runs programs in a sandbox, in each mode that this machine permits."""

import asyncio
import textwrap

from campaigns.processes import descendants
from heddle_runtime.sandbox.runner import (
    IsolationMode,
    Sandbox,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
)

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


SLEEPS = "import time; print('x', flush=True); time.sleep(1000)"


async def until_running(before: list[int], least: int) -> list[int]:
    """Wait until a program itself is there, and not only its supervisor."""
    for _ in range(3000):
        new = descendants(besides=before)
        if len(new) >= least:
            return new
        await asyncio.sleep(0.01)
    raise AssertionError("the program never began")
