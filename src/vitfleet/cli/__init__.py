"""The command ``vitfleet``. Help is quick: torch is imported only by the commands that compute."""

from __future__ import annotations

import sys
from importlib import import_module

from vitfleet.cli.base import app, complaints
from vitfleet.errors import UserError

# Their commands join the application as they are imported: in the order in which help lists them.
for room in ("train", "inspect", "fleet"):
    import_module(f"{__name__}.{room}")


def main() -> None:
    """Run the command line; what is the user's to mend is one sentence and exit code 2."""
    try:
        app()
    except UserError as error:
        complaints.print(f"vitfleet: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
