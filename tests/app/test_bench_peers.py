"""The benchmark against other simulators, with stubs in their place."""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

from heddle_trace.complete import MissingRules, complete
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.synth import synth

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_peers.py"

STUB = """#!{python}
import json, sys
from pathlib import Path

def after(flag):
    return sys.argv[sys.argv.index(flag) + 1]

if sys.argv[1] == "-c":
    print("9.8.7")
elif sys.argv[2] == "aisimulate":
    case = json.loads(Path(after("-c")).read_text())
    rows = Path(case["traffic"]["source"]["paths"][0]).read_text().splitlines()
    folder = Path(after("--output-dir"))
    folder.mkdir(exist_ok=True)
    found = {{"completed_requests": len(rows) - {lost}, "prefix_cache_reused_ratio": 0.25}}
    (folder / "prediction.json").write_text(json.dumps(found))
else:
    rows = Path(after("--trace_request_generator_config_trace_file")).read_text().splitlines()
    folder = Path(after("--metrics_config_output_dir")) / "now"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "request_metrics.csv").write_text("\\n".join(rows))
"""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # as when it is run
    try:
        spec = importlib.util.spec_from_file_location("bench_peers", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        del sys.path[0]


@pytest.fixture(scope="module")
def scripts() -> tuple[TrajectoryScript, ...]:
    records = synth("coding", trajectories=16, seed=11)
    found, _ = complete(Trace("all", tuple(records), ""), rules=MissingRules(), seed=0)
    return tuple(found)


def stub(folder: Path, lost: int = 0) -> Path:
    """An interpreter of an environment with both peers; one of them loses steps."""
    folder.mkdir()
    path = folder / "python"
    path.write_text(STUB.format(python=sys.executable, lost=lost))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(*options: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )


SMALL = ("--trajectories", "16", "--gpus", "1", "--rounds", "1", "--policies", "verl")


def test_each_tool_runs_the_whole_load_in_turn(tmp_path: Path, scripts):
    python = stub(tmp_path / "bin")
    done = run("--aisimulate", python.with_name("aisimulate"), "--vidur", python, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    steps = sum(len(script.steps) for script in scripts)
    tokens = sum(step.output_tokens for script in scripts for step in script.steps)
    assert f"16 coding trajectories, {steps} steps, {tokens / 1e6:.2f} M output tokens" in lines[0]
    names = [line[9:23].strip() for line in lines if line.startswith("round 1: ")]
    assert names == ["heddle verl", "AISimulate", "Vidur"]


@pytest.mark.soak
def test_a_peer_that_leaves_steps_out_is_no_comparison(tmp_path: Path, scripts):
    done = run("--aisimulate", stub(tmp_path / "bin", lost=3), *SMALL)
    steps = sum(len(script.steps) for script in scripts)
    assert done.returncode == 1
    assert done.stderr == f"AISimulate 9.8.7 simulated {steps - 3} of {steps} steps\n"
    assert "vidur is not installed" in done.stdout


def test_a_path_without_the_peer_is_refused_and_no_path_leaves_it_out(tmp_path: Path):
    empty = tmp_path / "python"
    done = run("--vidur", empty)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: --vidur {empty}: {empty} has no package vidur\n")
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["aisimulate", "vidur"]


@pytest.mark.parametrize(
    ("script", "options", "status", "said"),
    [
        ("bench_peers.py", ("--rounds", "0"), 2, "error: --rounds must be 1 or more"),
        ("bench_peers.py", ("--trajectories", "0"), 2, "error: --trajectories must be 1 or more"),
        ("bench_paper.py", ("--runs", "0"), 2, "error: --runs must be 1 or more"),
        ("bench_paper.py", ("--core", "100000"), 1, "--core 100000: choose one of "),
        ("bench_paper.py", ("--policies", "no-such"), 2, "Error: no policy is called 'no-such'"),
    ],
)
def test_options_that_measure_nothing_are_refused(
    script: str, options: tuple[str, ...], status: int, said: str
):
    done = subprocess.run(
        [sys.executable, SCRIPT.with_name(script), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_steps_add_makes_up_their_contexts(bench: ModuleType, scripts):
    rows = [json.loads(line) for line in bench.mooncake_delta(scripts)]
    assert sum(len(row["hash_ids"]) for row in rows) == len(
        {i for r in rows for i in r["hash_ids"]}
    )
    for script in scripts:
        mine = [row for row in rows if row["session_id"] == script.id]
        grown = list(accumulate(row["input_length"] + row["output_length"] for row in mine))
        assert grown == [step.prompt_tokens + step.output_tokens for step in script.steps]
        assert [row["delay"] for row in mine[1:]] == [1e3 * s.tool_s for s in script.steps[:-1]]
        blocks = [-(-row["input_length"] // bench.BLOCK_TOKENS) for row in mine]
        assert [len(row["hash_ids"]) for row in mine] == blocks


def test_ratios_are_of_the_load_without_the_start_up(bench: ModuleType):
    def tool(name: str) -> object:
        return bench.Tool(name=name, version="1", commands={}, outcome=lambda: (0, None))

    def lines(*mine: tuple[float, float]) -> list[str]:
        theirs = [(5.0, 15.0), (6.0, 36.0), (4.0, 40.0)]
        pairs = {"mine": mine, "theirs": theirs}
        took = {name: [bench.Took(*pair) for pair in each] for name, each in pairs.items()}
        shares = {"mine": 0.5, "theirs": None}
        return [*bench.report([tool("mine")], [tool("theirs")], took, 2_000_000, shares)]

    found = lines((1.0, 2.0), (1.0, 3.0), (1.5, 5.5))
    assert found[1].split() == ["mine", "1.00", "2.00", "0.50", "1"]
    assert found[2].split() == ["theirs", "11.00", "0.18", "none", "1"]
    assert found[-1] == "theirs over mine: 11.0 (9.0 to 15.0)"
    (line,) = lines((1.0, 2.0), (1.0, 0.9), (1.0, 5.0))
    assert "too small" in line


def test_a_decoding_iteration_takes_as_long_in_the_peer_as_here(bench: ModuleType):
    table = bench.load_profile("llama-3.1-8b", "h100").table(1)
    tables = {
        name: [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
        for name, (head, *lines) in (
            (name, text.splitlines()) for name, text in bench.vidur_operations(table).items()
        )
    }
    batch, context = 1, 4096
    layer_ms = sum(
        float(value)
        for row in tables["mlp"]
        if row["num_tokens"] == str(batch)
        for key, value in row.items()
        if key.startswith("time_stats")
    )
    (decode,) = (
        float(row["time_stats.attn_decode.median"])
        for row in tables["attention"]
        if (row["prefill_chunk_size"], row["batch_size"], row["kv_cache_size"])
        == ("0", str(batch), str(context))
    )
    here_s = table.base_s[batch] + table.per_context_s[batch] * batch * context
    assert (layer_ms + decode) * bench.LAYERS / 1e3 == pytest.approx(here_s)
