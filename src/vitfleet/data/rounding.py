"""Rounding that does not depend on parity."""


def round_half_up(value: float) -> int:
    """Round a non-negative number to the nearest integer, halves upwards (Python's ``round`` goes to the even one)."""
    return int(value + 0.5)
