"""Engines that others started: registered by URL, and used for rendering too."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from heddle_gateway.errors import ApiError, unavailable
from heddle_gateway.front import ServedModel
from heddle_runtime.generation import GenerationEnd, Rendered, RenderError
from heddle_runtime.vllm_http.endpoint import UrlError, base_of
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.probe import EndpointFacts, ProbeError
from heddle_runtime.vllm_http.rendering import HttpRenderer


class RegisteredEngines:
    """The URLs of a launcher; implements `EngineUrls`.

    There are as many places as the plan has engines. A place is free until an engine is registered
    for it, and again once that is removed.
    """

    def __init__(
        self, launcher: HttpLauncher, places: int, model: ServedModel, *, tp: int = 1, key: str = ""
    ) -> None:
        """`key` is sent to engines that are registered without one."""
        self._launcher, self._places, self._model = launcher, places, model
        self._tp, self._key = tp, key

    async def add(self, url: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Register an engine after a probe."""
        try:
            known = base_of(url) in (each.url for each in self._launcher.registered)
        except UrlError as error:
            raise ApiError(400, str(error), param="url") from None
        if not known and len(self._launcher.registered) >= self._places:
            raise ApiError(
                409,
                f"{self._places} engines are planned, and all are registered: take one out by "
                "DELETE /workers/URL, or start with a larger --engines",
                param="url",
                code="no_place",
            )
        tp, key = options.get("tp", self._tp), options.get("api_key", self._key)
        if tp != self._tp or not isinstance(key, str):
            raise ApiError(
                400, f"tp is {tp!r}: the engines are planned with TP {self._tp}", param="tp"
            )
        try:
            facts = await self._launcher.add(url, tp=self._tp, api_key=key)
        except UrlError as error:
            raise ApiError(400, str(error), param="url") from None
        except ProbeError as error:
            raise ApiError(400, str(error), param="url", code="not_an_engine") from None
        self.learn(facts)
        return _described(facts)

    def learn(self, facts: EndpointFacts) -> None:
        """Serve the model of an engine."""
        model = self._model
        model.names = tuple(dict.fromkeys((*model.names, facts.model)))
        model.context_tokens = min(model.context_tokens, facts.longest)

    def remove(self, engine: str) -> bool:
        """Take out an engine; its steps run elsewhere."""
        try:
            self._launcher.remove(engine)
        except KeyError:
            return False
        return True

    def registered(self) -> Sequence[Mapping[str, Any]]:
        """Return the engines."""
        return [_described(each.facts) for each in self._launcher.registered]


def _described(facts: EndpointFacts) -> dict[str, Any]:
    return {
        "id": facts.url,
        "url": facts.url,
        "model": facts.model,
        "kv_capacity_tokens": facts.kv_capacity_tokens,
        "lacks": list(facts.lacks),
    }


class RenderingEngines:
    """Renders at registered engines in rotation; implements `Renderer` and `EngineCalls`."""

    def __init__(self, launcher: HttpLauncher) -> None:
        self._launcher = launcher
        self._calls = count()

    async def render(self, endpoint: str, body: dict[str, Any]) -> Rendered:
        """Make the prompt of a request."""
        found: Rendered = await self._first("render", endpoint, body)
        return found

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        """Make the response object."""
        found: dict[str, Any] = await self._first(
            "derender", endpoint, body, rendered, output_ids, end
        )
        return found

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Pass a call on."""
        return await self._first("call", path, body)

    async def _first(self, method: str, *args: Any) -> Any:
        """Call the next engine, or the first after it that can be reached."""
        registered = self._launcher.registered
        if not registered:
            raise unavailable("no engine is registered")
        start = next(self._calls)
        for n in range(len(registered)):
            endpoint = registered[(start + n) % len(registered)].endpoint
            try:
                return await getattr(HttpRenderer(endpoint), method)(*args)
            except RenderError as refused:
                if refused.status != 503 or n == len(registered) - 1:
                    raise
        raise AssertionError("the last engine answers or raises")
