"""`heddle serve`: a gateway on the engines of a run, with a run directory."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.engines import engine_facts
from heddle.knowledge import needs_oracle
from heddle.running import (
    ProcessSolver,
    RunSink,
    Stage,
    fake_stage,
    planned_tps,
    vllm_stage,
)
from heddle.runs import open_run
from heddle.setup import RunSetup, prepare
from heddle.signals import StopSignals
from heddle.simulation import RunResult, finished, run_prices
from heddle.workload import Workload
from heddle_gateway.app import listening, raise_file_limit
from heddle_gateway.engine_urls import RegisteredEngines, RenderingEngines
from heddle_gateway.errors import ApiError
from heddle_gateway.fake_engines import WordRenderer, fake_agents
from heddle_gateway.front import Front, FrontSettings, ServedModel
from heddle_gateway.gateway import Gateway
from heddle_gateway.sessions import SessionLimits
from heddle_rollout.core import RecordedCore
from heddle_rollout.services import CoreEstimates
from heddle_runtime.agents.tokenizer import load_tokenizer
from heddle_runtime.clock import RunClock
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.render_process import RenderProcess, RenderProcessError
from heddle_trace.schema import Trace

TRACE = "gateway"
"""In place of the trace's name: what trajectories do is up to the clients."""
CONTEXT_TOKENS = 32_768
"""Of engines that say no limit of their own."""
_SECRET = ("--api-key", "--admin-key", "--engine-key")


class GatewayFailedError(RuntimeError):
    """The gateway cannot go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway needs beside the configuration of a run."""

    host: str = "127.0.0.1"
    port: int = 8400
    """0: a free one."""
    model_names: tuple[str, ...] = ()
    """Names that requests may give for the model. Empty: the engines' own."""
    engine_urls: tuple[str, ...] = ()
    engine_key: str = field(default="", repr=False)
    """Sent to the engines of `engine_urls`."""
    fake_tokens: int = 128
    """Mean length of a generation of fake engines."""
    render_options: tuple[str, ...] = ()
    """Options of vLLM's renderer for engines that are started here. With a parser of tool calls or
    reasoning among them, text comes at the end of a step."""
    engine_wait_s: float = 300.0
    """Longest time for which steps wait while there is no engine."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    front: FrontSettings = field(default_factory=FrontSettings, repr=False)


def serve(
    config: RunConfig,
    gateway: GatewayConfig,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_listening: Callable[[str, Path], None] = lambda url, path: None,
) -> RunResult:
    """Serve clients until a signal comes; return the finished run.

    `on_listening` gets the URL and the run directory. The first SIGINT, SIGTERM or SIGHUP ends it
    in order: clients are refused so that they may send again, engines hand over the tokens of
    running steps, and the run directory is closed as finished. A second one does not wait: the run
    is then closed as interrupted.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        OSError: the address cannot be used, or the run directory cannot be written.
        GatewayFailedError: the renderer did not start, or an engine's URL cannot be used.
    """
    _check(config, gateway)
    raise_file_limit(gateway.front.max_open)
    context_tokens = _context_tokens(config)
    work = Workload(
        trace=Trace(TRACE, (), ""), trajectories=0, largest_tokens=min(context_tokens, 1 << 20)
    )
    setup = prepare(config, workload=work)
    prices = run_prices(setup)
    engines = _facts(setup, gateway)
    for note in engines["notes"]:
        on_note(note)
    facts = replace(setup.facts("heddle_gateway", engines), command_line=_without_secrets(sys.argv))
    kept = prices.kept(setup.config, setup.profiles.pools)
    gpus = {} if engines.get("platform") == "cpu" else setup.profiles.pools
    began_s = time.perf_counter()
    with (
        StopSignals() as signals,
        open_run(out, kept, facts, config_text=config_text) as directory,
    ):
        sink = RunSink(directory, 0, lambda done, total: None)
        model = ServedModel(names=gateway.model_names, context_tokens=context_tokens)
        served = _Served(setup, gateway, sink, model, on_note)
        asyncio.run(served.run(signals, lambda url: on_listening(url, directory.path)))
        return finished(setup, directory, began_s, partial(prices.cost, gpus))


def _check(config: RunConfig, gateway: GatewayConfig) -> None:
    if needs_oracle(config.policy.preset):
        raise ConfigError(
            f"policy {config.policy.preset}: the future of clients is unknown; take a policy "
            "without an oracle"
        )
    if config.cluster.roles:
        raise ConfigError(
            "--roles goes with replays only: a model may end a step with its first token, and no "
            "prefill engine reports whether it did. Leave --roles out"
        )
    if gateway.fake_tokens < 1:
        raise ConfigError(f"--fake-tokens {gateway.fake_tokens}: give 1 or more")


def _context_tokens(config: RunConfig) -> int:
    """The longest context: as configured, as the model has it, or as engines will say."""
    runtime = config.runtime
    if runtime.max_context is not None:
        return runtime.max_context
    if runtime.engine == "vllm":
        found = json.loads((Path(runtime.model_dir) / "config.json").read_text())
        return int(found.get("max_position_embeddings", CONTEXT_TOKENS))
    return CONTEXT_TOKENS if runtime.engine == "fake" else 1 << 20


def _facts(setup: RunSetup, gateway: GatewayConfig) -> dict[str, Any]:
    """The manifest's facts of the engines, after their checks."""
    runtime = setup.config.runtime
    if runtime.engine == "http":
        return {"engine": "http", "urls": list(gateway.engine_urls), "notes": []}
    facts = engine_facts(setup.config, setup.workload.largest_tokens, planned_tps(setup))
    if runtime.engine == "fake":
        note = "no model runs: engines keep time only, and tokens are made up"
        return {**facts, "notes": [*facts["notes"], note]}
    return facts


