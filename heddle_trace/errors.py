"""The one exception of this package."""


class TraceError(ValueError):
    """A trace, or a request about one, that cannot be used.

    The message is for users: it names the file, the line, the field, the fault and the remedy.
    """
