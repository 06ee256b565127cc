"""The packages of the distribution."""

from typing import Final

OUR_PACKAGES: Final = (
    "heddle",
    "heddle_calibrate",
    "heddle_compiled",
    "heddle_core",
    "heddle_gateway",
    "heddle_predict",
    "heddle_rollout",
    "heddle_runtime",
    "heddle_sim",
    "heddle_trace",
    "heddle_verl",
)
