"""The engines of a run, whichever they are: launcher, clock, solver and tokens."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.engines import facts_of, open_vllm
from heddle.executor import Worker
from heddle.ray.engines import RayEngines
from heddle.setup import RunSetup
from heddle_core.commands import SolvePlan
from heddle_core.ids import EngineId
from heddle_core.plans import ResourcePlan
from heddle_rollout.engines import Launcher
from heddle_rollout.scripted_agent import TokenSource
from heddle_rollout.services import ChargedSolver, ServiceListener, Solver
from heddle_runtime.clock import RunClock
from heddle_runtime.vllm.checks import read_model
from heddle_sim.engine_client import SimLauncher

if TYPE_CHECKING:
    from heddle_runtime.vllm_http.launcher import HttpLauncher


@dataclass(frozen=True, slots=True)
class EngineStack:
    """What a run needs of its engines."""

    clock: RunClock
    launcher: Launcher
    solver: Solver
    tokens: TokenSource | None = None
    tool_scale: float = 1.0
    report_delay_s: float = 0.0
    facts: Callable[[EngineId], Mapping[str, Any]] = lambda engine: {}
    """Facts reported by an engine that has just become ready."""
    drafted: Callable[[], tuple[int, ...]] = tuple
    """What all engines drafted so far, as in `heddle_runtime.process.wire.Sampled`."""


@asynccontextmanager
async def open_engines(
    setup: RunSetup, path: Path, started: RayEngines | None = None
) -> AsyncIterator[EngineStack]:
    """Open the engines of a run, and close them; logs of those that start here go below `path`.

    A gateway registers engines by URL itself, except those that are `started`.

    Raises:
        ProbeError: a started engine cannot be used.
    """
    engine = setup.config.runtime.engine
    if started is None and engine == "fake":
        stack = fake_stack(setup)
    elif started is None and engine == "vllm":
        stack = vllm_stack(setup, path)
    else:
        stack = url_stack(setup, started)
    try:
        if started is not None:
            launcher = cast("HttpLauncher", stack.launcher)
            for url, tp in zip(started.urls, started.tps, strict=True):
                await launcher.add(url, api_key=started.key, tp=tp)
        yield stack
    finally:
        if isinstance(stack.solver, ProcessSolver):
            stack.solver.close()
        await stack.launcher.close()


def fake_stack(setup: RunSetup) -> EngineStack:
    """Engines that keep time only."""
    simulation = setup.simulation
    clock = RunClock(asyncio.get_running_loop(), speed=1.0 / setup.config.runtime.time_scale)
    launcher = SimLauncher(simulation, clock)
    launcher.schedule_faults()
    delay_s = simulation.report_delay_s
    return EngineStack(clock, launcher, ChargedSolver(clock), report_delay_s=delay_s)


def vllm_stack(setup: RunSetup, path: Path) -> EngineStack:
    """vLLM's engines in processes of their own; their logs go into a folder of `path`."""
    config, clock = setup.config, RunClock(asyncio.get_running_loop())
    launcher = open_vllm(config, path / "engines")
    for time_s, name in config.cluster.faults():
        clock.call_at(time_s, launcher.fail, EngineId(name))
    return model_stack(
        config, clock, launcher, facts=partial(facts_of, launcher), drafted=launcher.drafted
    )


def url_stack(setup: RunSetup, started: RayEngines | None) -> EngineStack:
    """Engines by URL, none yet: those of a replay, or of a gateway's clients."""
    # Imported here: other engines need no HTTP.
    from heddle_runtime.vllm_http.launcher import HttpLauncher
    from heddle_runtime.vllm_http.settings import HttpSettings

    runtime, clock = setup.config.runtime, RunClock(asyncio.get_running_loop())
    if started is None:
        costs = setup.context.cost.by_shape
        launcher = HttpLauncher(prefill_s=lambda spec, tokens: costs[spec.shape].prefill_s * tokens)
        return EngineStack(clock, launcher, ProcessSolver())
    settings = HttpSettings(
        sampling={"temperature": runtime.temperature}, start_limit_s=runtime.start_limit_s
    )
    return model_stack(setup.config, clock, HttpLauncher(settings))


def model_stack(
    config: RunConfig, clock: RunClock, launcher: Launcher, **facts: Any
) -> EngineStack:
    """Engines that run a model on tokens made up here."""
    model = read_model(config.runtime.model_dir, weights=False)
    text = text_ids(config.runtime.text, Path(config.runtime.model_dir), model.vocabulary)
    tokens = TokenSource(model.vocabulary, seed=config.seed, text=text)
    scale = config.runtime.time_scale
    return EngineStack(clock, launcher, ProcessSolver(), tokens, scale, **facts)


FIRST_BYTE_ID = 3
"""Past the special tokens of most models."""


def text_ids(file: str, model_dir: Path, vocabulary: int) -> list[int]:
    """Token ids of a file of text; none where no file is named.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if not file:
        return []
    try:
        text = Path(file).read_bytes()
        if file.endswith(".gz"):
            text = gzip.decompress(text)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"runtime.text = {file}: cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"runtime.text = {file}: is empty: name a file of text")
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file():
        return [FIRST_BYTE_ID + byte % (vocabulary - FIRST_BYTE_ID) for byte in text]
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text.decode(errors="replace")).ids
    return ids


class ProcessSolver:
    """Searches for plans in another process, without blocking the event loop; a `Solver`."""

    def __init__(self) -> None:
        # Ctrl-C reaches every process of a terminal: the run ends the search itself.
        self._worker = Worker("ignored")
        self._searches: set[asyncio.Task[ResourcePlan]] = set()

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        search = asyncio.get_running_loop().create_task(self._search(command))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        search.add_done_callback(partial(_report, command, listener))

    async def _search(self, command: SolvePlan) -> ResourcePlan:
        # In a thread: the start of the process, with all that it imports, takes a second or more.
        search = await asyncio.to_thread(self._worker.submit, command.problem.solve)
        return await asyncio.wrap_future(search)

    def close(self) -> None:
        for search in self._searches:
            search.cancel()
        self._worker.close()


def _report(
    command: SolvePlan, listener: ServiceListener, search: asyncio.Future[ResourcePlan]
) -> None:
    if search.cancelled():
        return
    error = search.exception()
    if error is not None:
        listener.service_failed(error)
    else:
        listener.plan_solved(command, search.result())
