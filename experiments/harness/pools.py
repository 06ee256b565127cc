"""Pools of GPUs as experiments write them."""

from heddle.cluster.gpu_pools import PoolConfig


def read_pool(text: str) -> PoolConfig:
    """Read ``CLASS:GPUS`` or ``CLASS:GPUS:tp=DEGREE``."""
    gpu, gpus, *rest = text.split(":")
    tp = int(rest[0].removeprefix("tp=")) if rest else None
    return PoolConfig(gpu=gpu, gpus=int(gpus), tp=tp)
