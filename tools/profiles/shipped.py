"""The shipped profiles whose kernel times the package is queried for (`from_aiconfigurator`).

    python -m tools.profiles shipped --out DIR

Those of `from_tables` are made from tables instead. Names are those of the published weights, in
small letters; the precision is in the name where weights in bfloat16 exist as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from heddle_calibrate.fit.from_aiconfigurator import EstimatorError, KernelSource, fit_shapes
from heddle_calibrate.roofline.memory import kv_capacity_tokens
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.roofline.profile import gpu_class
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, read_layout
from tools.profiles.from_aiconfigurator import layouts
from tools.profiles.from_tables import write_profiles

HOPPER, BLACKWELL = ("h100", "h200", "h800"), ("b200", "b300", "gb200")
EVERY = ("a100", "l40s", *HOPPER, *BLACKWELL)
FP8 = ("l40s", *HOPPER, *BLACKWELL)
"""A100 has no FP8."""
MLA = ("h100", "h200", *BLACKWELL)
"""Of these models the source times links together with experts, so there is no H800."""
NO_TABLES = ("b300",)
"""Where models that have tables elsewhere have none. The package does not know Qwen3-14B."""
RANKS = (1, 2, 4, 8)
SGLANG_BLOCKS = (
    "kernel times of SGLang: those that the source has of vLLM's FP8 matrix products in blocks are "
    "slower than its bfloat16 ones"
)
SGLANG_FP8 = (
    "kernel times of SGLang: those that the source has of vLLM's FP8 matrix products on Blackwell "
    "are slower than its bfloat16 ones at small batches"
)
BY_TENSOR = (
    "matrix products of attention are those with one scale per tensor: those that the source has "
    "of FP8 in blocks, vLLM's and SGLang's, are further from measured serving runs"
)
SGLANG_MXFP8 = (
    "kernel times of SGLang, with activations in MXFP8 as vLLM has them on Blackwell; those that "
    "the source has of vLLM have them in bfloat16, and are up to twice the measured ones"
)
KV_BF16 = "KV in bfloat16: measured serving runs on this GPU class hold as much of it as that gives"
KV_UNSCALED = "KV in bfloat16, as engines take it of a repository without scales of KV"
VLLM_BLOCKS = (
    "kernel times of vLLM, whose FP8 matrix products in blocks are slow in the source; SGLang's "
    "latent attention on Hopper is slower still at batches from 32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shipped:
    name: str
    model: str
    """The package's name."""
    gpus: tuple[str, ...]
    source: KernelSource
    experts: bool = False
    two_nodes: bool = False
    """Whether engines of 16 GPUs are made as well; without data-parallel ranks, since the source
    takes far too long for exchanges of experts between nodes."""


def _of(precision: str, note: str = "", backend: str = "vllm", **quantisation: str) -> KernelSource:
    return KernelSource(backend=backend, precision=precision, note=note, quantisation=quantisation)


