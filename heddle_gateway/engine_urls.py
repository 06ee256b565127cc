"""Engines that others started: they join and leave by URL, and are used for rendering too."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec
from heddle_gateway.errors import ApiError, unavailable
from heddle_gateway.gateway import Gateway
from heddle_gateway.openai_api import ServedModel
from heddle_runtime.vllm_http.endpoint import Endpoint, UnreachableError, UrlError, base_of
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.probe import EndpointFacts, ProbeError

CONTROL_LIMIT_S: Final = 600.0
"""Of one control call: engines may load weights in it."""
EXPECT_S: Final = 2.0
"""Between two attempts to register a URL that was given at the start."""
_PASSING: Final = ("not_an_engine", "leaving")
"""Codes of what may keep an engine out for some time only."""


@dataclass(slots=True, eq=False)
class _Engine:
    spec: EngineSpec
    facts: EndpointFacts
    recalled: bool = False


class RegisteredEngines:
    """Engines that join the gateway by URL, at any time; implements `EngineControl`.

    Each has a name of its own, `e0` and so on, the TP degree that its server says or that is given,
    and the GPU type that is given, else that of the first shape.
    """

    def __init__(
        self,
        launcher: HttpLauncher,
        gateway: Gateway,
        model: ServedModel,
        *,
        shapes: Sequence[EngineShape],
        max_running: int,
        tp: int | None = None,
        key: str = "",
        keyed: Sequence[str] = (),
    ) -> None:
        """`shapes` are those whose cost is known. `max_running` and `tp` are of engines that are
        registered without. `key` is sent to the URLs of `keyed`, and to no other.
        """
        self._keyed = frozenset(map(base_of, keyed))
        self._launcher, self._gateway, self._model = launcher, gateway, model
        self._shapes, self._max_running, self._tp, self._key = shapes, max_running, tp, key
        self._engines: dict[str, _Engine] = {}
        """By URL."""
        self._expected: dict[str, asyncio.Task[None]] = {}
        """Attempts to register URLs that did not answer."""
        self._names = count()
        gateway.on_engine_left = self._left
        gateway.url_of, gateway.engine_at = self._url_of, self._engine_at
        model.adapters = self._adapters

    async def expect(
        self,
        engines: Iterable[tuple[str, Mapping[str, Any]]],
        on_note: Callable[[str], None],
    ) -> list[tuple[str, ApiError]]:
        """Register engines that the gateway's owner names, by URL and options, in their order.

        URLs are written as `base_of` does.
        They get the key of engines. All are probed at once, since each that is silent takes its
        whole limit. What keeps one out is a note, and it joins as soon as it can be used. Returns
        what is wrong with those that never can.
        """
        given, wrong = list(engines), []
        self._keyed |= {url for url, _ in given}
        probes = [asyncio.create_task(self._probed(*each)) for each in given]
        for (url, options), probed in zip(given, probes, strict=True):
            try:
                for lack in (await probed)()["lacks"]:
                    on_note(f"{url}: {lack}")
            except ApiError as error:
                if error.error["code"] != "not_an_engine":
                    wrong.append((url, error))
                    continue
                on_note(f"{error}. It joins when it can be used")
                self._expect_no_more(url)  # it may be named twice
                adding = self._add_later(url, options, on_note, str(error))
                self._expected[url] = asyncio.create_task(adding)
        return wrong

    async def _add_later(
        self,
        url: str,
        options: Mapping[str, Any],
        on_note: Callable[[str], None],
        said: str,
    ) -> None:
        while True:
            await asyncio.sleep(EXPECT_S)
            try:
                await self.add(url, options)
                on_note(f"{url} has joined")
                break
            except ApiError as error:
                waits = error.error["code"] in _PASSING
                if str(error) != said:
                    said = str(error)
                    on_note(said if waits else f"{said}. It is not tried again")
                if not waits:
                    break
        self._expected.pop(url, None)

    def close(self) -> None:
        """Try to register nothing any more."""
        for task in self._expected.values():
            task.cancel()
        self._expected.clear()

    async def add(self, url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Register an engine after a probe; one that is registered is probed again.

        Returns what it is, `id` and `url` among it.

        Raises:
            ApiError: it cannot be used, or is leaving.
        """
        return (await self._probed(url, options))()

    async def _probed(
        self, url: str, options: Mapping[str, Any]
    ) -> Callable[[], Mapping[str, Any]]:
        """Probe an engine; return what registers it."""
        tp, gpu = _positive(options, "tp"), self._gpu(options)
        slots = _positive(options, "max_running")
        key = options.get("api_key")
        if not isinstance(key, str | None):
            raise ApiError(400, "api_key must be a text", param="api_key")
        known = self._known(url)
        with suppress(UrlError):
            if key is None and base_of(url) in self._keyed:
                key = self._key
        if known is not None:
            _check_stays(known)
        spec = known.spec if known is not None else None
        if spec is not None:
            for name, given, has in (("tp", tp, spec.shape.tp), ("gpu", gpu, spec.shape.gpu)):
                if given not in (None, has):
                    text = f"{name} is {given}, and the engine is registered with {has}"
                    raise ApiError(400, f"{text}: take it out first", param=name)
            tp = spec.shape.tp
        with _refusing():
            found = await self._launcher.probed(url, api_key=key or "")
        return lambda: self._register(found, tp, gpu or self._shapes[0].gpu, slots)

    def _gpu(self, options: Mapping[str, Any]) -> str | None:
        given = options.get("gpu")
        known = dict.fromkeys(shape.gpu for shape in self._shapes)
        if given is None or str(given).lower() in known:
            return given and str(given).lower()
        text = f"gpu is {str(given)[:80]!r}: give one of cluster.engines"
        raise ApiError(400, f"{text}: {', '.join(known)}", param="gpu")

    def _register(
        self, found: tuple[Endpoint, EndpointFacts], tp: int | None, gpu: str, slots: int | None
    ) -> Mapping[str, Any]:
        for each in self._launcher.registered:
            if found[1].is_at(each.facts) and each.url in self._engines:
                _check_stays(self._engines[each.url])
        with _refusing():
            facts = self._launcher.register(*found, tp=tp)
        engine = self._engines.get(facts.url)
        if engine is None:
            engine = self._join(facts, tp or facts.tp or self._tp or 1, gpu, slots)
        engine.facts = facts
        self.learn(facts)
        return self._described(engine)

    def _join(self, facts: EndpointFacts, tp: int, gpu: str, slots: int | None) -> _Engine:
        of_gpu = [shape for shape in self._shapes if shape.gpu == gpu]
        shape = next((shape for shape in of_gpu if shape.tp == tp), None)
        if shape is None:
            self._launcher.remove(facts.url)
            known = ", ".join(str(each.tp) for each in of_gpu)
            raise ApiError(
                400,
                f"{facts.url}: tp is {tp}, and the profile has TP {known}: give one of these, or "
                "start the gateway with a profile that has it",
                param="tp",
            )
        slots = min(slots or self._max_running, facts.max_running or 1 << 30)
        spec = EngineSpec(engine=EngineId(f"e{next(self._names)}"), shape=shape, max_running=slots)
        engine = self._engines[facts.url] = _Engine(spec, facts)
        self._launcher.reserve(facts.url, spec.engine)
        self._gateway.driver.join(spec)
        return engine

    def _url_of(self, engine: str) -> str:
        name = EngineId(engine).name
        return next((url for url, e in self._engines.items() if e.spec.engine.name == name), "")

    def _engine_at(self, url: str) -> EngineId | None:
        engine = self._engines.get(url)
        return self._gateway.life_of(engine.spec.engine) if engine is not None else None

    def _adapters(self) -> frozenset[str]:
        return frozenset(name for e in self._launcher.registered for name in e.facts.adapters)

    def learn(self, facts: EndpointFacts) -> None:
        """Serve the model of an engine."""
        model = self._model
        model.names = tuple(dict.fromkeys((*model.names, facts.model)))
        model.context_tokens = min(model.context_tokens, facts.longest)

    def remove(self, engine: str, *, drain: bool) -> Mapping[str, Any] | None:
        """Take out an engine, after its running steps if `drain`; otherwise they run elsewhere.

        Returns what it is; None if it was not there.
        """
        found = self._known(engine)
        if found is None:
            return self._expect_no_more(engine)
        found.recalled = True
        self._gateway.recall(found.spec.engine, drain=drain)
        described = self._described(found)
        if not self._gateway.life_of(found.spec.engine):
            self._left(found.spec.engine)
        return described

    def _expect_no_more(self, url: str) -> Mapping[str, Any] | None:
        with suppress(UrlError):
            url = base_of(url)
        task = self._expected.pop(url, None)
        if task is None:
            return None
        task.cancel()
        return {"id": None, "url": url, "state": "expected"}

    def _left(self, engine: EngineId) -> None:
        """An engine has stopped, or is not started again: its URL is free."""
        for url, each in list(self._engines.items()):
            if each.spec.engine.name == engine.name:
                del self._engines[url]
                self._launcher.remove(url)

    def registered(self) -> Sequence[Mapping[str, Any]]:
        """Return the engines, those that are waited for last."""
        expected = [{"id": None, "url": url, "state": "expected"} for url in self._expected]
        return [*(self._described(each) for each in self._engines.values()), *expected]

    def _known(self, engine: str) -> _Engine | None:
        """Find an engine by name or URL."""
        for each in self._engines.values():
            if each.spec.engine == engine:
                return each
        try:
            return self._engines.get(base_of(engine))
        except UrlError:
            return None

    def _described(self, engine: _Engine) -> dict[str, Any]:
        facts, ready = engine.facts, self._gateway.life_of(engine.spec.engine)
        return {
            "id": str(engine.spec.engine),
            "url": facts.url,
            "state": "leaving" if engine.recalled else "ready" if ready else "starting",
            "model": facts.model,
            "adapters": list(facts.adapters),
            "gpu": engine.spec.shape.gpu,
            "tp": engine.spec.shape.tp,
            "max_running": engine.spec.max_running,
            "kv_capacity_tokens": facts.kv_capacity_tokens,
            "lacks": list(facts.lacks),
        }

    @property
    def names(self) -> Sequence[str]:
        """URLs of the engines."""
        return [each.url for each in self._launcher.registered]

    async def call_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]] | None = None,
        *,
        optional: bool = False,
    ) -> Mapping[str, Any]:
        """Call every engine; see `EngineControl`."""
        endpoints = [each.endpoint for each in self._launcher.registered]
        if not endpoints:
            if optional:
                return {}
            raise unavailable("no engine is registered; POST /workers takes one")
        calls = [
            endpoint.call(path, None if bodies is None else bodies[n], limit_s=CONTROL_LIMIT_S)
            for n, endpoint in enumerate(endpoints)
        ]
        answers: dict[str, Any] = {}
        faults = []
        for endpoint, answer in zip(
            endpoints, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, UnreachableError):
                faults.append(f"{endpoint.url}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            elif 200 <= answer.status < 300:
                answers[endpoint.url] = answer.json()
            elif answer.status in (404, 405):
                if not optional:
                    faults.append(
                        f"{endpoint.url} has no {path.partition('?')[0]}: start vllm serve with "
                        "VLLM_SERVER_DEV_MODE=1"
                    )
            else:
                faults.append(f"{endpoint.url}: {path} says {answer.status}: {answer.message}")
        if faults:
            raise ApiError(502, "; ".join(faults), kind="server_error", code="engine_refused")
        return answers


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise what is wrong with an engine as clients get it."""
    try:
        yield
    except UrlError as error:
        raise ApiError(400, str(error), param="url") from None
    except ProbeError as error:
        raise ApiError(400, str(error), param="url", code="not_an_engine") from None


def _check_stays(engine: _Engine) -> None:
    if engine.recalled:
        text = f"{engine.facts.url} is leaving: register it when GET /workers does not list it"
        raise ApiError(409, text, param="url", code="leaving")


def _positive(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 20:
        raise ApiError(400, f"{name} is {str(value)[:80]}: give a whole number above 0", param=name)
    return value
