"""Hold a shipped profile against the times of `python -m benchmarks.gpu`: steps and prompts.

    python -m benchmarks.check_gpu benchmarks/gpu_h200.json [--gpu h200]

Kernel times were not fitted on these runs; the host time of their own release is of them. Steps
are given with each release's host time that the profile has.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import click

from heddle.cli.errors import exit_with_user_errors
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import load_profile

CHUNK = 8192
"""vLLM's `--max-num-batched-tokens` in these runs."""


def decode_ms(table: LatencyTable, batch: int, context: float) -> float:
    """Milliseconds of an iteration of a batch with so many tokens of context each."""
    return 1000.0 * (table.base_s[batch] + table.per_context_s[batch] * batch * context)


def prefill_ms(table: LatencyTable, prompt: int, cached: int) -> float:
    """Milliseconds of a prompt alone, in chunks of at most `CHUNK` tokens."""
    seconds, start = 0.0, cached
    while start < prompt:
        new = min(CHUNK, prompt - start)
        seconds += table.base_s[0] + table.host_per_prefill_s
        seconds += table.prefill_s(new, new * (start + new / 2))
        start += new
    return 1000.0 * seconds


class Compared(NamedTuple):
    """One measured time beside the profile's."""

    kind: str
    what: str
    measured_ms: float
    simulated_ms: float

    @property
    def off_pct(self) -> float:
        """How much too slow the simulated time is, in percent of the measured one."""
        return 100.0 * (self.simulated_ms / self.measured_ms - 1.0)


def compared(found: dict[str, Any], table: LatencyTable) -> list[Compared]:
    """Every measured iteration and prompt of one engine."""
    rows = []
    for row in found["engine"]["decode"]:
        batch = int(row["batch"])
        # A sequence grows by a token an iteration, and some came before the window.
        simulated = decode_ms(table, batch, row["context"] + row["iterations"])
        what = f"{batch:>4} x {row['context']:>6}"
        rows.append(Compared("decode", what, row["iteration_ms"], simulated))
    for row in found["engine"]["prefill"]:
        simulated = prefill_ms(table, row["prompt"], row["cached"])
        what = f"{row['prompt'] - row['cached']:>6} + {row['cached']:>5} cached"
        rows.append(Compared("prefill", what, row["prefill_ms"], simulated))
    return rows


@click.command(help=__doc__)
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--gpu", default="h200", show_default=True, help="GPU class of the profile")
def main(path: Path, gpu: str) -> None:
    """Print measured and simulated times side by side."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        profile = load_profile(found["model"], gpu).of_version(found["vllm"])
        table, capacity = profile.table(1), found["engine"]["kv_cache_tokens"]
        rows = compared(found, table)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        text = f"{path}: no times of `python -m benchmarks.gpu`: {error!r}"
        raise click.ClickException(text) from None
    for row in rows:
        click.echo(
            f"{row.kind} {row.what}: measured {row.measured_ms:.2f} ms, "
            f"simulated {row.simulated_ms:.2f} ms ({row.off_pct:+.1f} %)"
        )
    click.echo(f"KV: measured {capacity} tokens, profile {table.kv_capacity_tokens:,}")
    for version in profile.host_versions or {"": None}:
        rows = compared(found, profile.of_version(version).table(1))
        for kind in ("decode", "prefill"):
            off = [row.off_pct for row in rows if row.kind == kind]
            size = [abs(each) for each in off]
            click.echo(
                f"{kind}, host time of {version or 'the profile'}: median "
                f"{statistics.median(size):.1f} %, worst {max(size):.1f} %, "
                f"mean {statistics.fmean(off):+.1f} %, {len(off)} rows"
            )


if __name__ == "__main__":
    with exit_with_user_errors():
        main()
