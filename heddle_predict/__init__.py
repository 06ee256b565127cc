"""Learns to predict how many tokens a trajectory still has to make, from traces of earlier ones."""

from heddle_predict.errors import PredictError

__all__ = ["PredictError"]
