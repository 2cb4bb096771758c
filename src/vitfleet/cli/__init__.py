"""The command ``vitfleet``: options, questions and what is printed. What is done is done by the API.

Help is fast: modules import torch, and everything that imports it, inside the commands that need it. ``display`` alone
imports them at its top.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from typing import NoReturn

import click
import typer

from vitfleet.cli.base import app, error_console
from vitfleet.cli.usage import usage_sentence
from vitfleet.config import trust
from vitfleet.errors import UserError, describe_os_error

# Importing a module adds its commands to the application, in the order in which help lists them.
for module in ("train", "compare", "inspect", "models", "fleet"):
    import_module(f"{__name__}.{module}")


def main() -> None:
    """Run the command line. An error that the user can fix is one sentence and exit code 2."""
    # Python collects garbage once more before it ends: with torch imported that took 0.8 s of every command.
    atexit.register(gc.freeze)
    trust.ask = _ask
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.UsageError as error:
        _fail(usage_sentence(error, sys.argv[1:]))
    except click.Abort:
        _fail("stopped")
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        sentence = describe_os_error(error)
        if sentence is None:
            raise
        _fail(sentence)


def _ask(what: str) -> bool:
    """Ask whether a plug-in may be run; where nobody can answer it may not."""
    return sys.stdin.isatty() and sys.stderr.isatty() and typer.confirm(f"{what}. Run it?", err=True)


def _fail(sentence: str) -> NoReturn:
    # A path may have bytes that are not UTF-8, which cannot be printed.
    text = f"vitfleet: {sentence}".encode(errors="replace").decode()
    error_console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
