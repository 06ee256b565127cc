"""`heddle serve`: a gateway for clients that speak OpenAI's protocol, or send token ids."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.options import NumberRange, launcher, served, take_config

if TYPE_CHECKING:
    from heddle.gateway.config import GatewayConfig
    from heddle_gateway.fake_engines import Replies

ENGINE = click.Choice(["vllm", "http", "fake"])
SECONDS = NumberRange(min=0.0, max=1e9)


@click.command()
@click.option("--policy", default=None, help="PRESET[+PART...] or package.module:factory [heddle]")
@click.option("--seed", type=int, default=None, help="Seed of all that is drawn [0]")
@click.option(
    "--engine",
    type=ENGINE,
    default=None,
    help="vllm: started here; http: run already; fake: no model runs [http with --worker, else "
    "fake]",
)
@launcher
@click.option("--model-dir", default=None, help="Folder of the model that vLLM serves")
@click.option(
    "--worker",
    "urls",
    multiple=True,
    help="URL of a running vllm serve; repeat it. More may join by POST /workers",
)
@click.option("--engine-key", default="", envvar="HEDDLE_ENGINE_KEY", help="API key of --worker")
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
@click.option("--max-context", type=int, default=None, help="Longest prompt and output [model's]")
@click.option("--name", "names", multiple=True, help="Name of the model for requests; repeat it")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on")
@click.option("--port", type=click.IntRange(0, 65_535), default=8400, show_default=True)
@click.option("--api-key", default="", envvar="HEDDLE_API_KEY", help="Key of clients [none]")
@click.option(
    "--admin-key",
    default="",
    envvar="HEDDLE_ADMIN_KEY",
    help="Key of engines and control [none: only from this machine]",
)
@click.option(
    "--open-to-all",
    is_flag=True,
    help="Without --api-key on an address that others reach: all may use and control it",
)
@click.option(
    "--max-open",
    type=click.IntRange(1, 1_000_000),
    default=None,
    help="Requests at once; more get status 429 [65,536, or what the limit on files permits]",
)
@click.option(
    "--idle-s",
    type=SECONDS,
    default=1800.0,
    show_default=True,
    help="A trajectory without a request for so long is cancelled",
)
@click.option(
    "--keep-answer-s",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="How long an answer is kept for a client that sends the same again",
)
@click.option(
    "--engine-wait-s",
    type=SECONDS,
    default=300.0,
    show_default=True,
    help="How long steps wait while there is no engine",
)
@click.option("--user-is-session", is_flag=True, help="The body's `user` names a session")
@click.option(
    "--list-itself",
    is_flag=True,
    help="GET /workers has the gateway alone: for vime, which aborts at the URLs listed",
)
@click.option(
    "--kv-transfer",
    type=click.Choice(["none", "nixl"]),
    default=None,
    help="With --engine vllm: how KV migrates; none: prefilled again [none]",
)
@click.option(
    "--render-option",
    "render_options",
    multiple=True,
    metavar="OPTION",
    help="With --engine vllm: option of vLLM's renderer, as --tool-call-parser=hermes; repeat it",
)
@click.option("--time-scale", type=float, default=None, help="With --engine fake: slow down [1.0]")
@click.option(
    "--fake-tokens",
    type=int,
    default=128,
    show_default=True,
    help="With --engine fake: mean length of a generation",
)
@click.option(
    "--fake-replies",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="With --engine fake: JSON lines; reply n of a trajectory is line n, a message",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on standard output")
@served
def serve(
    settings: tuple[str, ...],
    policy: str | None,
    seed: int | None,
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
    """
    engine = engine or ("http" if urls else None)
    _check_options(engine, urls, engines)
    url_tps = _url_tps(urls, tps) if engine == "http" else ()

    from heddle.cli.show import run_summary, show_lateness
    from heddle.gateway.serve import serve as serve_clients
    from heddle_gateway.front import MOST_OPEN

    if options["fake_replies"] is not None and engine != "fake":
        raise click.UsageError("--fake-replies goes with --engine fake")
    gateway = _gateway(urls, url_tps, options)
    of_vllm = {"--model-dir": options["model_dir"], "--render-option": gateway.render_options}
    named = ("launcher", "model_dir", "max_context", "time_scale", "kv_transfer")
    given: dict[str, Any] = {f"runtime__{name}": options.pop(name) for name in named}
    config, text = take_config(
        (),
        options,
        settings,
        usual={"policy.preset": "heddle"},
        policy__preset=policy,
        trace="gateway",
        seed=seed,
        runtime__engine=engine,
        engines=(None, None) if engine == "http" else (engines, tps),
        **given,
    )
    _check_of_vllm(config.runtime.engine, of_vllm)

    def listening(url: str, path: Path) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, "run": str(path)}))
            sys.stdout.flush()
        else:
            click.echo(f"listening on {url}/v1, policy {config.policy.preset}; run in {path}")

    def note(text: str) -> None:
        click.echo(f"Note: {text}", err=True)

    if gateway.front.max_open < MOST_OPEN:
        at_once = f"{gateway.front.max_open:,} requests at once (--max-open, ulimit -Hn)"
        note(f"{at_once}; more get status 429")
    if gateway.front.open_to_all:
        note("--open-to-all: every client that can connect may use it and control its engines")
    result = serve_clients(
        config, gateway, out=out, config_text=text, on_note=note, on_listening=listening
    )
    show_lateness(str(result.path), result.summary)
    if as_json:
        click.echo(json.dumps({"run": str(result.path), **result.summary}, allow_nan=False))
    else:
        run_summary(result, None)


