"""The one error of this package that a user can correct."""


class PredictError(ValueError):
    """A trace, a model file or a request that cannot be used; the message gives the remedy."""
