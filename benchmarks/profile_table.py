"""The shipped profiles as a table, as in docs/tables/shipped_profiles.txt.

    python benchmarks/profile_table.py > docs/tables/shipped_profiles.txt

A row for each model and engine whose kernels were timed. Errors are relative, in percent, over all
layouts and GPU classes of the row: the median of medians, and the worst.
"""

from collections.abc import Sequence
from statistics import median

from heddle_sim.profile_files import Profile, known_profiles, load_profile

GPUS = ("a100", "l40s", "h100", "h800", "h200", "h20", "b200", "b300", "gb200")
HEAD = (
    "| model | weights | KV bytes per token | kernels | GPU classes | layouts "
    "| decode, unseen contexts | prompts alone | mixed steps | cost estimate |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def rows() -> list[str]:
    """The table in Markdown, line by line."""
    groups: dict[tuple[str, str], list[Profile]] = {}
    for model, gpu in known_profiles():
        profile = load_profile(model, gpu)
        groups.setdefault((model, profile.source.backend), []).append(profile)
    return [*HEAD, *(_row(profiles) for _, profiles in sorted(groups.items()))]


def _row(profiles: Sequence[Profile]) -> str:
    profiles = sorted(profiles, key=lambda p: GPUS.index(p.gpu))
    first = profiles[0]
    layouts = [len(p.tables) for p in profiles]
    cells = (
        f"`{first.model}`",
        first.source.precision,
        _kv_bytes(profiles),
        {"vllm": "vLLM", "sglang": "SGLang"}[first.source.backend],
        ", ".join(p.gpu_label for p in profiles),
        f"{min(layouts)} to {max(layouts)}" if min(layouts) < max(layouts) else str(layouts[0]),
        *(_errors(profiles, kind) for kind in ("decode_unseen", "prefill", "mixed")),
        _errors(profiles, "belief_unseen"),
    )
    return f"| {' | '.join(cells)} |"


def _kv_bytes(profiles: Sequence[Profile]) -> str:
    """One number, or each with its classes where they differ."""
    classes: dict[int, list[str]] = {}
    for p in profiles:
        classes.setdefault(p.kv_bytes_per_token, []).append(p.gpu)
    if len(classes) == 1:
        return f"{profiles[0].kv_bytes_per_token:,}"
    return "; ".join(f"{size:,} ({', '.join(gpus)})" for size, gpus in classes.items())


def _errors(profiles: Sequence[Profile], kind: str) -> str:
    found = [t.errors[kind] for p in profiles for t in p.tables.values() if kind in t.errors]
    found = [each for each in found if each["points"]]
    if not found:
        return "none"
    middle = median(each["median_pct"] for each in found)
    return f"{middle:.1f} / {max(each['worst_pct'] for each in found):.0f}"


if __name__ == "__main__":
    print("\n".join(rows()))
