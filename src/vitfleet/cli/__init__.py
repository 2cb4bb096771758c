"""The command ``vitfleet``. Help is fast: torch is imported only by the commands that compute."""

from __future__ import annotations

import sys
from importlib import import_module

from vitfleet.cli.base import app, error_console
from vitfleet.errors import UserError

# Importing a module adds its commands to the application, in the order in which help lists them.
for module in ("train", "compare", "inspect", "models", "fleet", "new"):
    import_module(f"{__name__}.{module}")


def main() -> None:
    """Run the command line. An error that the user can fix is one sentence and exit code 2."""
    try:
        app()
    except UserError as error:
        error_console.print(f"vitfleet: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
