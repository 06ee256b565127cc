"""Replay: the recorded events to a fresh controller, its commands compared with the record."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heddle.loops.config import LoopConfig
from heddle.loops.setup import LoopSetup, loop_core, prepare_loop
from heddle.policies.plugins import foreign_names
from heddle.policy_inputs import SHIPPED, LoadedModel, extras, load_predictor_model, needs_oracle
from heddle.runs import Run, RunError
from heddle.setup import Workspace, make_policy, prepare
from heddle_core.controller import Controller
from heddle_core.journal import Divergence, Entry, Handle, first_divergence
from heddle_core.policy import Policy
from heddle_predict.errors import PredictError
from heddle_trace.errors import TraceError

EVERY = 2_000
"""Events between two calls of `on_progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How far a replay went, and where it left the recorded run, if it did."""

    run: str
    entries: int
    commands: int
    divergence: Divergence | None

    def plain(self) -> dict[str, Any]:
        d = self.divergence
        return {
            "schema": "heddle.runs.replay/1",
            "run": self.run,
            "events": self.entries,
            "commands": self.commands,
            "same": d is None,
            "divergence": None
            if d is None
            else {
                "index": d.index,
                "time_s": d.event.time_s,
                "event": str(d.event),
                "recorded": [str(c) for c in d.recorded],
                "replayed": [str(c) for c in d.replayed],
            },
        }


def replay(
    run: Run,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    allow_policies: Sequence[str] = (),
) -> Replay:
    """Feed a run's events to a fresh controller with its policy, and compare commands one by one.

    `on_progress` gets the number of replayed events and the total. `allow_policies` are names of
    the form ``module:factory`` that the run's configuration may import.

    Raises:
        RunError: the run is damaged, its oracle's trace or its model is gone, or its
            policy is code that is not allowed.
        PolicyNotFound, ProfileError: it used a policy or profile that is not here.
    """
    check_allowed(run, allow_policies)
    run.verify()
    entries = commands = 0
    total = 0
    if on_progress is not None:  # commands have a cause, events have none
        total = sum(batch.column("cause").null_count for batch in run.batches())

    def counted() -> Iterator[Entry]:
        nonlocal entries, commands
        for entry in run.entries():
            entries += 1
            commands += len(entry.commands)
            if on_progress is not None and entries % EVERY == 0:
                on_progress(entries, total)
            yield entry

    context = run.context
    controller = Controller(
        policy_of_run(run),
        context.disaggregation if context else None,
        run.config.cluster.restart_limit,
    )
    handle: Handle = controller.handle
    if run.manifest.get("loop"):
        handle = loop_core(loop_of_run(run), controller).handle
    divergence = first_divergence(counted(), handle)
    return Replay(run=str(run.path), entries=entries, commands=commands, divergence=divergence)


def loop_of_run(run: Run) -> LoopSetup:
    """Set up the loop of a run again; its prompts are in the trace.

    Raises:
        RunError: they are not, or the trace is gone.
    """
    shared, facts = Workspace(), run.manifest["loop"]
    if run.manifest["driver"] == "heddle_runtime":
        raise RunError(
            f"{run.path}: a loop of experiments/real_training, whose prompts are in no trace; "
            "it cannot be replayed"
        )
    check_trace(run, shared, "a replay of its loop needs the trace")
    config = LoopConfig(run=run.config, regimes=(facts["regime"],), **facts["config"])
    return prepare_loop(config, facts["regime"], workspace=shared)


def policy_of_run(run: Run) -> Policy:
    """Build the policy of a run again, with the same context.

    The run directory holds it all, except an oracle's scripts, which are in the trace, and a
    trained model, which is a file of its own.
    """
    config, shared = run.config, Workspace()
    oracle = needs_oracle(config.policy.preset)
    if oracle:
        check_trace(run, shared, "its oracle needs the trace that it knew")
    context = run.context
    model = _model(run)
    if context is not None and model is not None:
        context = replace(context, learned=model.factory)
    if context is None:
        return prepare(config, workspace=shared).policy
    return make_policy(config, context, shared.workload(config).scripts if oracle else ())


def check_allowed(run: Run, allowed: Sequence[str], option: str = "--allow-policy ") -> None:
    """Check that all code that the configuration of a run names, to be imported, is `allowed`.

    Raises:
        RunError: names what is not.
    """
    preset = run.config.policy.preset
    ours = extras(preset, (), run.config.seed)  # such as learned:0.5
    named = [name for name in foreign_names(preset, ours) if name not in allowed]
    if named:
        options = " ".join(f"{option}{name}" for name in named)
        raise RunError(
            f"{run.path}: its configuration names {', '.join(named)}, which would be imported and "
            f"called. If you trust this code, add {options}"
        )


def check_trace(run: Run, shared: Workspace, why: str) -> None:
    """Check that the trace of a run is there and the same; `why` it is needed begins the message.

    Raises:
        RunError: it is gone, damaged or another.
    """
    path, recorded = run.config.trace, run.manifest["trace"]["sha256"]
    wanted = (
        f"{run.path}: {why}, {path} "
        f"(sha256 {recorded[:16]}, seen from the folder in which the run was started)"
    )
    try:
        found = shared.trace(path).sha256
    except TraceError as error:
        raise RunError(f"{wanted}: {error}") from None
    if found != recorded:
        raise RunError(f"{wanted}: the file that is there now has sha256 {found[:16]}")


def _model(run: Run) -> LoadedModel | None:
    """Read the model that a run's predictor read, None when it read none."""
    model = run.manifest.get("predictor_model")
    if model is None:
        return None
    name = run.config.predictor_model
    seen = "" if name == SHIPPED else ", seen from the folder in which the run was started"
    wanted = (
        f"{run.path}: its predictor needs the model that it read, {name} "
        f"(sha256 {model['sha256'][:16]}{seen})"
    )
    try:
        found = load_predictor_model(name)
    except OSError as error:
        raise RunError(f"{wanted}: {error.strerror}") from None
    except PredictError as error:
        raise RunError(f"{wanted}: {error}") from None
    if found.sha256 != model["sha256"]:
        raise RunError(f"{wanted}: the file that is there now has sha256 {found.sha256[:16]}")
    return found
