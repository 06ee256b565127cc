"""The command line. Verbs import their modules when they run, so that help is fast."""

import sys
from importlib import import_module
from typing import Any

import rich_click as click
from click.exceptions import NoSuchCommand

import heddle_compiled
from heddle.cli.errors import INTERRUPTED, encodable, exit_with_user_errors
from heddle.cli.help_examples import with_examples
from heddle.cli.help_panels import COMMANDS, with_panels
from heddle.cli.old_forms import new_forms_named
from heddle.signals import terminate_on_signals

VERBS = {
    "demo": "heddle.cli.demo:demo",
    "compare": "heddle.cli.compare:compare",
    "plan": "heddle.cli.plan:plan",
    "loop": "heddle.cli.loop:loop",
    "diagnose": "heddle.cli.diagnose:diagnose",
    "verify": "heddle.cli.verify:verify",
    "run": "heddle.cli.run:run",
    "serve": "heddle.cli.serve:serve",
    "report": "heddle.cli.report:report",
    "replay": "heddle.cli.replay:replay",
    "runs": "heddle.cli.runs:runs",
    "config": "heddle.cli.config:config",
    "policies": "heddle.cli.policies:policies",
    "regimes": "heddle.cli.regimes:regimes",
    "prices": "heddle.cli.prices:prices",
    "trace": "heddle.cli.trace:trace",
    "profile": "heddle.cli.profile:profile",
    "predict": "heddle.cli.predict:predict",
}


class Verbs(click.RichGroup):
    """Imports a verb of `VERBS` when it is used, and turns known errors into one message."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of `VERBS`."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = VERBS.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return with_panels(with_examples(cmd_name, command))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; an error names the verbs that are spelt alike."""
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            raise NoSuchCommand(error.command_name, possibilities=VERBS, ctx=ctx) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments and run; output of help may fail too, on a full disk."""
        encodable()
        with exit_with_user_errors():
            try:
                return super().main(*args, **kwargs)
            except SystemExit as ended:
                # Click ends with status 1 when a signal comes between a command and its exit.
                if isinstance(ended.__context__, click.Abort):
                    sys.exit(INTERRUPTED)
                raise

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments; a signal meanwhile ends it as one during the run does."""
        with exit_with_user_errors(), terminate_on_signals():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run a verb; see `heddle.cli.errors`."""
        with exit_with_user_errors(), terminate_on_signals(), new_forms_named():
            return super().invoke(ctx)


def _version() -> str:
    return heddle_compiled.installed_version() + (
        " (compiled)" if heddle_compiled.in_force() else ""
    )


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), "-V", "--version", prog_name="heddle")
def main() -> None:
    """Schedule agentic RL rollout by trajectory, and see what it brings before you run it.

    Results go to standard output, progress and errors to standard error. Exit status: 0 done;
    1 a check or a run failed; 2 wrong usage or bad input; 130 interrupted.

    \b
    heddle demo                       compare policies on a shipped trace
    heddle compare rollout.jsonl.gz   compare policies on a trace of your own
    heddle compare logs/              the same on a rollout drawn from your logs
    heddle runs                       list what has run
    """


for _name, _verbs in COMMANDS.items():
    main.add_panel(click.RichCommandPanel(_name, commands=list(_verbs)))