_BF16 = _of("bfloat16")
_KV_BF16 = {"kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
_BLOCKS = _of("fp8", SGLANG_BLOCKS, "sglang", **_KV_BF16)
_FP8 = {"gemm_quant_mode": "fp8_static", "kvcache_quant_mode": "fp8"}
_NVFP4 = {"gemm_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"}
_LLAMA_8B, _LLAMA_70B = "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"


def _llama() -> Iterator[_Shipped]:
    for name, model in (("llama-3.1-8b", _LLAMA_8B), ("llama-3.1-70b", _LLAMA_70B)):
        gpus = EVERY if model is _LLAMA_70B else NO_TABLES
        yield _Shipped(name=name, model=model, gpus=gpus, source=_BF16)
        fp8, h100 = _of("fp8", **_FP8), ("h100", "h800") if model is _LLAMA_70B else ()
        others = tuple(gpu for gpu in ("l40s", *HOPPER) if gpu not in h100)
        yield _Shipped(name=f"{name}-fp8", model=model, gpus=others, source=fp8)
        fp8 = _of("fp8", KV_BF16, **{**_FP8, **_KV_BF16})
        yield _Shipped(name=f"{name}-fp8", model=model, gpus=h100, source=fp8)
        fp8 = _of("fp8", SGLANG_FP8, "sglang", **_FP8)
        yield _Shipped(name=f"{name}-fp8", model=model, gpus=BLACKWELL, source=fp8)
    nvfp4 = _of("nvfp4", **_NVFP4)
    yield _Shipped(name="llama-3.1-70b-nvfp4", model=_LLAMA_70B, gpus=BLACKWELL, source=nvfp4)


def _experts() -> Iterator[_Shipped]:
    def one(
        name: str, model: str, gpus: tuple[str, ...], source: KernelSource, *, wide: bool = False
    ) -> _Shipped:
        return _Shipped(
            name=name, model=model, gpus=gpus, source=source, experts=True, two_nodes=wide
        )

    blocks, no_l40s = _BLOCKS, (*HOPPER, *BLACKWELL)
    yield one("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", EVERY, _BF16)
    yield one("qwen3-30b-a3b-fp8", "Qwen/Qwen3-30B-A3B-FP8", no_l40s, blocks)
    yield one("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", ("a100", *no_l40s), _BF16)
    yield one("qwen3-235b-a22b-fp8", "Qwen/Qwen3-235B-A22B-FP8", no_l40s, blocks)
    gpt, mxfp8 = "openai/gpt-oss-120b", {"moe_quant_mode": "w4a8_mxfp4_mxfp8"}
    yield one("gpt-oss-120b", gpt, ("l40s", *HOPPER), _of("mxfp4"))
    yield one("gpt-oss-120b", gpt, BLACKWELL, _of("mxfp4", SGLANG_MXFP8, "sglang", **mxfp8))
    by_tensor = _of("fp8", f"{BY_TENSOR}; {KV_UNSCALED}", gemm_quant_mode="fp8", **_KV_BF16)
    yield one("minimax-m2.5", "MiniMaxAI/MiniMax-M2.5", no_l40s, by_tensor)
    fp4 = _of("nvfp4")
    yield one("minimax-m2.5-nvfp4", "nvidia/MiniMax-M2.5-NVFP4", BLACKWELL, fp4)
    deepseek = "deepseek-ai/DeepSeek-V3"
    hopper = replace(blocks, backend="vllm", note=VLLM_BLOCKS)
    yield one("deepseek-v3", deepseek, MLA[:2], hopper, wide=True)
    yield one("deepseek-v3", deepseek, BLACKWELL, blocks, wide=True)
    yield one("kimi-k2.5", "moonshotai/Kimi-K2.5", MLA, _of("int4"), wide=True)
    yield one("kimi-k2.5-nvfp4", "nvidia/Kimi-K2.5-NVFP4", BLACKWELL, fp4, wide=True)


def make_profiles(only: str = "") -> Iterator[Profile]:
    """Make all profiles, or those of the model called `only`.

    Raises:
        EstimatorError: the package is missing, or has another version's models and classes.
    """
    for each in (*_llama(), *_qwen(), *_experts()):
        if only not in ("", each.name):
            continue
        shapes = layouts(expert_parallel=each.experts, attention_dp=RANKS if each.experts else (1,))
        shapes = tuple(shape for shape in shapes if shape.gpus <= 8)
        if each.two_nodes:
            shapes += (EngineShape("", 16, ep=16),)
        for gpu in each.gpus:
            yield with_capacity(fit_shapes(each.model, gpu, shapes, each.source, name=each.name))


def with_capacity(profile: Profile) -> Profile:
    """Return a profile of latent attention, or of weights in MXFP4, with the KV capacity of our own
    count of memory.

    The package's is 11 to 20 % below what engines of DeepSeek-R1 report (`kv_cache_sizes.csv`) and
    lacks what kernels of MXFP4 hold beside the weights; that of other models is within 5 %.
    """
    shape = shape_of(profile)
    own = shape is not None and (shape.attention or shape.precisions.experts == "mxfp4")
    if shape is None or not own:
        return profile
    tables = {}
    for layout, entry in profile.tables.items():
        tp, dp, ep = read_layout(layout)
        engine = EngineShape(profile.gpu, tp, dp=dp, ep=ep)
        tokens = kv_capacity_tokens(shape, engine, gpu_class(profile.gpu))
        estimate = replace(entry.belief, kv_capacity_tokens=tokens)
        tables[layout] = replace(entry, kv_capacity_tokens=tokens, belief=estimate)
    return replace(profile, tables=tables)


def _qwen() -> Iterator[_Shipped]:
    for name, model in (("qwen3-8b", "Qwen/Qwen3-8B"), ("qwen3-32b", "Qwen/Qwen3-32B")):
        yield _Shipped(name=name, model=model, gpus=NO_TABLES, source=_BF16)
    gpus = (*HOPPER, *BLACKWELL)
    yield _Shipped(name="qwen3-32b-fp8", model="Qwen/Qwen3-32B-FP8", gpus=gpus, source=_BLOCKS)


@click.command("shipped")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the profile files.",
)
@click.option("--only", default="", help="Name of one model [all]")
def command(out: Path, only: str) -> None:
    """Fit the shipped profiles from AIConfigurator's package."""
    try:
        for profile in make_profiles(only):
            click.echo(write_profiles([profile], out)[0])
    except EstimatorError as e:
        raise click.ClickException(str(e)) from e
