"""`heddle serve`: a gateway on the engines of a run, with a run directory."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, closing, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heddle.config import RunConfig, ServeConfig
from heddle.cost.gpu_use import GpuUse
from heddle.engine_stack import EngineStack, open_engines
from heddle.engines import engine_facts
from heddle.epochs.file import EpochLog
from heddle.gateway.config import GatewayConfig, check_address, other_models
from heddle.gateway.reload import Reload
from heddle.gateway.setup import prepared
from heddle.memory import seldom_collected
from heddle.ray.engines import RayEngines, ray_engines
from heddle.running import RunSink, planned_tps
from heddle.setup import RunSetup
from heddle.signals import StopSignals
from heddle.simulation import RunResult, opened_run
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_gateway.access import AccessLog
from heddle_gateway.agent import GatewayAgent
from heddle_gateway.app import listening
from heddle_gateway.engine_urls import RegisteredEngines
from heddle_gateway.fake_engines import FakeControl, WordRenderer, fake_agents
from heddle_gateway.front import Front
from heddle_gateway.gateway import Gateway
from heddle_gateway.openai_api import ServedModel
from heddle_gateway.rendering import RenderingEngines
from heddle_gateway.saved import SavedState
from heddle_gateway.sessions import SessionLimits
from heddle_gateway.tenants import Tenants
from heddle_rollout.core import RecordedCore
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import Lateness
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint, base_of
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.render_process import RenderProcess, RenderProcessError

if TYPE_CHECKING:
    from heddle_gateway.traces import Traces

COLLECT_EVERY, COLLECT_OLD_EVERY = 5_000, 200
"""New objects between two collections of garbage, and such collections between two of older ones.

HTTP makes few cycles, which are young. A collection of 5,000 objects holds requests up for 2 ms,
one of 50,000 for 15 to 30.
"""
_SECRET = ("--api-key",)
_OTLP = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry's SDK: where spans go."""


