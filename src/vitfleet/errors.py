"""Errors that are the user's to mend: one clear sentence, no traceback, exit code 2."""


class UserError(Exception):
    """Something outside the program is wrong: say what, where, and the remedy."""


class ConfigError(UserError):
    """A configuration key has a value that cannot work.

    Parameters
    ----------
    key
        Dotted name of the key, as it is written with ``-o``.
    value
        What was given.
    remedy
        The allowed range or what to do instead.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key


class DataError(UserError):
    """A data set is missing, incomplete or too damaged to train on."""
