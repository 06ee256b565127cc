"""`heddle serve check`: what would fail, looked for before clients come."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from heddle.config import RunConfig
from heddle.engines import engine_facts
from heddle.gateway.config import GatewayConfig, check_address, other_models
from heddle.gateway.setup import GatewaySetup, prepared
from heddle.running import planned_tps
from heddle_gateway.passing import NO_TENANTS, is_gateway
from heddle_gateway.saved import SavedState
from heddle_runtime.vllm_http.endpoint import Endpoint, UnreachableError
from heddle_runtime.vllm_http.probe import CHAT, EndpointFacts, ProbeError, probe
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
    made, host = list[GatewaySetup](), f"{gateway.host}:{gateway.port}"
    found = [
        _tried("configuration", "can be used", lambda: made.append(prepared(config, gateway))),
        _tried(
            "address",
            f"{host} is free",
            lambda: asyncio.run(check_address(gateway.host, gateway.port)),
        ),
        *_files(config),
    ]
    if config.runtime.engine == "http":
        found += asyncio.run(_engines(config, gateway, made[0] if made else None))
    elif made and config.runtime.engine == "vllm" and config.runtime.launcher != "ray":
        found += _own_engines(made[0])
    if found[0].ok and config.serve.models:
        found += asyncio.run(_others(config, gateway))
    return found


def _tried(what: str, said: str, look: Callable[[], object]) -> Check:
    try:
        look()
    except (ValueError, OSError) as error:
        return Check(what, str(error), ok=False)
    return Check(what, said)


def _files(config: RunConfig) -> Iterator[Check]:
    serve = config.serve

    def open_state() -> None:
        if Path(serve.state).exists():
            SavedState(Path(serve.state), serve.idle_s, serve.keep_answer_s).close()
        else:
            _check_writable(Path(serve.state))

    if serve.state:
        yield _tried("serve.state", f"{serve.state} can be locked and written", open_state)
    for key in ("access_log", "epoch_file"):
        if path := getattr(serve, key):
            look = partial(_check_writable, Path(path))
            yield _tried(f"serve.{key}", f"{path} can be written", look)


def _check_writable(path: Path) -> None:
    """Check that a file can be written, or made.

    Raises:
        OSError: it cannot.
    """
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise OSError(f"{place} cannot be written: change its permissions, or name another file")


def _own_engines(made: GatewaySetup) -> Iterator[Check]:
    config, setup = made.setup.config, made.setup
    largest, folder = setup.workload.largest_tokens, Path(config.runtime.model_dir)
    yield _tried(
        "engines",
        f"can be started with {folder}",
        lambda: engine_facts(config, largest, planned_tps(setup)),
    )
    if any(option.startswith("--chat-template") for option in config.serve.render_options):
        return
    try:
        tokenizer: Any = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        tokenizer = {}
    if not (tokenizer.get("chat_template") or (folder / "chat_template.jinja").exists()):
        remedy = 'give serve.render_options = ["--chat-template=FILE"]'
        yield Check(str(folder), _NO_CHAT + remedy, ok=False)


async def _engines(
    config: RunConfig, gateway: GatewayConfig, made: GatewaySetup | None
) -> list[Check]:
    urls = dict.fromkeys((*gateway.engine_urls, *config.serve.workers))
    async with aiohttp.ClientSession() as http:
        found = await asyncio.gather(*(_engine(url, http, gateway.engine_key) for url in urls))
    if not urls:
        return [Check("engines", "none is named: requests wait until POST /workers brings one")]
    every = [each for each in found if isinstance(each, EndpointFacts)]
    tps = {shape.tp for shape in made.setup.context.cost.by_shape} if made is not None else set()
    lines = []
    for each in found:
        if isinstance(each, Check):
            lines.append(each)
        elif wrong := _unfit(each, every[0], tps):
            lines.append(Check(each.url, wrong, ok=False))
        else:
            lines.append(Check(each.url, each.line.removeprefix(f"{each.url}: ")))
    return lines


async def _engine(url: str, http: aiohttp.ClientSession, key: str) -> EndpointFacts | Check:
    try:
        return await probe(Endpoint(url, http, api_key=key), limit_s=_LIMIT_S)
    except (ProbeError, ValueError) as error:
        return Check(url, str(error).removeprefix(url).lstrip(": "), ok=False)


def _unfit(facts: EndpointFacts, first: EndpointFacts, tps: set[int]) -> str:
    """Why an engine cannot be used beside the first, or not for all; "": it can."""
    if facts.model != first.model and facts.root != first.root:
        return f"serves {facts.model}, and {first.url} {first.model}: all must have one model"
    if facts.release != first.release:
        return (
            f"is vLLM {facts.release}, and {first.url} {first.release}: their answers may differ; "
            "give all one release"
        )
    if facts.tp and tps and facts.tp not in tps:
        return f"has TP {facts.tp}, and the profile {sorted(tps)}: give cluster.model another"
    if CHAT not in facts.answers:
        return _NO_CHAT + "start vllm serve with --chat-template FILE"
    return ""


async def _others(config: RunConfig, gateway: GatewayConfig) -> list[Check]:
    """Look at the servers of `serve.models`."""
    async with aiohttp.ClientSession() as http:
        return await asyncio.gather(
            *(
                _other(name, Endpoint(url, http, api_key=gateway.engine_key), config.serve.keys)
                for name, url in other_models(config.serve.models).items()
            )
        )


async def _other(name: str, endpoint: Endpoint, keys: str) -> Check:
    what = f"{name}={endpoint.url}"
    try:
        answer = await endpoint.call("/v1/models", limit_s=_LIMIT_S)
    except UnreachableError as error:
        return Check(what, str(error), ok=False)
    if keys and is_gateway(answer.headers):
        return Check(what, NO_TENANTS, ok=False)
    content = answer.json()
    listed = content.get("data") if isinstance(content, dict) else None
    models = [str(each.get("id")) for each in listed or () if isinstance(each, dict)]
    if name in models:
        return Check(what, "is there")
    said = (
        f"lists {', '.join(models)}: name one of these"
        if models
        else f"/v1/models says {answer.status}: {answer.message}; set HEDDLE_ENGINE_KEY"
    )
    return Check(what, said, ok=False)
