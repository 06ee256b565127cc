"""Engines of registered URLs; implements `Launcher`."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint, UrlError, base_of
from heddle_runtime.vllm_http.engine import HttpEngine
from heddle_runtime.vllm_http.probe import EndpointFacts, ProbeError, probe
from heddle_runtime.vllm_http.settings import HttpSettings


@dataclass(slots=True, eq=False)
class Registered:
    """A URL that an engine may use."""

    endpoint: Endpoint
    gpu: str
    """The GPU class of engines that may use it; "": any."""
    tp: int
    facts: EndpointFacts
    """As of its last probe."""
    engine_name: str = ""
    """The only engine that may use it, in any of its lives; "": any of its shape."""
    engine: HttpEngine | None = None
    """Which uses it now."""
    fresh: bool = False
    """Whether it was probed for the engine that is about to use it."""

    @property
    def url(self) -> str:
        """What it is known by."""
        return self.endpoint.url


class HttpLauncher:
    """Gives each engine that starts a registered URL; use it inside a running event loop.

    A URL whose engine failed is free again: the engine that is started in its place waits until it
    answers.
    """

    def __init__(
        self,
        settings: HttpSettings | None = None,
        *,
        prefill_s: Callable[[EngineSpec, int], float] = lambda spec, tokens: 0.0,
    ) -> None:
        """`prefill_s`: what the prefill of so many tokens should take on an engine."""
        self._prefill_s = prefill_s
        self._settings = settings if settings is not None else HttpSettings()
        # Every running step has a connection of its own; the policy limits how many there are.
        self._connections = Connections()
        self._registered: dict[str, Registered] = {}
        self._engines: dict[HttpEngine, None] = {}
        self._changed = asyncio.Event()
        """A URL is free, or one that was free is not."""
        self._any = asyncio.Event()
        """Some URL is registered."""

    @property
    def registered(self) -> tuple[Registered, ...]:
        """All URLs, in the order of their registration."""
        return tuple(self._registered.values())

    async def add(
        self, url: str, *, api_key: str = "", gpu: str = "", tp: int | None = None
    ) -> EndpointFacts:
        """Register a URL after a probe, or probe it again; see `probed` and `register`."""
        return self.register(*await self.probed(url, api_key=api_key), gpu=gpu, tp=tp)

    async def probed(self, url: str, *, api_key: str = "") -> tuple[Endpoint, EndpointFacts]:
        """Find out what a URL is. `api_key` is sent to this URL only.

        Raises:
            UrlError: it is no URL of an engine.
            ProbeError: it cannot be used.
        """
        endpoint = Endpoint(url, self._connections, api_key=api_key)
        return endpoint, await probe(endpoint, limit_s=self._settings.answer_limit_s)

    def register(
        self, endpoint: Endpoint, facts: EndpointFacts, *, gpu: str = "", tp: int | None = None
    ) -> EndpointFacts:
        """Register what was probed, and return it. Without `tp` it is what the server says, else 1.

        Raises:
            UrlError: it is the engine of another URL.
            ProbeError: it serves another model than the others, or has another TP degree.
        """
        self._check_new(facts)
        self._check_model(facts)
        if None not in (tp, facts.tp) and tp != facts.tp:
            raise ProbeError(f"{facts.url} has TP {facts.tp}, not {tp}: leave tp out, or mend it")
        tp = tp or facts.tp or 1
        known = self._registered.get(endpoint.url)
        if known is None:
            self._registered[endpoint.url] = Registered(endpoint, gpu, tp, facts)
        else:
            known.endpoint, known.gpu, known.tp, known.facts = endpoint, gpu, tp, facts
        self._changed.set()
        self._any.set()
        return facts

    def reserve(self, url: str, engine_name: str) -> None:
        """Let only the engine of this name use a URL that was registered just now.

        It is ready as soon as it starts: no step comes before it, to move there later.
        """
        registered = self._registered[base_of(url)]
        registered.engine_name, registered.fresh = engine_name, True

    @property
    def usable(self) -> tuple[Registered, ...]:
        """URLs whose engines work, as far as is known; all where none does."""
        every = self.registered
        well = tuple(each for each in every if each.engine is not None and each.engine.takes_steps)
        return well or tuple(each for each in every if each.engine is not None) or every

    def _others(self, engine: HttpEngine) -> tuple[HttpEngine, ...]:
        return tuple(each for each in self._engines if each is not engine)

    async def any_registered(self) -> None:
        """Wait until some URL is registered."""
        await self._any.wait()

    def remove(self, url: str) -> None:
        """Forget a URL; the engine that uses or awaits it fails, and its steps run elsewhere.

        Raises:
            KeyError: it is not registered.
        """
        registered = self._registered.pop(base_of(url))
        if not self._registered:
            self._any.clear()
        name = registered.engine_name
        for engine in list(self._engines):
            awaits = bool(name) and engine.spec.engine.name == name
            if engine is registered.engine or awaits:
                engine.fail(f"{registered.url} was removed")

    def start(self, spec: EngineSpec, listener: EngineListener) -> HttpEngine:
        """Give an engine a URL. Ends in `engine_ready`, or in `engine_failed` if there is none."""
        engine = HttpEngine(
            spec,
            listener,
            self._settings,
            connect=self._connect,
            on_gone=self._on_gone,
            others=self._others,
            prefill_s=self._prefill_s,
        )
        self._engines[engine] = None
        return engine

    async def close(self) -> None:
        """End every use of a URL; the engines themselves run on."""
        engines = list(self._engines)
        for engine in engines:
            engine.kill()
        for engine in engines:
            await engine.closed()
        await self._connections.close()

    async def _connect(self, engine: HttpEngine) -> tuple[Endpoint, EndpointFacts]:
        shape = engine.spec.shape
        until_s = asyncio.get_running_loop().time() + self._settings.start_limit_s
        why = f"no URL is free for an engine {shape.gpu} x {shape.tp}"
        while True:
            registered = self._free(engine)
            if registered is not None:
                registered.engine = engine
                if registered.fresh:
                    registered.fresh = False
                    return registered.endpoint, registered.facts
                try:
                    facts = await probe(registered.endpoint, limit_s=self._settings.answer_limit_s)
                    self._check_new(facts)
                    self._check_model(facts, of=registered)
                except (UrlError, ProbeError) as error:
                    registered.engine = None
                    why = str(error)
                    self._to_the_end(registered)
                else:
                    registered.facts = facts
                    return registered.endpoint, facts
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise ProbeError(f"{why}; {len(self._registered)} are registered")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._settings.retry_s)):
                    await self._changed.wait()

    def _to_the_end(self, registered: Registered) -> None:
        """Try the others first, next time."""
        if self._registered.pop(registered.url, None) is not None:
            self._registered[registered.url] = registered

    def _free(self, engine: HttpEngine) -> Registered | None:
        shape = engine.spec.shape
        for registered in self._registered.values():
            fits = registered.tp == shape.tp and registered.gpu in ("", shape.gpu)
            if registered.engine_name:
                fits = registered.engine_name == engine.spec.engine.name
            if fits and registered.engine is None:
                return registered
        return None

    def _check_new(self, facts: EndpointFacts) -> None:
        for other in self._registered.values():
            if facts.is_at(other.facts):
                raise UrlError(f"{facts.url} is the engine of {other.url}: give one URL of each")

    def _check_model(self, facts: EndpointFacts, *, of: Registered | None = None) -> None:
        for other in self._registered.values():
            same = facts.model == other.facts.model or facts.root == other.facts.root
            if other is not of and other.url != facts.url and not same:
                raise ProbeError(
                    f"{facts.url} serves {facts.model}, and {other.url} serves "
                    f"{other.facts.model}: all engines must have one model"
                )

    def _on_gone(self, engine: HttpEngine) -> None:
        self._engines.pop(engine, None)
        for registered in self._registered.values():
            if registered.engine is engine:
                registered.engine = None
                self._changed.set()
