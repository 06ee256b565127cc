"""The exceptions of this package."""

from collections.abc import Mapping


class TraceError(ValueError):
    """A trace, or a request about one, that cannot be used.

    The message is for users: it names the file, the line, the field, the fault and the remedy.
    """


class GapError(TraceError):
    """Values that a trace lacks; `rules` fill them in, by key of the configuration."""

    def __init__(self, text: str, rules: Mapping[str, str]) -> None:
        super().__init__(text)
        self.rules = rules
