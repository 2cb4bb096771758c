"""What a run will take, shown before it starts; one that would take days or does not fit needs consent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitfleet.cli.base import console, error_console, print_text
from vitfleet.errors import UserError

if TYPE_CHECKING:
    from vitfleet.config.schema import Config
    from vitfleet.costs.estimate import RunEstimate

Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Start it even if it would take days, or more memory or disk than is free.")
]


def confirm_run(config: Config, folder: Path, yes: bool) -> None:
    """Show what a run will take on this machine, and see that it is wanted: see :func:`require_consent`.

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

    print_text(console, f"{heading}: {estimate_line(estimate)}")
    if estimate.remark:
        print_text(console, f"note: {estimate.remark}")


def require_consent(estimate: RunEstimate, folder: Path, yes: bool) -> None:
    """If runs take too much, ask, or refuse them where nobody can answer.

    Parameters
    ----------
    folder
        Where the runs are stored.
    yes
        Whether the user has consented already.

    Raises
    ------
    UserError
        The runs would take days or do not fit, and nobody consented.
    """
    from vitfleet.costs.estimate import available
    from vitfleet.report.console.costs import too_much

    problem = too_much(estimate, available(estimate.device, folder))
    if problem is None or yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"not started: {problem}; make it smaller, or start it with --yes")
    print_text(error_console, f"This is much: {problem}.")
    if not typer.confirm("Start it anyway?", err=True):
        raise UserError("not started")
