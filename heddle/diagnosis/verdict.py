"""Where the time went, in a sentence and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from heddle.diagnosis.engines import diagnose_engines, sampled_engines
from heddle.diagnosis.parts import CriticalPath, EngineTime, Step, diagnose
from heddle.diagnosis.remedies import Remedy
from heddle_trace.errors import TraceError
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.schema import TIMES

SCHEMA: Final = "heddle.diagnose/1"
NAMED: Final = 3
"""Parts in the sentence, of `WORTH` of the step at least."""
WORTH: Final = 0.05
WORDS: Final[Mapping[str, str]] = {
    "tail": "waits for the longest trajectories",
    "stalled": "has no request on an engine although trajectories wait: engine or client stalled",
    "queue": "waits for an engine",
    "prefill": "is prefill of new context",
    "prefill_moved": "is prefill of contexts that another engine had",
    "prefill_again": "is prefill of contexts that the engine had dropped",
    "decode": "is decode",
    "llm": "is generation, whose prefill and decode were not recorded apart",
    "lost": "was lost to engines that failed",
    "tool": "waits for tools",
    "env_start": "starts environments",
    "reward": "waits for rewards",
    "training": "is training",
    "update": "updates weights",
    "other": "is validation, checkpoints and the like",
    "idle": "has no trajectory",
    "rollout": "is rollout, of which no part is recorded",
    "no_request": "has no request on an engine: tools, environments, rewards or training",
    "unaccounted": "is unaccounted",
}
_WHOLE: Final = (
    " No trajectory is recorded: this is what steps and their phases took, a rollout on average."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where the time of all measured steps went."""

    source: str
    steps: tuple[Step, ...]
    paths: tuple[CriticalPath, ...]
    engines: tuple[EngineTime, ...]
    alone: bool
    """Trajectories were measured by themselves."""
    absent: tuple[str, ...]
    """Parts of requests that the source does not record."""
    whole: bool = False
    """No trajectory and no engine was recorded: only whole steps and their phases."""

    @property
    def total_s(self) -> float:
        """Of all steps."""
        return sum(step.end_s - step.start_s for step in self.steps)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part over all steps, the largest first; the unaccounted last."""
        return summed(step.parts for step in self.steps)

    @property
    def sentence(self) -> str:
        """The largest parts, and the share of all."""
        total_s = self.total_s or 1.0
        shares = [(name, seconds / total_s) for name, seconds in self.parts.items()]
        shares = [each for each in shares if each[1] >= WORTH][:NAMED] or shares[:1]
        of = "the time of your trajectories" if self.alone else "your step"
        said = [
            f"{share * 100.0:.0f} % {f'of {of} ' if at == 0 else ''}{self.words(name)}"
            for at, (name, share) in enumerate(shares)
        ]
        blind = {"prefill", "decode"} <= set(self.absent)
        limit = " No time of a generation is recorded." if blind else ""
        return "; ".join(said) + "." + (_WHOLE if self.whole else limit)

    def words(self, name: str) -> str:
        """What a part is."""
        steps = [step for step in self.steps if step.parts.get("tail")]
        if name != "tail" or self.whole or not steps:
            return WORDS[name]
        longest, of = (
            round(sum(getattr(step, field) for step in steps) / len(steps))
            for field in ("longest", "trajectories")
        )
        return f"waits for the {longest:,} longest of {of:,} trajectories"

    def plain(self, remedies: Sequence[Remedy], why_none: str) -> dict[str, Any]:
        total_s = self.total_s or 1.0
        return {
            "schema": SCHEMA,
            "verdict": self.sentence,
            "source": self.source,
            "measured_s": self.total_s,
            "parts": [
                {"part": name, "seconds": seconds, "share": seconds / total_s}
                for name, seconds in self.parts.items()
            ],
            "not_recorded": list(self.absent),
            "steps": [asdict(step) for step in self.steps],
            "longest": [asdict(path) for path in self.paths],
            "engines": [asdict(engine) for engine in self.engines],
            "remedies": [asdict(each) for each in remedies],
            "no_remedies": why_none or None,
        }


def summed(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by part, the largest first; the unaccounted last."""
    found: dict[str, float] = {}
    for parts in several:
        for name, seconds in parts.items():
            found[name] = found.get(name, 0.0) + seconds
    rest = {"unaccounted": found.pop("unaccounted", 0.0)}
    return dict(sorted(found.items(), key=lambda each: -each[1])) | rest


def diagnosed(steps: ObservedSteps, name: str) -> Diagnosis:
    """Where the time of measured steps went; `name` is their source.

    Raises:
        TraceError: they cannot be of one run, or take no time.
    """
    of = diagnose_engines if not steps.count and steps.engines else diagnose
    measured, paths, engines = of(steps)
    if not any(step.end_s > step.start_s for step in measured):
        raise TraceError("all that was measured begins and ends at one time: give logs of a step")
    if not engines and steps.engines:
        engines = sampled_engines(steps, *measured)
    known: set[str] = {name for name in TIMES if name in steps.requests or name in steps.engines}
    known |= {f"{each.phase}_s" for each in steps.phases}
    whole = "llm_s" in known or any("llm" in step.parts for step in measured)
    known |= {"prefill_s", "decode_s"} if whole else set()
    absent = [n for n in TIMES if n not in known and n not in ("llm_s", "lost_s")]
    return Diagnosis(
        source=name,
        steps=tuple(measured),
        paths=tuple(paths),
        engines=tuple(engines),
        alone=steps.header.clock == "trajectory",
        absent=tuple(n.removesuffix("_s") for n in absent),
        whole=not steps.count and not steps.engines,
    )
