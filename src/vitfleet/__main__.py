"""``python -m vitfleet`` is the command ``vitfleet``."""

from vitfleet.cli import main

main()
