"""Errors that the user can fix. The command prints their message without a traceback and exits with code 2."""


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
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key


class DataError(UserError):
    """A data set is missing, incomplete or too damaged to train on."""