class GatewayFailedError(RuntimeError):
    """The gateway cannot go on; the message says why."""


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

    `on_listening` gets the URL and the run directory. The first SIGINT or SIGTERM ends it
    in order: clients are refused so that they may send again, engines hand over the tokens of
    running steps, and the run directory is closed as finished. A second one does not wait: the run
    is then closed as interrupted.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        OSError: the address cannot be used, or the run directory cannot be written.
        GatewayFailedError: the renderer did not start, or an engine's URL cannot be used.
    """
    setup, gateway, context_tokens = prepared(config, gateway)
    asyncio.run(check_address(gateway.host, gateway.port))
    largest, options = setup.workload.largest_tokens, config.serve.render_options
    with ray_engines(config, largest, options=options) as started:
        if started is not None:
            gateway = replace(
                gateway, engine_urls=started.urls, engine_tps=started.tps, engine_key=started.key
            )
        return _serve_on(
            started, setup, gateway, context_tokens, out, config_text, on_note, on_listening
        )


def _serve_on(
    started: RayEngines | None,
    setup: RunSetup,
    gateway: GatewayConfig,
    context_tokens: int,
    out: Path,
    config_text: str | None,
    on_note: Callable[[str], None],
    on_listening: Callable[[str, Path], None],
) -> RunResult:
    engines = _facts(setup, gateway, started)
    for note in engines["notes"]:
        on_note(note)
    with (
        _saved(setup.config.serve) as saved,
        seldom_collected(COLLECT_EVERY, old_every=COLLECT_OLD_EVERY),
        opened_run(
            setup,
            "heddle_gateway",
            out,
            config_text=config_text,
            engines=engines,
            command_line=_without_secrets(sys.argv),
        ) as opened,
    ):
        path = opened.directory.path
        model = ServedModel(names=setup.config.serve.names, context_tokens=context_tokens)
        served = _Served(setup, gateway, RunSink(opened.directory), model, saved, on_note)
        with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
            run = served.run(opened.signals, lambda url: on_listening(url, path))
            lateness = runner.run(run)
        joined = setup.config.runtime.engine == "http"
        return opened.finished(lateness, gpu_s=served.use.gpu_s if joined else None)


def _saved(serve: ServeConfig) -> AbstractContextManager[SavedState | None]:
    """Open the file of state, if one is named."""
    if not serve.state:
        return nullcontext()
    return closing(SavedState(Path(serve.state), serve.idle_s, serve.keep_answer_s))


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed; None: asyncio's own."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _facts(setup: RunSetup, gateway: GatewayConfig, started: RayEngines | None) -> dict[str, Any]:
    """The manifest's facts of the engines, after their checks."""
    runtime = setup.config.runtime
    if runtime.engine == "http":
        facts = {"engine": "http", "urls": list(gateway.engine_urls), "notes": []}
        return facts if started is None else facts | dict(started.facts)
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
        saved: SavedState | None,
        on_note: Callable[[str], None],
    ) -> None:
        self._setup, self._config, self._sink, self._saved = setup, config, sink, saved
        self._model, self._on_note = model, on_note
        self.use = GpuUse()
        path = setup.config.serve.epoch_file
        self._lengths = EpochLog(Path(path)) if path else None

    def _record(self, event: Event, commands: Sequence[Command]) -> None:
        self.use.take(event)
        if self._lengths is not None:
            self._lengths(event, commands)
        self._sink(event, commands)

    async def run(self, signals: StopSignals, on_listening: Callable[[str], None]) -> Lateness:
        """Serve until a signal; return how late the clock was.

        Raises:
            KeyboardInterrupt: a second signal came before engines had handed their tokens over.
        """
        setup, config, serve = self._setup, self._config, self._setup.config.serve
        loop = asyncio.get_running_loop()
        async with open_engines(setup, self._sink.path) as stack, AsyncExitStack() as rest:
            self._sink.facts = stack.facts
            fake = setup.config.runtime.engine == "fake"
            agents = fake_agents(serve.fake_tokens, config.fake_replies) if fake else GatewayAgent
            gateway = Gateway(
                RecordedCore(setup.controller(), self._record),
                stack.launcher,
                stack.clock,
                predictions=CoreEstimates(stack.clock, setup.config.cluster.prediction_s),
                solver=stack.solver,
                sessions=SessionLimits(idle_s=serve.idle_s, keep_answer_s=serve.keep_answer_s),
                saved=self._saved,
                engine_wait_s=serve.engine_wait_s,
                on_note=self._on_note,
                report_interval_s=setup.config.cluster.report_interval_s,
                report_delay_s=stack.report_delay_s,
                make_agent=agents,
            )
            front = self._front(gateway, rest)
            serving = loop.create_task(gateway.run())
            ends: list[asyncio.Task[None]] = []
            reloads: list[asyncio.Task[Sequence[str]]] = []

            def end(count: int) -> None:
                if count == 1:
                    drain_s = serve.drain_s if signals.came[0] == signal.SIGTERM else 0.0
                    ends.append(loop.create_task(_drained(gateway, drain_s)))
                else:
                    for task in (serving, *ends):
                        task.cancel()

            front.end = lambda: ends.append(loop.create_task(_drained(gateway, serve.drain_s)))
            again = Reload(front, config.read_again, self._on_note)
            front.reload = again.reload
            signals.on_hangup = lambda: loop.call_soon_threadsafe(
                lambda: reloads.append(loop.create_task(again.reload()))
            )
            try:
                # From a signal handler: only such a call wakes a waiting loop.
                with signals.on_signal(lambda count: loop.call_soon_threadsafe(end, count)):
                    await self._connect(front, stack, rest)
                    for note in await again.take_workers(serve.workers):
                        raise GatewayFailedError(note)
                    async with listening(front, host=config.host, port=config.port) as port:
                        host = f"[{config.host}]" if ":" in config.host else config.host
                        on_listening(f"http://{host}:{port}")
                        await asyncio.wait([serving])
                    if ends:
                        await asyncio.wait(ends)
            finally:
                signals.on_hangup = None
                await gateway.close(0.0)
                await asyncio.wait([serving])
            if serving.cancelled():
                raise KeyboardInterrupt
            serving.result()
            return stack.clock.lateness

    def _front(self, gateway: Gateway, rest: AsyncExitStack) -> Front:
        serve = self._setup.config.serve
        front = Front(gateway=gateway, model=self._model, settings=self._config.front)
        front.traces = self._traces(rest)
        if serve.keys:
            front.tenants = Tenants(Path(serve.keys))
        if serve.access_log:
            front.access_log = AccessLog(Path(serve.access_log))
            rest.callback(front.access_log.close)
        return front

    def _traces(self, rest: AsyncExitStack) -> "Traces | None":
        """Spans, if the environment of OpenTelemetry's SDK says where they go."""
        named = next((name for name in _OTLP if os.environ.get(name)), "")
        if not named:
            return None
        try:
            from heddle_gateway.traces import Traces

            traces = Traces()
        except ModuleNotFoundError as error:
            remedy = f"{error.name} is not installed: pip install 'heddle-rl[traces]'"
            self._on_note(f"{named}: no spans are sent: {remedy}")
            return None
        rest.push_async_callback(asyncio.to_thread, traces.close)
        return traces

    async def _connect(self, front: Front, stack: EngineStack, rest: AsyncExitStack) -> None:
        """Give the front its renderer, and register the engines that are known.

        Raises:
            GatewayFailedError: a renderer or an engine cannot be used.
        """
        runtime = self._setup.config.runtime
        if others := other_models(self._setup.config.serve.models):
            http = await rest.enter_async_context(Connections())
            key = self._config.engine_key
            front.others = {n: Endpoint(url, http, api_key=key) for n, url in others.items()}
        match runtime.engine:
            case "fake":
                model, replies = self._model, self._config.fake_replies
                model.names = model.names or (Path(self._setup.config.cluster.model).stem,)
                renderer = WordRenderer(model.names[0], replies, model.context_tokens)
                front.renderer = renderer
                cluster = self._setup.config.cluster
                front.control = FakeControl(cluster.engine_count, cluster.tp)
            case "vllm":
                self._model.names = self._model.names or (Path(runtime.model_dir).name,)
                await self._render(front, rest)
            case "http":
                await self._register(front, cast(HttpLauncher, stack.launcher), rest)

    async def _render(self, front: Front, rest: AsyncExitStack) -> None:
        config = self._setup.config
        process = RenderProcess(
            config.runtime.model_dir,
            log=self._sink.path / "render.log",
            max_context=config.runtime.max_context,
            model_name=self._model.names[0],
            options=self._setup.config.serve.render_options,
        )
        rest.push_async_callback(process.close)
        try:
            front.renderer = await process.start()
        except RenderProcessError as error:
            raise GatewayFailedError(str(error)) from None

    async def _register(self, front: Front, launcher: HttpLauncher, rest: AsyncExitStack) -> None:
        config, context = self._config, self._setup.context
        engines = RegisteredEngines(
            launcher,
            front.gateway,
            self._model,
            shapes=sorted(context.cost.by_shape, key=lambda shape: shape.gpu != context.shape.gpu),
            max_running=context.max_running,
            tp=config.engine_tp,
            key=config.engine_key,
            keyed=config.engine_urls,
        )
        rest.callback(engines.close)
        rendering = RenderingEngines(launcher, wait_s=self._setup.config.serve.engine_wait_s)
        front.engine_urls = front.control = engines
        front.renderer = rendering
        front.engine_facts = rendering.facts
        tps = config.engine_tps or (None,) * len(config.engine_urls)
        urls = map(base_of, config.engine_urls)
        given = ((url, {"tp": tp}) for url, tp in zip(urls, tps, strict=True))
        for url, error in await engines.expect(given, self._on_note):
            raise GatewayFailedError(f"--worker {url}: {error}")


async def _drained(gateway: Gateway, drain_s: float) -> None:
    if drain_s:
        await gateway.drain(drain_s)
    await gateway.close()
