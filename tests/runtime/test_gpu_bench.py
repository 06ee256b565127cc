"""`python -m benchmarks.gpu`: its parts on engines on CPU, and how it goes on after a failure."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import gpu
from heddle_runtime.vllm.settings import has_nixl
from tests.runtime.vllm_bench import needs_vllm

pytestmark = needs_vllm


def run(folder: Path, *parts: str, status: int = 0) -> dict[str, Any]:
    out = folder / "gpu.json"
    done = CliRunner().invoke(gpu.main, [*parts, "--out", str(out), "--folder", str(folder)])
    assert done.exit_code == status, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_part_that_fails_is_measured_later_and_the_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def part(name: str, *, fails: bool = False) -> Any:
        async def measured(bench: gpu.Bench) -> dict[str, Any]:
            begun.append(name)
            if fails:
                raise RuntimeError("no engine")
            return {"said": name}

        return measured

    parts = {"one": part("one"), "two": part("two", fails=True), "three": part("three")}
    monkeypatch.setattr(gpu, "PARTS", parts)
    found = run(tmp_path, "all", status=1)
    assert "two" not in found
    parts["two"] = part("two again")
    found = run(tmp_path, "all")
    assert begun == ["one", "two", "three", "two again"]
    assert [found[name]["said"] for name in parts] == ["one", "two again", "three"]
    assert found["schema"] == "heddle.gpu/1"
    assert {"cpu", "gpus"} <= set(found["hardware"])


@pytest.mark.soak
def test_every_part_on_engines_on_cpu(tmp_path: Path) -> None:
    found = run(tmp_path, "engine", "speculation", "drafts", *(["pair"] if has_nixl() else []))
    engine = found["engine"]
    assert {row["batch"] for row in engine["decode"]} == {1, 4}
    assert all(row["prefill_ms"] > 0 for row in engine["prefill"])
    drafts = found["drafts"]
    by_name = {**found["speculation"], **drafts}
    assert {"plain", "ngram1", "ngram3"} <= set(by_name)
    for name, drafted in (("plain", 0), ("ngram1", 1), ("ngram3", 3)):
        for row in by_name[name]["decode"]:
            assert row.get("num_draft_tokens", 0.0) <= 1.1 * drafted
            assert row["tokens_of_each"] >= 0.9
    assert by_name["ngram3"]["rollout"]["tokens"] == by_name["plain"]["rollout"]["tokens"]
    if has_nixl():
        killed = found["pair"]["killed"]
        assert killed["whole"] == killed["clients"]
