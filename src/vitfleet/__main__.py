"""The command, as installed and as ``python -m vitfleet``."""

from vitfleet.cli import main

if __name__ == "__main__":
    main()
