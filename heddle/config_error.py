"""The error of a configuration that cannot be used."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names its source, its key and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)
