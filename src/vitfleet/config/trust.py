"""Whether a plug-in that a saved configuration names may be run: a run's folder may come from somebody else.

A plug-in is trusted by its content, once it was named on a command line or in Python here, or its owner was asked. What
was trusted is remembered in a file of the user, and by the processes that this one starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from vitfleet.errors import UserError

VARIABLE = "VITFLEET_TRUSTED_PLUGINS"  # hashes, for processes that this one starts
SHOWN_HASH = 12  # characters


#: Asks whether a plug-in may be run that nobody has trusted here, given what it is; the command sets it.
ask: Callable[[str], bool] = lambda what: False  # noqa: E731


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a plug-in's file."""
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        raise UserError(f"plug-in {path}: no such Python file; give the path of a .py file") from None


def check_trusted(paths: Iterable[str]) -> None:
    """Refuse plug-ins that were never named or trusted here."""
    trusted = _trusted()
    for path in (Path(name).expanduser() for name in paths):
        if (digest := hash_of(path)) in trusted:
            continue
        what = f"plug-in {path} (SHA-256 {digest[:SHOWN_HASH]}…) is named by the run and would be run as code"
        if not ask(what):
            raise UserError(f"{what}; read it, then say --trust-plugins (in Python vitfleet.trust_plugins)")
        trust_plugins(path)


def trust_plugins(*paths: str | Path) -> None:
    """Trust plug-in files as they are now: runs that name them may be resumed and used.

    Examples
    --------
    >>> vitfleet.trust_plugins("runs/from-a-friend/mine.py")
    """
    before = _trusted()
    trusted = before | {hash_of(Path(path).expanduser()) for path in paths}
    if trusted == before:
        return
    os.environ[VARIABLE] = ",".join(sorted(trusted))
    with suppress(OSError):  # a home that cannot be written: then this process and those it starts know
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(sorted(trusted)))


def _trusted() -> set[str]:
    in_environment = {digest for digest in os.environ.get(VARIABLE, "").split(",") if digest}
    try:
        stored = json.loads(_file().read_text())
    except (OSError, ValueError):
        return in_environment
    return in_environment | {digest for digest in stored if isinstance(digest, str)}


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "vitfleet" / "trusted-plugins.json"