def _without_secrets(command_line: Sequence[str]) -> Sequence[str]:
    """Return a command line for the manifest."""
    kept: list[str] = []
    for word in command_line:
        name, equals, _ = word.partition("=")
        if kept and kept[-1] in _SECRET:
            kept.append("...")
        else:
            kept.append(f"{name}=..." if name in _SECRET and equals else word)
    return tuple(kept)


class _Served:
    """One gateway from its start to its end."""

    def __init__(
        self,
        setup: RunSetup,
        config: GatewayConfig,
        sink: RunSink,
        model: ServedModel,
        on_note: Callable[[str], None],
    ) -> None:
        self._setup, self._config, self._sink = setup, config, sink
        self._model, self._on_note = model, on_note

    async def run(self, signals: StopSignals, on_listening: Callable[[str], None]) -> None:
        """Serve until a signal.

        Raises:
            KeyboardInterrupt: a second signal came before engines had handed their tokens over.
        """
        setup, config = self._setup, self._config
        loop = asyncio.get_running_loop()
        async with self._stage() as stage, AsyncExitStack() as rest:
            fake = setup.config.runtime.engine == "fake"
            gateway = Gateway(
                RecordedCore(setup.controller(), self._sink),
                stage.launcher,
                stage.clock,
                predictions=CoreEstimates(stage.clock, setup.config.cluster.prediction_s),
                solver=stage.solver,
                sessions=config.sessions,
                engine_wait_s=config.engine_wait_s,
                report_interval_s=setup.config.cluster.report_interval_s,
                report_delay_s=stage.report_delay_s,
                **({"make_agent": fake_agents(config.fake_tokens)} if fake else {}),
            )
            front = Front(gateway=gateway, model=self._model, settings=config.front)
            serving = loop.create_task(gateway.run())
            closing: list[asyncio.Task[None]] = []

            def end(count: int) -> None:
                if count == 1:
                    closing.append(loop.create_task(gateway.close()))
                else:
                    for task in (serving, *closing):
                        task.cancel()

            try:
                # From a signal handler: only such a call wakes a waiting loop.
                with signals.on_signal(lambda count: loop.call_soon_threadsafe(end, count)):
                    await self._connect(front, stage, rest)
                    async with listening(front, host=config.host, port=config.port) as port:
                        host = f"[{config.host}]" if ":" in config.host else config.host
                        on_listening(f"http://{host}:{port}")
                        await asyncio.wait([serving])
                    if closing:
                        await asyncio.wait(closing)
            finally:
                await gateway.close(0.0)
                await asyncio.wait([serving])
            if serving.cancelled():
                raise KeyboardInterrupt
            serving.result()

    @asynccontextmanager
    async def _stage(self) -> AsyncIterator[Stage]:
        """The engines' launcher and what belongs to it, closed at the end."""
        config = self._setup.config
        match config.runtime.engine:
            case "fake":
                stage = fake_stage(self._setup)
            case "vllm":
                stage = vllm_stage(config, self._sink.path)
            case "http":
                clock = RunClock(asyncio.get_running_loop())
                stage = Stage(clock, HttpLauncher(), ProcessSolver(), None, 1.0, 0.0)
        self._sink.facts = stage.facts
        try:
            yield stage
        finally:
            if isinstance(stage.solver, ProcessSolver):
                stage.solver.close()
            await stage.launcher.close()

    async def _connect(self, front: Front, stage: Stage, rest: AsyncExitStack) -> None:
        """Give the front its renderer, and register the engines that are known.

        Raises:
            GatewayFailedError: a renderer or an engine cannot be used.
        """
        runtime = self._setup.config.runtime
        match runtime.engine:
            case "fake":
                name = self._setup.config.cluster.model
                self._model.names = self._model.names or (Path(name).stem,)
                renderer = WordRenderer(self._model.names[0])
                front.renderer = front.engine_calls = front.detokenizer = renderer
            case "vllm":
                self._model.names = self._model.names or (Path(runtime.model_dir).name,)
                await self._render(front, rest)
            case "http":
                await self._register(front, cast(HttpLauncher, stage.launcher))

    async def _render(self, front: Front, rest: AsyncExitStack) -> None:
        config = self._setup.config
        process = RenderProcess(
            config.runtime.model_dir,
            log=self._sink.path / "render.log",
            max_context=config.runtime.max_context,
            model_name=self._model.names[0],
            options=self._config.render_options,
        )
        rest.push_async_callback(process.close)
        try:
            front.renderer = front.engine_calls = await process.start()
        except RenderProcessError as error:
            raise GatewayFailedError(str(error)) from None
        if not any("-parser" in option for option in self._config.render_options):
            front.detokenizer = load_tokenizer(config.runtime.model_dir)

    async def _register(self, front: Front, launcher: HttpLauncher) -> None:
        cluster, config = self._setup.config.cluster, self._config
        engines = RegisteredEngines(
            launcher, cluster.engines, self._model, tp=cluster.tp, key=config.engine_key
        )
        front.engine_urls = engines
        front.renderer = front.engine_calls = RenderingEngines(launcher)
        for url in config.engine_urls:
            try:
                added: Mapping[str, Any] = await engines.add(url, {})
            except ApiError as error:
                raise GatewayFailedError(f"--worker {url}: {error}") from None
            for lack in added["lacks"]:
                self._on_note(f"{url}: {lack}")
