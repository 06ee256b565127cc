"""Whole inputs that the fuzzed ones are made from: one folder, filled once."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from click.testing import CliRunner

from heddle.cli import main
from heddle.diagnosis.own_runs import observed_run
from heddle.runs import load_run
from heddle_trace.observed.files import write_observed

ROOT: Final = Path(__file__).resolve().parents[2]
CLUSTER: Final = ("--gpus", "2", "--max-running", "2")
CONFIG: Final = """\
trace = "in.jsonl"
seed = 3

[cluster]
gpus = 2
max_running = 2
tool_capacity = 4

[policy]
preset = "verl"

[prices]
h100 = 2.1
"""
MODEL: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LOGS: Final = ROOT / "tests" / "trace" / "fixtures"
"""A small log of every format that is imported."""
OBSERVED: Final = ROOT / "tests" / "trace" / "observed_logs"
"""A small log of every format of measured steps."""
FOLDERS: Final = ("logs", "observed", "run")


def _trace() -> list[dict[str, Any]]:
    return [
        {
            "trajectory_id": f"g{group}/{sample}",
            "group_id": f"g{group}",
            "workload": "coding",
            "prompt_tokens": 200 + 10 * group,
            "arrival_s": 0.5 * sample,
            "reward": 1.0,
            "steps": [
                {
                    "output_tokens": 11 + 7 * i + sample,
                    "tool": "bash" if i < group else None,
                    "tool_s": 0.5 + 0.1 * i if i < group else 0.0,
                    "tool_tokens": 30 if i < group else 0,
                    "tool_ok": True,
                }
                for i in range(group + 1)
            ],
        }
        for group in range(2)
        for sample in range(2)
    ]


def _lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _observed(run: Path, path: Path) -> bytes:
    steps = observed_run(load_run(run))
    write_observed(path, steps.header, steps.observations())
    return path.read_bytes()


@lru_cache
def originals() -> dict[str, bytes]:
    """Return files by name; logs are in `logs` and `observed`, a run directory is `run`."""
    folder = Path(mkdtemp(prefix="heddle-fuzz-"))
    try:
        trace = folder / "in.jsonl"
        trace.write_bytes(_lines(_trace()))
        done = CliRunner().invoke(
            main,
            [
                *("compare", str(trace), "--policies", "verl", "--json"),
                *("--out", str(folder / "runs"), *CLUSTER),
            ],
        )
        assert done.exit_code == 0, done.output
        run = Path(json.loads(done.stdout)["runs"][0]["run"])
        packed = folder / "in.jsonl.gz"
        done = CliRunner().invoke(
            main,
            ["trace", "resample", str(trace), "2", "2", "-o", str(packed)],
        )
        assert done.exit_code == 0, done.output
        return {
            "in.jsonl": trace.read_bytes(),
            "in.jsonl.gz": packed.read_bytes(),
            "in.toml": CONFIG.encode(),
            "profile.json": (ROOT / "heddle_sim/profiles/qwen3-14b.h100.json").read_bytes(),
            "model.json": json.dumps(MODEL, indent=1).encode(),
            "model.heddle": (ROOT / "heddle_predict/shipped.heddle").read_bytes(),
            **{f"logs/{path.name}": path.read_bytes() for path in sorted(LOGS.iterdir())},
            **{f"observed/{path.name}": path.read_bytes() for path in sorted(OBSERVED.iterdir())},
            "observed/own.jsonl": _observed(run, folder / "own.jsonl"),
            **{
                f"run/{path.relative_to(run)}": path.read_bytes()
                for path in sorted(run.rglob("*"))
                if path.is_file()
            },
        }
    finally:
        shutil.rmtree(folder)
