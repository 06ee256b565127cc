"""The one error of this package that a user can mend."""


class PredictError(ValueError):
    """A trace, a model file or a request that cannot be used; the message says what to do."""
