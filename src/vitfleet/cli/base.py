"""Shared by all commands: the application, its two consoles, and consent to runs that take long."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from vitfleet import __version__
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.api.request import RunRequest
    from vitfleet.config.schema import Config
    from vitfleet.costs.estimate import RunEstimate
    from vitfleet.run.output.folder import RunFolder

INTERRUPTED = 130  # exit code of a command that was stopped, as shells have it

app = typer.Typer(
    help="Train vision transformers across a fleet of edge devices.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
error_console = Console(stderr=True)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"vitfleet {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def with_options(override: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a command sets: those of its options that are given, then those of ``-o``."""
    from vitfleet.config.load import parse_overrides

    given = {key: value for key, value in options.items() if value is not None}
    return {**given, **parse_overrides(override)}


def reserve_stdout(as_json: bool) -> None:
    """Print to standard error instead if standard output is reserved for JSON."""
    console.stderr = as_json


def say(text: str) -> None:
    """Print text unchanged: without markup, colours or line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print text unchanged to standard error."""
    error_console.print(text, highlight=False, markup=False, soft_wrap=True)


def raise_interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal like Ctrl-C."""
    raise KeyboardInterrupt


def interrupt_once() -> None:
    """Have SIGTERM and Ctrl-C interrupt a command whose own processes must end with it; what comes later is ignored.

    Users press Ctrl-C again when nothing happens at once: that would leave some of these processes behind.
    """

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        _handle_stops(signal.SIG_IGN)
        raise KeyboardInterrupt

    _handle_stops(interrupt)


def end_at_once() -> None:
    """Have SIGTERM and Ctrl-C end a command that has nothing left to do or to say, without a traceback."""
    _handle_stops(lambda signum, frame: os._exit(INTERRUPTED))


def _handle_stops(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def create_confirmed(request: RunRequest, yes: bool) -> RunFolder:
    """Create the folder of a new run whose start is wanted."""
    from vitfleet.api.run import create_run

    folder, _ = create_run(request)
    try:
        confirm_run(folder.config(), folder.path, yes)
    except BaseException:
        folder.discard()
        raise
    return folder


def confirm_run(config: Config, folder: Path, yes: bool) -> None:
    """Show what a run will take on this machine, and require consent if it is much.

    The sizes of data that must be decoded or downloaded first are not known: then nothing is shown. What clients on
    other machines take is not part of it.
    """
    from vitfleet.costs.estimate import estimate_run

    estimate = estimate_run(config)
    if estimate is not None:
        remote = config.fleet.kind == "flower"
        show_estimate("estimated for this machine, without the clients" if remote else "estimated", estimate)
        require_consent(estimate, folder, yes)


def show_estimate(heading: str, estimate: RunEstimate) -> None:
    """Print what runs will take, and what would change it."""
    from vitfleet.report.console.costs import estimate_line

    say(f"{heading}: {estimate_line(estimate)}")
    if estimate.remark:
        say(f"note: {estimate.remark}")


def require_consent(estimate: RunEstimate, folder: Path, yes: bool) -> None:
    """If runs that are stored in a folder take too much, ask, or refuse them where nobody can answer.

    With ``yes`` the user has consented already.
    """
    from vitfleet.costs.estimate import available
    from vitfleet.report.console.costs import too_much

    problem = too_much(estimate, available(estimate.device, folder))
    if problem is None or yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"not started: {problem}; make it smaller, or start it with --yes")
    warn(f"This is much: {problem}.")
    if not typer.confirm("Start it anyway?", err=True):
        raise UserError("not started")
