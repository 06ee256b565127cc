"""GPU classes by their data sheets: peak arithmetic, memory and links."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClass:
    """Peak figures of one GPU; dense arithmetic, without sparsity."""

    name: str
    bf16_flops: float
    fp8_flops: float
    """Equal to `bf16_flops` without FP8 units: weights are converted."""
    bandwidth: float
    """Bytes per second of its memory; efficiencies are shares of it."""
    memory: int
    """Bytes."""
    link: float
    """Bytes per second to the other GPUs of its node, one direction."""
    link_gpus: int
    """GPUs that such links connect."""
    peak_bandwidth: float
    """Of the fastest system with this chip: no iteration is faster than its bytes at this."""
    peak_source: str
    fp4: bool
    """Whether it has FP4 units; without them weights in NVFP4 are widened to bf16 before a product,
    as vLLM's warning of its Marlin kernel says."""
    nvlink: bool
    """False: PCIe, which all GPUs of a node share when more than two take part."""
    source: str


def _gpu(
    name: str,
    bf16: float,
    fp8: float,
    bandwidth: float,
    gib: float,
    link: float,
    source: str,
    link_gpus: int = 8,
    peak: tuple[float, str] | None = None,
) -> tuple[str, GpuClass]:
    peak_bandwidth, peak_source = peak or (bandwidth, source)
    return name, GpuClass(
        name=name,
        bf16_flops=bf16 * 1e12,
        fp8_flops=fp8 * 1e12,
        bandwidth=float(round(bandwidth * 1e12)),
        memory=round(gib * 2**30),
        link=link * 1e9,
        fp4=name.startswith(("b", "gb", "rtx-pro")),
        nvlink=link > 100,
        link_gpus=link_gpus,
        source=source,
        peak_bandwidth=float(round(peak_bandwidth * 1e12)),
        peak_source=peak_source,
    )


_DGX_B200: Final = (8.0, "NVIDIA DGX B200 data sheet")
_DGX_B300: Final = (8.0, "NVIDIA DGX B300 data sheet")
"""The same chips as on HGX boards, whose sheets state 7.7 TB/s."""

GPU_CLASSES: Final[Mapping[str, GpuClass]] = MappingProxyType(
    dict(
        (
            _gpu("a100", 312, 312, 2.039, 79.2, 300, "NVIDIA A100 80GB SXM data sheet"),
            _gpu("h100", 989, 1979, 3.35, 79.2, 450, "NVIDIA H100 SXM data sheet"),
            _gpu("h200", 989, 1979, 4.8, 139.8, 450, "NVIDIA H200 SXM data sheet"),
            _gpu("h800", 989, 1979, 3.35, 79.2, 200, "as H100 SXM"),
            _gpu("h20", 148, 296, 4.0, 95.1, 450, "NVIDIA H20 data sheet"),
            _gpu("b200", 2250, 4500, 7.7, 178.3, 900, "NVIDIA HGX B200 data sheet", peak=_DGX_B200),
            _gpu("b300", 2250, 4500, 7.7, 268, 900, "NVIDIA HGX B300 data sheet", peak=_DGX_B300),
            _gpu("gb200", 2500, 5000, 8.0, 185, 900, "NVIDIA GB200 NVL72 data sheet", 72),
            _gpu("gb300", 2500, 5000, 8.0, 278, 900, "NVIDIA GB300 NVL72 data sheet", 72),
            _gpu("a100-pcie", 312, 312, 1.935, 79.2, 32, "NVIDIA A100 80GB PCIe data sheet"),
            _gpu("h100-pcie", 756, 1513, 2.0, 79.2, 64, "NVIDIA H100 PCIe data sheet"),
            _gpu("l40s", 362, 733, 0.864, 44.4, 32, "NVIDIA L40S data sheet"),
            _gpu("l40", 181, 362, 0.864, 44.4, 32, "NVIDIA L40 data sheet"),
            _gpu("l4", 121, 242, 0.3, 22.03, 32, "NVIDIA L4 data sheet"),
            _gpu("a10g", 70, 70, 0.6, 22.06, 32, "NVIDIA A10G, AWS G5 instances"),
            _gpu("rtx-pro-6000", 467, 935, 1.597, 95, 64, "NVIDIA RTX PRO 6000 Server data sheet"),
        )
    )
)  # fmt: skip
"""By the names of latency profiles. Memory is what CUDA reports ("total capacity" of PyTorch's
errors: 44.40 on L40 in QwenLM/Qwen3-VL issue 2097, 44.42 on L40S in stepfun-ai/Step-Video-T2V issue
8, 22.03 on L4, 22.06 on A10G); of H20 assumed: nvidia-smi has 97,871 MiB, of which CUDA reports
0.5 GiB less on its neighbours. H800 has NVLink at 400 GB/s, both directions together."""

_AMD: Final = (
    "efficiencies and host time are of NVIDIA kernels: measured serving on MI300X is 0.37 to 1.14 "
    "times as fast as on H200, whose data sheet is worse in every figure "
    "(github.com/alpharomercoma/MI300X-vs-H200, REPORT.md)"
)
REFUSED_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("mi300x", "mi325x", "mi350x", "mi355x"), _AMD)
)
"""Classes that the roofline does not cover, with the reason."""
