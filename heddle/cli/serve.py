"""`heddle serve`: a gateway for clients that speak OpenAI's protocol, or send token ids."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from heddle.cli.errors import BAD_INPUT
from heddle.cli.options import served, take_config
from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.config import RunConfig
    from heddle.gateway.config import GatewayConfig
    from heddle_gateway.fake_engines import Replies

ENGINE = click.Choice(["vllm", "http", "fake"])


@click.command()
@click.argument("only", metavar="[check]", required=False, type=click.Choice(["check"]))
@click.option("--policy", default=None, help="PRESET[+PART...] or package.module:factory [heddle]")
@click.option(
    "--engine",
    type=ENGINE,
    default=None,
    help="vllm: started here; http: run already; fake: no model runs [http with --worker, else "
    "fake]",
)
@click.option("--model-dir", default=None, help="Folder of the model that vLLM serves")
@click.option(
    "--worker",
    "urls",
    multiple=True,
    help="URL of a running vllm serve; repeat it. More may join by POST /workers",
)
@click.option(
    "--engines",
    type=int,
    default=None,
    help="Engines that are started here [those of 8 GPUs; 2 with --tp]",
)
@click.option(
    "--tp",
    "tps",
    default=None,
    help="TP degree, or one for each engine as 1,2 [what --worker says, or 1]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on")
@click.option("--port", type=click.IntRange(0, 65_535), default=8400, show_default=True)
@click.option("--api-key", default="", envvar="HEDDLE_API_KEY", help="Key of clients [none]")
@click.option("--json", "as_json", is_flag=True, help="JSON lines on standard output")
@served
def serve(
    only: str | None,
    settings: tuple[str, ...],
    policy: str | None,
    engine: str | None,
    urls: tuple[str, ...],
    engines: int | None,
    tps: str | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve agents under a policy: OpenAI's API, or token ids, in front of engines.

    Each session is a trajectory, and its client is the tool. Ctrl-C ends the run in order, and
    leaves a run directory that `heddle replay`, `heddle report` and `heddle trace extract` read.
    With --engine fake no model runs: engines keep time as the profile says, and words are made up.

    Keys of others are in the environment, so that no file has them: HEDDLE_ENGINE_KEY is sent to
    the engines of --worker; who has HEDDLE_ADMIN_KEY may add engines and control them from another
    machine. [serve] names the model, and says how clients are treated.

    `heddle serve check`, with the same options and keys, starts nothing: it prints a line for each
    engine, file and setting that the gateway needs, and ends with status 2 if one is wrong.
    """
    engine = engine or ("http" if urls else None)
    _check_options(engine, urls, engines)
    url_tps = _url_tps(urls, tps) if engine == "http" else ()

    from heddle.cli.show import run_summary, show_lateness
    from heddle.gateway.serve import serve as serve_clients

    own = {name: options.pop(name) for name in _OWN}
    model_dir = own.pop("model_dir")

    def read() -> "tuple[RunConfig, str | None]":
        return take_config(
            (),
            dict(options),
            settings,
            usual={"policy.preset": "heddle"},
            policy__preset=policy,
            trace="gateway",
            runtime__engine=engine,
            runtime__model_dir=model_dir,
            engines=(None, None) if engine == "http" else (engines, tps),
        )

    config, text = read()
    _check_engine(config)
    gateway = replace(_gateway(config, urls, url_tps, own), read_again=lambda: read()[0])
    if only is not None:
        _show_checks(config, gateway, as_json=as_json)
        return

    def listening(url: str, path: Path) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, "run": str(path)}))
        else:
            click.echo(f"listening on {url}/v1, policy {config.policy.preset}; run in {path}")

    _note_limits(gateway)
    result = serve_clients(
        config, gateway, out=out, config_text=text, on_note=_note, on_listening=listening
    )
    show_lateness(str(result.path), result.summary)
    if as_json:
        click.echo(json.dumps({"run": str(result.path), **result.summary}, allow_nan=False))
    else:
        run_summary(result, None)


def _note(text: str) -> None:
    click.echo(f"Note: {text}", err=True)


