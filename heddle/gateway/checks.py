"""`heddle serve check`: what would fail, looked for before clients come."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heddle.config import RunConfig
from heddle.engines import engine_facts
from heddle.gateway.config import GatewayConfig, check_address, other_models
from heddle.gateway.setup import prepared
from heddle.running import planned_tps
from heddle.setup import RunSetup
from heddle_gateway.passing import NO_TENANTS
from heddle_gateway.saved import SavedState
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint, UnreachableError, without_user
from heddle_runtime.vllm_http.probe import CHAT, GATEWAY_HEADER, EndpointFacts, ProbeError, probe
from heddle_runtime.vllm_http.settings import HttpSettings

_NO_CHAT: Final = "no chat template, so every chat request fails: "
_LIMIT_S: Final = HttpSettings().answer_limit_s


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    what: str
    said: str
    """What it is; else what is wrong, and how to mend it."""
    ok: bool = True


def checks(config: RunConfig, gateway: GatewayConfig) -> list[Check]:
    """Look at what a gateway needs, and start nothing; each engine by URL makes three tokens."""
    made, host = list[RunSetup](), f"{gateway.host}:{gateway.port}"

    def bind() -> None:
        asyncio.run(check_address(gateway.host, gateway.port))

    found = [
        _tried("configuration", "can be used", lambda: made.append(prepared(config, gateway)[0])),
        _tried("address", f"{host} is free", bind),
        *_files(config),
    ]
    if made and config.runtime.engine == "vllm" and config.runtime.launcher != "ray":
        found += _own_engines(made[0])
    return [*found, *asyncio.run(_by_url(config, gateway, made[0] if made else None))]


def _tried(what: str, said: str, look: Callable[[], object]) -> Check:
    try:
        look()
    except (ValueError, OSError) as error:
        return Check(what, str(error).removeprefix(f"{what}: "), ok=False)
    return Check(what, said)


def _files(config: RunConfig) -> Iterator[Check]:
    serve = config.serve
    for key in ("state", "access_log", "epoch_file"):
        name = getattr(serve, key)
        path = Path(name)

        def look(key: str = key, path: Path = path) -> None:
            place = path if path.exists() else path.absolute().parent
            if path.is_dir() or not os.access(place, os.W_OK):
                raise OSError(f"{place} cannot be written: change its permissions, or the key")
            if key == "state" and path.exists():
                SavedState(path, serve.idle_s, serve.keep_answer_s).close()
            elif path.is_char_device():
                with path.open("ab", buffering=0) as device:
                    device.write(b"\n")  # /dev/full can be opened, and takes nothing

        if name:
            yield _tried(f"serve.{key}", f"{path} can be written", look)


def _own_engines(made: RunSetup) -> Iterator[Check]:
    config = made.config
    largest, folder = made.workload.largest_tokens, Path(config.runtime.model_dir)
    said = f"can be started with {folder}"
    yield _tried("engines", said, lambda: engine_facts(config, largest, planned_tps(made)))
    try:
        tokenizer: Any = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        tokenizer = {}
    given = any(option.startswith("--chat-template") for option in config.serve.render_options)
    if not (given or "chat_template" in tokenizer or (folder / "chat_template.jinja").exists()):
        remedy = 'give serve.render_options = ["--chat-template=FILE"]'
        yield Check(str(folder), _NO_CHAT + remedy, ok=False)


async def _by_url(config: RunConfig, gateway: GatewayConfig, made: RunSetup | None) -> list[Check]:
    """Look at engines by URL, and at the servers of `serve.models`."""
    key, keys = gateway.engine_key, config.serve.keys
    urls = dict.fromkeys((*gateway.engine_urls, *config.serve.workers))
    others = other_models(config.serve.models) if made is not None else {}
    async with Connections() as http:
        engines = await asyncio.gather(*(_engine(url, http, key) for url in urls))
        models = [
            await _other(name, Endpoint(url, http, api_key=key), keys)
            for name, url in others.items()
        ]
    tps = {shape.tp for shape in made.context.cost.by_shape} if made is not None else set()
    facts = [each for each in engines if isinstance(each, EndpointFacts)]
    found = [each for each in engines if isinstance(each, Check)]
    return [*found, *(_fit(each, facts, tps) for each in facts), *models]


async def _engine(url: str, http: Connections, key: str) -> EndpointFacts | Check:
    try:
        return await probe(Endpoint(url, http, api_key=key), limit_s=_LIMIT_S)
    except (ProbeError, ValueError) as error:
        return Check(without_user(url), str(error).removeprefix(url).lstrip(": "), ok=False)


def _fit(facts: EndpointFacts, every: Sequence[EndpointFacts], tps: set[int]) -> Check:
    """Whether an engine can be used beside the others, and for all requests."""
    first, wrong = every[0], ""
    if same := [each.url for each in every if facts.is_at(each)]:
        wrong = f"is the engine of {same[0]}: give one URL of each"
    elif facts.model != first.model and facts.root != first.root:
        wrong = f"serves {facts.model}, and {first.url} {first.model}: all must have one model"
    elif facts.release != first.release:
        wrong = f"is vLLM {facts.release}, and {first.url} {first.release}: give all one release"
    elif facts.tp and tps and facts.tp not in tps:
        wrong = f"has TP {facts.tp}, and the profile {sorted(tps)}: give cluster.model another"
    elif CHAT not in facts.answers:
        wrong = _NO_CHAT + "start vllm serve with --chat-template FILE"
    return Check(facts.url, wrong or facts.line.removeprefix(f"{facts.url}: "), ok=not wrong)


async def _other(name: str, endpoint: Endpoint, keys: str) -> Check:
    what = f"{name}={endpoint.url}"
    try:
        answer = await endpoint.call("/v1/models", limit_s=_LIMIT_S)
    except UnreachableError as error:
        return Check(what, str(error), ok=False)
    if keys and GATEWAY_HEADER in answer.headers:
        return Check(what, NO_TENANTS, ok=False)
    content = answer.json()
    listed = content.get("data") if isinstance(content, dict) else None
    models = [str(each.get("id")) for each in listed or () if isinstance(each, dict)]
    if name in models:
        return Check(what, "is there")
    said = f"/v1/models says {answer.status}: {answer.message}; set HEDDLE_ENGINE_KEY"
    said = f"lists {', '.join(models)}: name one of these" if models else said
    return Check(what, said, ok=False)
