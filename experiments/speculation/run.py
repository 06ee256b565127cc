"""U: published points of speculative decoding beside what the model says of them."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.values import exactly
from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import load_profiles
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle_calibrate.profiles import encode_profile
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import load_profile

SHAPES = ("lognormal", "uniform", "exponential")
"""Of output lengths, where a source states none."""
CONTEXT = 1024
"""Tokens of a sequence in the picture: 256 of them fit into the KV of one H100."""
PROMPT = 300
"""Tokens of a prompt of such a rollout."""


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """The simulated rollouts, one for each shape of lengths."""
    return {
        f"{name} {shape}": Computation(
            question={"speculation": row, "shape": shape, "version": 2},
            make=partial(_rollout, dict(row), shape),
        )
        for name, row in config.items()
        if row["kind"] == "rollout"
        for shape in SHAPES
    }


def measure(context: Context) -> Measured:
    """Each published ratio as the model has it, and the two rollouts by shape of lengths."""
    data: dict[str, Any] = {}
    for name, row in context.config.items():
        if row["kind"] == "rollout":
            made = computations(context.size, {name: row})
            found = {key.split()[1]: context.store.get(each.key) for key, each in made.items()}
            data[name] = {"gain": found["lognormal"]["gain"], "shapes": found}
        else:
            data[name] = {"gain": _KINDS[row["kind"]](row)}
    values = {name: exactly(row["gain"]) for name, row in data.items()}
    del values["skyrl"]  # judged by shape
    for shape, found in data["skyrl"]["shapes"].items():
        values[f"skyrl_{shape}"] = exactly(found["gain"])
    return Measured(values=values, data=data)


def draw(data: Any, path: Path) -> None:
    """Gain by batch size for three GPU types and two acceptances, with the published points."""
    figure, axes = page(3, width=9.5, height=3.4, sharey=True)
    batches = [1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256]
    for ax, (model, gpu) in zip(axes, _PANELS, strict=True):
        for label, accepted in _ACCEPTANCES.items():
            for drafts, line in ((1, ":"), (3, "-")):
                row = {"model": model, "gpu": gpu, "drafts": drafts, "accepted": accepted[:drafts]}
                gains = [_step({**row, "batch": b, "context": CONTEXT}) for b in batches]
                ax.plot(batches, gains, line, label=f"{label}, K = {drafts}")
        ax.axhline(1.0, color="black", linewidth=0.6)
        ax.set(title=f"{model}, {gpu.upper()}", xscale="log", xlabel="sequences of an iteration")
    axes[0].set_ylabel("tokens a second over those without drafts")
    axes[-1].legend(fontsize=7)
    save(figure, path)


_PANELS = (("qwen3-8b", "h100"), ("qwen3-30b-a3b", "h100"), ("qwen3-8b", "h20"))
_ACCEPTANCES = {"0.89/0.77/0.66": (0.886, 0.770, 0.663), "0.55/0.30/0.15": (0.55, 0.30, 0.15)}


def _accepted(row: Mapping[str, Any]) -> Sequence[float]:
    """By position; of a mean advance, one ratio from each draft to the next."""
    if "accepted" in row:
        return [float(each) for each in row["accepted"]]
    most = int(row.get("of", row["drafts"]))
    ratios = np.linspace(0.0, 1.0, 10_001)
    sums = sum(ratios**k for k in range(1, most + 1))
    ratio = float(ratios[np.argmin(np.abs(sums - (row["tokens"] - 1.0)))])
    return [round(ratio**k, 4) for k in range(1, int(row["drafts"]) + 1)]


def _table(row: Mapping[str, Any], speculation: str) -> LatencyTable:
    cluster = ClusterConfig(
        model=row["model"],
        gpu=row["gpu"],
        gpus=8,
        tp=row.get("tp", 1),
        max_running=max(row["batch"], 8),
        speculation=speculation,
    )
    return load_profiles(cluster).classes[0].table(cluster.tp)


def _setting(row: Mapping[str, Any]) -> str:
    return f"{row.get('method', 'eagle3')}:{row['drafts']}:{'/'.join(map(str, _accepted(row)))}"


def _step(row: Mapping[str, Any]) -> float:
    """Tokens a second of an iteration with drafts over those of one without."""
    batch, context = row["batch"], row["context"]
    seconds = []
    for speculation in ("off", _setting(row)):
        table = _table(row, speculation)
        base_s, per_context_s = (each[batch - 1] for each in table.token_s(batch))
        seconds.append(base_s + per_context_s * batch * context)
    return float(seconds[0] / seconds[1])


def _verify(row: Mapping[str, Any]) -> float:
    """Seconds of an iteration of `batch` tokens over those of one token."""
    table = _table(row, "off")
    return float(table.base_s[row["batch"]] / table.base_s[1])


def _loaded(row: Mapping[str, Any]) -> float:
    """What an iteration without drafts takes more where a drafter is loaded."""
    batch, context = row["batch"], row["context"]
    table = _table(row, f"eagle3:1-1=1,2-=0:{0.7}")
    assert table.drafting is not None
    attention_s = table.per_context_s[batch] * batch * context
    return (table.drafting.base_s[0][batch] + attention_s) / (table.base_s[batch] + attention_s)


_KINDS = {"step": _step, "verify": _verify, "loaded": _loaded}


def _rollout(row: dict[str, Any], shape: str) -> Mapping[str, Any]:
    """Makespans without and with drafts of one rollout of answers."""
    lengths = _lengths(row, shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.jsonl"
        path.write_text("".join(_record(row, i, n) for i, n in enumerate(lengths)))
        seconds = []
        for speculation in ("off", _setting(row)):
            cluster = ClusterConfig(
                model=_hybrid(row, Path(folder)) if row.get("scaled") else row["model"],
                gpu=row["gpu"],
                gpus=row["gpus"],
                max_running=256,
                speculation=speculation,
            )
            found = compare(
                RunConfig(trace=str(path), cluster=cluster), ["verl"], out=Path(folder), jobs=1
            )
            seconds.append(found.policies[0].makespan_s.mean)
    return {
        "off_s": seconds[0],
        "drafted_s": seconds[1],
        "gain": seconds[0] / seconds[1],
        "mean_tokens": float(np.mean(lengths)),
    }


def _hybrid(row: Mapping[str, Any], folder: Path) -> str:
    """A profile of Qwen3.5-9B, made of that of Qwen3-8B: 15.9 GB of weights to read in place of
    15.1, and one layer of four with KV over the whole context."""
    profile = load_profile(row["model"], row["gpu"])
    tables = {
        name: replace(
            table,
            kv_capacity_tokens=4 * table.kv_capacity_tokens,
            decode=replace(
                table.decode,
                base_ms=tuple(1.05 * ms for ms in table.decode.base_ms),
                context_us=tuple(us / 4.0 for us in table.decode.context_us),
            ),
        )
        for name, table in profile.tables.items()
    }
    kv_bytes = profile.kv_bytes_per_token // 4
    made = replace(profile, model="qwen3.5-9b", tables=tables, kv_bytes_per_token=kv_bytes)
    path = folder / "qwen3.5-9b.json"
    path.write_bytes(encode_profile(made))
    return str(path)


def _record(row: Mapping[str, Any], number: int, tokens: int) -> str:
    step = {"output_tokens": tokens, "tool": None, "tool_s": 0.0, "tool_tokens": 0}
    return (
        json.dumps(
            {
                "trajectory_id": f"t{number}",
                "group_id": f"g{number // row['samples']}",
                "workload": "math",
                "prompt_tokens": PROMPT,
                "steps": [step],
            }
        )
        + "\n"
    )


def _lengths(row: Mapping[str, Any], shape: str) -> list[int]:
    """Output tokens, at most `most`, with the mean that the source states, or half of that."""
    rng = np.random.default_rng(7)
    count, most = row["prompts"] * row["samples"], row["most"]
    mean = row.get("mean", most / 2)
    drawn = {
        "lognormal": rng.lognormal(0.0, 0.8, count),
        "uniform": rng.uniform(0.1, 1.9, count),
        "exponential": rng.exponential(1.0, count),
    }[shape]
    low, high = 1.0, 100.0 * mean
    for _ in range(60):
        scale = (low + high) / 2.0
        low, high = (scale, high) if np.minimum(drawn * scale, most).mean() < mean else (low, scale)
    return [max(1, int(n)) for n in np.minimum(drawn * low, most)]
