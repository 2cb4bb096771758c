"""A command line that cannot be read: one sentence with what is wrong and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import click

# Words for a command in other tools.
_OTHER_NAMES = {
    "train": "run",
    "start": "run",
    "search": "compare",
    "sweep": "compare",
    "tune": "compare",
    "list": "presets",
    "ls": "presets",
    "methods": "keys --methods",
    "test": "evaluate",
    "infer": "predict",
}
_NUMBER_RANGE = re.compile(r"(?P<value>'.*') is not a valid (integer|float)( range)?")
_UNKNOWN_COMMAND = re.compile(r"No such command '(?P<name>.*?)'\.")


def usage_sentence(error: click.UsageError, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command's ``arguments``, and the remedy."""
    context = error.ctx or click.Context(click.Command("vitfleet"), info_name="vitfleet")
    command = _path(context) if error.ctx else " ".join(["vitfleet", *arguments[:1]])
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error, command, arguments)
    if isinstance(error, click.BadOptionUsage):
        return f"{error.option_name}: needs a value; `{command} --help` explains it"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        if isinstance(error.param, click.Option):
            name, meaning = max(error.param.opts, key=len), (error.param.help or "").rstrip(".")
            return f"{name}: is missing; `{command}` needs it: {meaning}"
        return f"{error.param.make_metavar(context)}: is missing; `{command} --help` explains it and has examples"
    if isinstance(error, click.BadParameter) and error.param is not None:
        problem = _NUMBER_RANGE.sub(r"must be a number, not \g<value>", error.message.rstrip("."))
        return f"{max(error.param.opts, key=len)}: {problem}; `{command} --help` explains it"
    if unknown := _UNKNOWN_COMMAND.match(error.message):
        return _unknown_command(unknown["name"], context)
    return f"`{command}`: {error.message[:1].lower()}{error.message[1:].rstrip('.')}; `{command} --help` explains it"


def _path(context: click.Context) -> str:
    """Return a command with those that it is a part of: ``vitfleet new method``."""
    return "vitfleet" if context.parent is None else f"{_path(context.parent)} {context.info_name}"


def _unknown_command(name: str, context: click.Context) -> str:
    assert isinstance(context.command, click.Group)
    known = list(context.command.commands)
    close = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    guess = f"did you mean `{_path(context)} {close}`? " if close else ""
    return f"{name}: no such command; {guess}`{_path(context)} --help` lists them"


def _unknown_option(error: click.NoSuchOption, command: str, arguments: Sequence[str]) -> str:
    """Name the key that was meant as an option, or a similar option."""
    assert error.ctx is not None
    option, value = _given(error.option_name, arguments)
    own = [name for parameter in error.ctx.command.params for name in parameter.opts]
    if f"{option}s" in own:  # --seed and --seeds
        return f"{option}: no such option of `{command}`; did you mean {option}s?"
    if "--override" in own and (key := _key(option.lstrip("-").replace("-", "_"))):
        return f"{option}: no such option of `{command}`; it is the key {key}, set with -o {key}={value or 'VALUE'}"
    close = difflib.get_close_matches(option, own, n=1)
    guess = f"did you mean {close[0]}?" if close else f"`{command} --help` lists them"
    return f"{option}: no such option of `{command}`; {guess}"


def _given(option: str, arguments: Sequence[str]) -> tuple[str, str | None]:
    """Return an option as it was written, and its value."""
    for position, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name == option:
            following = arguments[position + 1 : position + 2]
            return option, value if sign else next((word for word in following if not word.startswith("-")), None)
    return option, None


def _key(name: str) -> str | None:
    """Return the key of this name, in whatever table; ``None`` if there is none or several."""
    from vitfleet.config.keys import every_key

    keys = {key.name for key in every_key() if not key.variant}
    if name in keys:
        return name
    found = [key for key in sorted(keys) if key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else None
