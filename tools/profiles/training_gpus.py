"""Efficiency of trainers on GPU types that no published step is of, from those of Hopper.

A step of Hopper's takes longer than its products take by the kernels of a prefill. These are known
for each type, from the shipped profiles; the rest is taken to scale with the memory's bandwidth.
"""

from typing import Final

from heddle_sim.profile_files import load_profile
from heddle_sim.trained_models import trained_model
from heddle_sim.training import TrainingProfile, peak_flops

HOPPER: Final = "h100"
WITHOUT_ROWS: Final = ("a100", "h20", "l40s")
MODEL: Final = "qwen3-8b"
PREFILL_TOKENS: Final = 8192


def derived_efficiency(profile: TrainingProfile, gpu: str) -> float:
    """The share of its peak that a Megatron trainer reaches on `gpu`, relative to Hopper's."""
    # Seconds of a FLOP.
    whole_s = 1 / (peak_flops(HOPPER) * profile.matmul["megatron"])
    kernels_s, bandwidth = _kernels(HOPPER)
    own_s, own_bandwidth = _kernels(gpu)
    own_s += (whole_s - kernels_s) * bandwidth / own_bandwidth
    return whole_s * peak_flops(HOPPER) / (own_s * peak_flops(gpu))


def _kernels(gpu: str) -> tuple[float, float]:
    """Seconds of a FLOP in a prefill's products, and bytes a second of the memory."""
    made, model = load_profile(MODEL, gpu), trained_model(MODEL)
    table = made.tables["1"].prefill
    seconds = dict(zip(table.tokens, table.ms, strict=True))[PREFILL_TOKENS] / 1e3
    # A prefill has logits of its last token alone.
    head = model.vocabulary * model.hidden
    assert made.roofline is not None
    flops = 2 * (model.multiplied - head) * PREFILL_TOKENS
    return seconds / flops, made.roofline.bandwidth_bytes_per_s