def _url_tps(urls: tuple[str, ...], tps: str | None) -> tuple[int, ...]:
    """Read `--tp` with `--worker`: one TP degree for all URLs, or one for each."""
    from heddle.cli.engine_options import tp_degrees
    from heddle.config_files import ConfigError

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


def _gateway(
    urls: tuple[str, ...], url_tps: tuple[int, ...], options: dict[str, Any]
) -> "GatewayConfig":
    """Take the gateway's own options out of `options`."""
    from heddle.gateway.config import GatewayConfig
    from heddle_gateway.app import most_open
    from heddle_gateway.front import FrontSettings
    from heddle_gateway.sessions import SessionLimits

    return GatewayConfig(
        host=options.pop("host"),
        port=options.pop("port"),
        model_names=options.pop("names"),
        engine_urls=urls,
        engine_tps=url_tps if urls else (),
        engine_tp=min(url_tps, default=None),
        engine_key=options.pop("engine_key"),
        fake_tokens=options.pop("fake_tokens"),
        fake_replies=_replies(options.pop("fake_replies")),
        render_options=options.pop("render_options"),
        engine_wait_s=options.pop("engine_wait_s"),
        sessions=SessionLimits(
            idle_s=options.pop("idle_s"), keep_answer_s=options.pop("keep_answer_s")
        ),
        front=FrontSettings(
            api_key=options.pop("api_key"),
            admin_key=options.pop("admin_key"),
            open_to_all=options.pop("open_to_all"),
            max_open=options.pop("max_open") or most_open(),
            user_is_session=options.pop("user_is_session"),
            lists_itself=options.pop("list_itself"),
        ),
    )


def _replies(path: Path | None) -> "Replies | None":
    """Read what fake engines say.

    Raises:
        ConfigError: names the file and the line.
    """
    if path is None:
        return None
    from heddle.config_files import ConfigError
    from heddle_gateway.fake_engines import Replies

    messages = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                messages.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    try:
        return Replies(messages)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_of_vllm(engine: str, given: dict[str, Any]) -> None:
    """Refuse options that other engines would ignore: without `--engine`, no model would run."""
    from heddle.config_files import ConfigError

    for flag, value in given.items():
        if value and engine != "vllm":
            raise ConfigError(f"{flag} goes with --engine vllm, not with {engine}")


def _check_options(engine: str | None, urls: tuple[str, ...], engines: int | None) -> None:
    from heddle.config_files import ConfigError

    if find_spec("aiohttp") is None:
        raise ConfigError("heddle serve needs aiohttp: pip install 'heddle-rl[serve]'")
    if urls and engine != "http":
        raise ConfigError(f"--worker goes with --engine http, not with --engine {engine}")
    if engine == "http" and engines is not None:
        raise ConfigError(
            "--engines is of engines that are started here: those by URL join by --worker and "
            "POST /workers, as many as there are. Leave it out"
        )