def _note_limits(gateway: "GatewayConfig") -> None:
    from heddle_gateway.front import MOST_OPEN

    if (most := gateway.front.max_open) < MOST_OPEN:
        _note(f"{most:,} requests at once (serve.max_open, ulimit -Hn); more get status 429")
    if gateway.front.open_to_all:
        _note("serve.open_to_all: every client that can connect may use it and control its engines")


def _show_checks(config: "RunConfig", gateway: "GatewayConfig", *, as_json: bool) -> None:
    """Print what would fail.

    Raises:
        Exit: something would.
    """
    from heddle.gateway.checks import checks

    found = checks(config, gateway)
    for each in found:
        line = {"ok": each.ok, "what": each.what, "said": each.said}
        mark = "ok   " if each.ok else "wrong"
        click.echo(json.dumps(line) if as_json else f"{mark}  {each.what}: {each.said}")
    if not all(each.ok for each in found):
        raise Exit(BAD_INPUT)


def _url_tps(urls: tuple[str, ...], tps: str | None) -> tuple[int, ...]:
    """Read `--tp` with `--worker`: one TP degree for all URLs, or one for each."""
    from heddle.cli.engine_options import tp_degrees

    if tps is None:
        return ()
    degrees = tp_degrees(tps)
    each = tuple(degrees["mix"]) or (degrees["tp"],) * max(len(urls), 1)
    if len(each) != max(len(urls), 1):
        raise ConfigError(
            f"--tp {tps} names {len(each)} engines, and there are {len(urls)} --worker: give one "
            "TP degree for all, or one for each"
        )
    return each


_OWN = ("model_dir", "host", "port", "api_key")
"""Options that are of no run's configuration, and the model's folder."""


def _gateway(
    config: "RunConfig", urls: tuple[str, ...], url_tps: tuple[int, ...], own: dict[str, Any]
) -> "GatewayConfig":
    """What the gateway's options and `[serve]` say."""
    from heddle.gateway.config import GatewayConfig
    from heddle_gateway.app import most_open
    from heddle_gateway.front import FrontSettings

    serve = config.serve
    return GatewayConfig(
        host=own["host"],
        port=own["port"],
        engine_urls=urls,
        engine_tps=url_tps if urls else (),
        engine_tp=min(url_tps, default=None),
        engine_key=os.environ.get("HEDDLE_ENGINE_KEY", ""),
        fake_replies=_replies(Path(serve.fake_replies)) if serve.fake_replies else None,
        front=FrontSettings(
            api_key=own["api_key"],
            admin_key=os.environ.get("HEDDLE_ADMIN_KEY", ""),
            open_to_all=serve.open_to_all,
            host=own["host"],
            max_open=serve.max_open or most_open(),
            user_is_session=serve.user_is_session,
            lists_itself=serve.list_itself,
        ),
    )


def _replies(path: Path) -> "Replies":
    from heddle_gateway.fake_engines import Replies

    messages = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"serve.fake_replies: {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                messages.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                text = "write one message as JSON in each line"
                raise ConfigError(f"{path}, line {number}: {error}: {text}") from None
    try:
        return Replies(messages)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_engine(config: "RunConfig") -> None:
    """Refuse what engines of another kind would ignore: without `--engine`, no model would run.

    Raises:
        ConfigError: names the option or key.
    """
    engine, serve = config.runtime.engine, config.serve
    for name, given, kind in (
        ("serve.workers", serve.workers, "http"),
        ("--model-dir", config.runtime.model_dir, "vllm"),
        ("serve.render_options", serve.render_options, "vllm"),
        ("serve.fake_replies", serve.fake_replies, "fake"),
    ):
        if given and engine != kind:
            raise ConfigError(f"{name} goes with --engine {kind}, not with {engine}")


def _check_options(engine: str | None, urls: tuple[str, ...], engines: int | None) -> None:
    if find_spec("httptools") is None:
        raise ConfigError("heddle serve needs httptools: pip install 'heddle-rl[serve]'")
    if urls and engine != "http":
        raise ConfigError(f"--worker goes with --engine http, not with --engine {engine}")
    if engine == "http" and engines is not None:
        raise ConfigError(
            "--engines is of engines that are started here: those by URL join by --worker and "
            "POST /workers, as many as there are. Leave it out"
        )
