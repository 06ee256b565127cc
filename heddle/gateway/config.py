"""What `heddle serve` needs beside the configuration of a run, checked before anything starts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.epochs.file import EpochFile
from heddle.policy_inputs import needs_oracle
from heddle_gateway.fake_engines import Replies
from heddle_gateway.front import FrontSettings
from heddle_gateway.tenants import read_tenants
from heddle_runtime.vllm_http.endpoint import UrlError, base_of, without_user


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway needs beside the configuration of a run, and is in no file."""

    host: str = "127.0.0.1"
    port: int = 8400
    """0: a free one."""
    engine_urls: tuple[str, ...] = ()
    engine_tps: tuple[int, ...] = ()
    """TP degree of each of `engine_urls`. Empty: what the engine says, else `engine_tp`."""
    engine_tp: int | None = None
    """TP degree of engines by URL that say none. None: `cluster.tp`."""
    engine_key: str = field(default="", repr=False)
    """Sent to the engines of `engine_urls`."""
    read_again: Callable[[], RunConfig] | None = field(default=None, repr=False)
    """Reads the configuration again."""
    fake_replies: Replies | None = None
    """What fake engines say instead of made-up words."""
    front: FrontSettings = field(default_factory=FrontSettings, repr=False)


def check(config: RunConfig, gateway: GatewayConfig) -> None:
    """Check what needs no machine.

    Raises:
        ConfigError: an option cannot be used; names it.
    """
    if needs_oracle(config.policy.preset):
        raise ConfigError(
            f"policy {config.policy.preset}: the future of clients is unknown; take a policy "
            "without an oracle"
        )
    if config.cluster.roles:
        raise ConfigError(
            "cluster.roles goes with replays only: a model may end a step with its first token, "
            "and no prefill engine reports whether it did. Leave cluster.roles out"
        )
    if "" in config.serve.names:
        raise ConfigError(
            "serve.names has an empty name: give the names that requests have for the model"
        )
    other_models(config.serve.models)
    if config.serve.epoch_file:
        EpochFile(Path(config.serve.epoch_file))
    front = gateway.front
    keys = config.serve.keys
    if keys:
        read_tenants(Path(keys))
    if front.open_to_all and (keys or front.api_key or front.admin_key):
        raise ConfigError(
            "serve.open_to_all means no key: leave it out, or serve.keys, --api-key and "
            "HEDDLE_ADMIN_KEY"
        )
    if not (keys or front.api_key or front.open_to_all or is_own_address(gateway.host)):
        raise ConfigError(
            f"--host {gateway.host} is reached by others: give --api-key or serve.keys, and "
            "HEDDLE_ADMIN_KEY for control from other machines; or serve.open_to_all, if every "
            "client that can connect may do both"
        )
    for url in gateway.engine_urls:
        try:
            base_of(url)
        except UrlError as error:
            raise ConfigError(f"--worker: {error}") from None
    headers = {
        "--api-key": gateway.front.api_key,
        "HEDDLE_ADMIN_KEY": gateway.front.admin_key,
        "HEDDLE_ENGINE_KEY": gateway.engine_key,
    }
    for option, key in headers.items():
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(
                f"{option} has a space, an end of line or a character beyond ASCII, which no "
                "header can hold: give another, or take it out"
            )


def other_models(entries: Sequence[str]) -> Mapping[str, str]:
    """Read `serve.models`: the URL of each model.

    Raises:
        ConfigError: an entry is no NAME=URL, or names a model again.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, _, url = entry.partition("=")
        try:
            found[name] = base_of(url)
        except UrlError as error:
            shown = without_user(entry)
            raise ConfigError(f"serve.models, {shown!r}: write NAME=URL; {error}") from None
        if not name or len(found) <= entries.index(entry):
            raise ConfigError(f"serve.models, {entry!r}: give each model a name of its own")
    return found


def is_own_address(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def check_address(host: str, port: int) -> None:
    """Check that the address is free, before engines start.

    Raises:
        ConfigError: it cannot be used.
    """
    loop = asyncio.get_running_loop()
    try:
        bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    except (OSError, ValueError) as error:  # ValueError: a host that is no name at all
        said = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--host {host} --port {port}: {said}. Give an address of this machine and a free "
            "port; --port 0 takes any"
        ) from None
    bound.close()
