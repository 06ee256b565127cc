"""Learns to predict how many tokens a trajectory still has to make, from traces of earlier ones."""

import heddle_compiled as heddle_compiled  # first: it selects compiled modules or sources
from heddle_predict.errors import PredictError

__all__ = ["PredictError"]
