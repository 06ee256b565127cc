"""The KV in host memory of a simulated cluster, and the speeds that are assumed."""

from heddle.cluster_config import ClusterConfig
from heddle_sim.config import HostKvConfig

_HOST_KV_GB_PER_S = {"engine": 41.7, "cluster": 10.8}
"""Published, for each GPU: an H100 copies 83.4 GB/s to and from host memory together, in blocks of
2 MB (vLLM's report on its offloading connector, January 2026); eight H200 restore 86.8 GB/s from a
shared store over two links of 400 Gb/s (MinIO's guide to MemKV with vLLM, 2026)."""

_HOST_KV_FIXED_S = 0.02
"""Of a load; assumed: lookup, scheduling and the iteration that it waits for."""


def host_kv_of(cluster: ClusterConfig) -> HostKvConfig | None:
    """Return the KV in host memory of a cluster; None where it has none."""
    if cluster.host_kv == "none":
        return None
    return HostKvConfig(
        scope=cluster.host_kv,
        gpu_bytes=cluster.host_kv_gib * 2**30,
        gpus=cluster.gpus,
        gpu_bytes_per_s=1e9 * (cluster.host_kv_gb_per_s or _HOST_KV_GB_PER_S[cluster.host_kv]),
        fixed_s=_HOST_KV_FIXED_S,
    )
