"""The error of a configuration that cannot be used."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names its source, its key and the remedy."""
