"""Errors that the user can fix. The command prints their message without a traceback and exits with code 2."""

import errno

# What a file system or a full machine refuses; a defect of the program is none of these.
_OUTSIDE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EIO, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EFBIG, errno.ESTALE, errno.ENODEV),
}


def describe_os_error(error: OSError) -> str | None:
    """Return what the system refused, as a sentence; ``None`` if the user cannot know what to do about it."""
    if error.errno not in _OUTSIDE:
        return None
    where = f"{error.filename}: " if error.filename else ""
    remedy = "; make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{where}{error.strerror}{remedy}"


def shown(value: object, length: int = 200) -> str:
    """Return the beginning of a value as it is written in Python: in a message a long one hides the rest."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "an integer of too many digits"
    return text if len(text) <= length else f"{text[:length]}…"


def how_to_install(extra: str) -> str:
    """Return how to install an extra of this package, which no package index has."""
    return f"the extra `{extra}` installs it: pip install -e '.[{extra}]' in the clone, or pip install 'WHEEL[{extra}]'"


def printable(text: str, length: int = 500) -> str:
    """Return the beginning of a text that another machine sent as one line, without a terminal's control sequences."""
    spaces = "".join(" " if character.isspace() else character for character in text[:length])
    line = "".join(character if character.isprintable() else "?" for character in spaces)
    return line if len(text) <= length else f"{line}…"


class UserError(Exception):
    """An error outside the program. The message says what is wrong, where, and how to fix it."""


class ConfigError(UserError):
    """A configuration key has an invalid value.

    Parameters
    ----------
    key
        Dotted name of the key, as it is written with ``-o``.
    value
        The invalid value.
    remedy
        The allowed values, or what to do instead.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {shown(value)}: {remedy}")
        self.key = key


class RefusedRequestError(UserError):
    """A device does not do what its server asks for. The server gets the message: it names nothing of the device."""


class DataError(UserError):
    """A data set is missing, incomplete or too damaged to train on."""
