"""Which fields of vLLM's `SamplingParams` a client may set, and what they forbid."""

from collections.abc import Mapping
from typing import Any

SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
"""Others are refused: vLLM ignores what it does not know, so that a typing error would change the
tokens and nothing would say so. `max_tokens` is the step's own, and a step has one output."""

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of `extra_args` that address KV of other requests."""


def sampling_error(sampling: Mapping[str, Any]) -> str:
    """Return why these fields cannot be set; "" if they can."""
    unknown = sorted(set(sampling) - SAMPLING_FIELDS)
    if unknown:
        return f"sampling has {', '.join(unknown)}: known are {', '.join(sorted(SAMPLING_FIELDS))}"
    extra = sampling.get("extra_args")
    if extra is not None and not isinstance(extra, Mapping):
        return "sampling.extra_args must be an object"
    reserved = [key for key in TRANSFERS if extra and key in extra]
    return f"sampling.extra_args has {reserved[0]}, which only engines set" if reserved else ""
