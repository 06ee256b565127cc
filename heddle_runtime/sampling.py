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

INTERNAL_FIELDS = frozenset(
    {
        "flat_logprobs",
        "max_tokens",
        "n",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream_interval",
    }
)
"""Fields that rendering returns, or a client may send, and that are the engine's own to set."""
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of `extra_args` that address KV of other requests."""


class SamplingError(ValueError):
    """Sampling that no engine can do as asked; names the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def checked_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a client may set, without `INTERNAL_FIELDS`; an unknown null is none.

    Raises:
        SamplingError: there is one that no engine knows, or that asks for several outputs.
    """
    chosen = {}
    for name, value in sampling.items():
        if name in SAMPLING_FIELDS:
            chosen[name] = value
        elif name not in INTERNAL_FIELDS and value is not None:
            known = ", ".join(sorted(SAMPLING_FIELDS))
            raise SamplingError(name, f"sampling has {name}: known are {known}")
    if sampling.get("n", 1) not in (1, None):
        raise SamplingError("n", "n must be 1: a step has one output; send it n times")
    extra = chosen.get("extra_args")
    if extra is not None and not isinstance(extra, Mapping):
        raise SamplingError("extra_args", "sampling.extra_args must be an object")
    for key in TRANSFERS:
        if extra and key in extra:
            raise SamplingError(key, f"sampling.extra_args has {key}, which only engines set")
    return chosen
