"""The policy of a gateway by how its trajectories arrive: `serve.arrivals` of the configuration."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heddle.config import RunConfig
from heddle.config_files import ConfigError

POLICY: Final = "heddle"
"""The policy whose parts follow `serve.arrivals`."""

PARTS_BY_ARRIVALS: Final[Mapping[str, str]] = {
    "auto": "+by_arrivals+balance_batches",
    "batch": "",
    "open": "+sjf_aged+never",
}
"""Parts in place of the policy's own."""


def with_arrivals(config: RunConfig) -> RunConfig:
    """The same with the parts that `serve.arrivals` means, if the policy is `heddle` alone.

    Raises:
        ConfigError: `batch` or `open` beside another policy, which would ignore it.
    """
    preset, arrivals = config.policy.preset.strip(), config.serve.arrivals
    if preset == POLICY:
        chosen = replace(config.policy, preset=preset + PARTS_BY_ARRIVALS[arrivals])
        return replace(config, policy=chosen)
    if arrivals != "auto":
        raise ConfigError(
            f"serve.arrivals = {arrivals} chooses parts of the policy {POLICY}, and the policy is "
            f"{preset}: leave one of them out"
        )
    return config
