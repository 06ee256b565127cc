"""The one exception of this package."""


class TraceError(ValueError):
    """A trace, or a request about one, that cannot be honoured.

    The message names the file, the line and the field where there is one, what is wrong, and how to
    mend it. It is meant to be shown to the user as it stands.
    """
